"""The comparison with other programs: adapters as processes, and what is reported of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.peers.peers import OFF, TRANSFORMERS, Places, start_peer
from benchmarks.peers.peers_report import lost, peers_json, peers_text, times
from benchmarks.peers.workers import ADAPTERS, Worker
from eagle2.errors import ConfigError, UnavailableError
from eagle2.evaluation.measure import Generation
from eagle2.evaluation.speed import Run, measure_speed

# Counts on from the prompt's last token; makes noise on stdout, as libraries do.
_COUNTING = """
import sys
sys.path.insert(0, {adapters!r})
from line_protocol import serve

print("noise")

def stream(prompt_ids, max_tokens):
    print("more noise")
    if prompt_ids[-1] == 13:
        sys.exit(5)
    token = prompt_ids[-1]
    for _ in range(0, max_tokens, {step}):
        yield [(token := token + {stride}) for _ in range({step})]

serve(stream, ("numpy",), built="for a test")
"""


@contextmanager
def _worker(folder: Path, name: str, step: int = 1, stride: int = 1) -> Iterator[Worker]:
    script = folder / f"{step}-{stride}.py"
    script.write_text(_COUNTING.format(adapters=str(ADAPTERS), step=step, stride=stride))
    worker = Worker(name, Path(sys.executable), str(script), [], {}, folder / "logs" / f"{step}-{stride}.log")
    try:
        worker.wait()
        yield worker
    finally:
        worker.close()


def test_an_adapter_answers_and_its_noise_goes_to_the_log(tmp_path: Path) -> None:
    with _worker(tmp_path, "x", step=2) as worker:
        assert set(worker.about["versions"]) == {"numpy"}
        assert worker.about["built"] == "for a test"
        first, second = worker([1, 5], 4), worker([7], 2)
    assert first.token_ids == (6, 7, 8, 9)
    assert first.cycles == 1  # two steps, the first of which is the prompt's
    assert 0 < first.first_token_s <= first.total_s
    assert second.token_ids == (8, 9)
    assert len(worker.cpu_s) == 2
    assert (tmp_path / "logs" / "2-1.log").read_text().split("\n")[:3] == ["noise", "more noise", "more noise"]


def test_an_adapter_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    with (
        _worker(tmp_path, "llama.cpp") as worker,
        pytest.raises(UnavailableError, match=r"llama\.cpp ended with status 5; .*1-1\.log says why"),
    ):
        worker([13], 4)


def test_the_report_compares_with_plain_decoding_and_counts_equal_answers(tmp_path: Path) -> None:
    with (
        _worker(tmp_path, OFF) as plain,
        _worker(tmp_path, "eagle2, tree 10/2/8", step=2) as tree,
        _worker(tmp_path, TRANSFORMERS, stride=3) as other,
    ):
        workers = [plain, tree, other]
        prompts = {"p": (1,), "q": (2, 3)}
        runs = measure_speed({worker.name: worker for worker in workers}, prompts, 8, 2, lambda _: None)
    values = json.loads(json.dumps(peers_json(workers, runs), allow_nan=False))["systems"]
    assert [values[worker.name]["same_answers"] for worker in workers] == [2, 2, 0]
    assert [values[worker.name]["tau"] for worker in workers] == [1.0, 7 / 3, 1.0]
    assert lost(workers, runs) == 0
    text = peers_text(workers, runs)
    assert "0 of 2" in text
    assert f"answers as {OFF}" in text
    assert "round 2" in text
    assert "- transformers: numpy " in text


def test_other_tokens_of_ours_are_counted_as_lost(tmp_path: Path) -> None:
    with _worker(tmp_path, OFF) as plain, _worker(tmp_path, "eagle2, adaptive", stride=2) as tree:
        runs = measure_speed({worker.name: worker for worker in (plain, tree)}, {"p": (1,)}, 4, 2, lambda _: None)
    assert lost([plain, tree], runs) == 2


def test_times_are_of_pairs_of_answers() -> None:
    # Twice as fast on one prompt and eight times on the other: four times. A single token has no rate.
    seconds = {("a", "p"): 2.0, ("b", "p"): 4.0, ("a", "q"): 1.0, ("b", "q"): 8.0}
    runs = [
        Run(number, system, prompt, Generation((1,) * 9, 1.0, 1.0 + taken * number))
        for (system, prompt), taken in seconds.items()
        for number in (1, 2)
    ]
    runs += [Run(1, system, "r", Generation((1,), 1.0, 1.0)) for system in "ab"]
    ratio = times("a", "b", runs)
    assert ratio.mean == pytest.approx(4.0)
    assert ratio.interval is not None
    assert ratio.interval[0] < 4.0 < ratio.interval[1]


def test_a_peer_that_was_not_built_says_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m benchmarks\.peers build vllm"):
        start_peer(Places(tmp_path, 1), "vllm")
