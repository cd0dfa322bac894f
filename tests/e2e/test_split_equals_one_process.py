"""B21: features cross the pair by value. Drafter and verifier apart accept exactly what they accept in one process."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server
from eagle2.config import load_settings
from eagle2.protocol import Commit, GenerationRequest, SamplingParams, StopConditions
from eagle2.verifier.start import start_in_one_process

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS = [f"{start} the {end}" for start in ("in", "on", "at", "of", "to") for end in ("rest", "nest of ants")]
MAX_TOKENS = 30
Outcome = tuple[list[int], int, int]


def from_server(server: Server, prompt: str) -> Outcome:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    call = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    details = answer["usage"]["completion_tokens_details"]
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids, details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


async def from_one_process(target: Path, head: Path) -> list[Outcome]:
    from eagle2.evaluation.measure import wait_until_paired
    from eagle2.text.tokenizer import Tokenizer

    model = {"target": str(target), "draft": str(head), "dtype": "float32"}
    engine = {"threads": 1, "tree_budget": "fixed", "depth": 2, "top_k": 8, "num_draft_tokens": 10}  # as the server's
    service = start_in_one_process(load_settings({"model": model, "engine": engine}))
    try:
        await wait_until_paired(service)
        tokenizer = Tokenizer((await service.describe()).tokenizer_json)
        outcomes = []
        for prompt in PROMPTS:
            request = GenerationRequest(
                request_id=prompt,
                tenant="t",
                prompt_ids=tuple(tokenizer.encode(prompt, add_special_tokens=True)),
                sampling=SamplingParams(seed=0, temperature=0.0),
                stop=StopConditions(MAX_TOKENS, ignore_eos=True),
            )
            commits: list[Commit] = [commit async for commit in service.generate(request)]
            usage = commits[-1].usage
            assert usage is not None
            ids = [token for commit in commits for token in commit.token_ids]
            outcomes.append((ids, usage.accepted_prediction_tokens, usage.rejected_prediction_tokens))
        return outcomes
    finally:
        service.close()


def test_ids_and_acceptance_are_those_of_one_process(server: Server, tiny_model: tuple[Path, Path]) -> None:
    apart = [from_server(server, prompt) for prompt in PROMPTS]
    together = asyncio.run(from_one_process(*tiny_model))
    assert [ids for ids, _, _ in apart] == [ids for ids, _, _ in together]
    # A restart of the proposer by another test may cost a cycle its tree, no more.
    assert sum(accepted for _, accepted, _ in apart) == pytest.approx(sum(a for _, a, _ in together), abs=1)
    assert sum(rejected for _, _, rejected in apart) > 100
