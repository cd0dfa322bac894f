"""This engine, its proposer in a process of its own: ``eagle2_adapter.py off|fixed|adaptive SHAPE THREADS``.

SHAPE, as drafted tokens/depth/top_k, is every tree's, or the largest one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator
from typing import cast

from line_protocol import serve

from eagle2.config import EngineSettings, ModelSettings, Settings
from eagle2.evaluation.load.contenders import Contender, LoadedEngines
from eagle2.evaluation.measure import bench_request, wait_until_paired
from eagle2.evaluation.trees import parse_shapes
from eagle2.protocol import Commit


def main() -> None:
    kind, (shape,), threads = sys.argv[1], parse_shapes(sys.argv[2]), int(sys.argv[3])
    contender = Contender(None) if kind == "off" else Contender(shape, adaptive=kind == "adaptive")
    settings = Settings(
        model=ModelSettings(dtype="bfloat16"),
        engine=EngineSettings(max_sequences=1, threads=threads, prefix_cache=False),
    )
    engines = LoadedEngines([contender], settings)
    engine = engines[contender.name]
    with asyncio.Runner() as runner:
        if contender.shape is not None:
            runner.run(wait_until_paired(engine.service))

        def stream(prompt_ids: list[int], max_tokens: int) -> Iterator[list[int]]:
            request = bench_request(prompt_ids, max_tokens, speculation=contender.shape is not None, name="peers")
            commits = cast("AsyncGenerator[Commit, None]", engine.service.generate(request))
            while True:
                commit = runner.run(anext(commits))
                yield list(commit.token_ids)
                if commit.finish_reason is not None:
                    runner.run(commits.aclose())
                    return

        serve(stream, ("eagle2", "torch", "numba"), engine.cpu_s)
    engines.close()


if __name__ == "__main__":
    main()
