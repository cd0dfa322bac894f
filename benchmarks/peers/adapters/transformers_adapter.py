"""``transformers`` generate with its defaults: ``transformers_adapter.py CHECKPOINT_FOLDER THREADS``."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from line_protocol import serve
from transformers import AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()

    def stream(prompt_ids: list[int], max_tokens: int) -> Iterator[list[int]]:
        tokens = _Tokens()
        prompt = torch.tensor([prompt_ids])

        def generate() -> None:
            torch.set_num_threads(int(sys.argv[2]))
            with torch.inference_mode():
                model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    streamer=tokens,
                )

        thread = threading.Thread(target=generate)
        thread.start()
        yield from tokens
        thread.join()

    serve(stream, ("transformers", "torch"))


class _Tokens:
    """A streamer that another thread reads: it is given the prompt, then every token as it is chosen."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self._queue.put(value.tolist())
        self._has_prompt = True

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[list[int]]:
        while (tokens := self._queue.get()) is not None:
            yield tokens


main()
