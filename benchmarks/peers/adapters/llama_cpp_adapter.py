"""llama.cpp through the C functions of llama-cpp-python. ``llama_cpp_adapter.py SOURCE TARGET THREADS``.

SOURCE is a GGUF file of any type, TARGET the BF16 one that is answered with; it is made where it is missing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import llama_cpp as lib
from line_protocol import serve

_CONTEXT = 2048
_BF16 = 32  # LLAMA_FTYPE_MOSTLY_BF16


@lib.llama_log_callback
def _ignore(_level: int, _text: bytes, _user_data: int) -> None:
    """Nothing is logged."""


def main() -> None:
    source, target, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    lib.llama_log_set(_ignore, None)
    lib.llama_backend_init()
    if not target.is_file():
        _convert(source, target, threads)
    model = lib.llama_model_load_from_file(os.fsencode(target), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {target}.")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = _CONTEXT, _CONTEXT, threads, threads
    context = lib.llama_init_from_model(model, params)
    vocabulary = lib.llama_model_get_vocab(model)
    sampler = lib.llama_sampler_init_greedy()

    def stream(prompt_ids: list[int], max_tokens: int) -> Iterator[list[int]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        ids = (lib.llama_token * len(prompt_ids))(*prompt_ids)
        for _ in range(max_tokens):
            if lib.llama_decode(context, lib.llama_batch_get_one(ids, len(ids))) != 0:
                raise SystemExit("llama.cpp could not decode.")
            token = lib.llama_sampler_sample(sampler, context, -1)
            yield [token]
            if lib.llama_vocab_is_eog(vocabulary, token):
                return
            ids = (lib.llama_token * 1)(token)

    serve(stream, ("llama_cpp_python",), built=lib.llama_print_system_info().decode())


def _convert(source: Path, target: Path, threads: int) -> None:
    """All matrices in bfloat16, from whatever they are in ``source``."""
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = _BF16, True, threads
    part = target.with_suffix(".part")
    if lib.llama_model_quantize(os.fsencode(source), os.fsencode(part), ctypes.byref(params)) != 0:
        raise SystemExit(f"llama.cpp cannot convert {source}.")
    part.rename(target)


main()
