"""A head that scores a part of the vocabulary: what it drafts, and that nobody sees it in the answers."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle2.config import EngineSettings, ModelSettings, PairSettings, Settings
from eagle2.engine.assemble import load_checkpoint, load_draft_runner
from eagle2.engine.draft import DraftRunner
from eagle2.errors import ConfigError, ModelError
from eagle2.models.draft_vocabulary import TABLE_NAME, DraftVocabulary
from eagle2.proposer.start import start_proposer
from eagle2.speculative.draft import DraftNetwork, TreeShape, draft_trees
from eagle2.speculative.tree import Tree
from eagle2.transport.base import DraftHandler
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep, DraftTree
from eagle2.transport.node import NodeLink
from fakes.checkpoints import golden_head, write_golden_target
from fakes.engines import EOS, INCARNATION, PROMPTS, EngineKit, cached_target, draft_head, request
from golden_pair import load_head

DTYPES = [torch.float32, torch.bfloat16]
LETTERS = [*b" aeiou", EOS]


def subset_head(ids: list[int], dtype: torch.dtype = torch.float32, vocab_size: int = 258) -> DraftRunner:
    model = load_head("A", cached_target("A", dtype), dtype, torch.tensor(ids))
    return DraftRunner(model, 4096, incarnation=INCARNATION, vocab_size=vocab_size)


class Watched:
    """Hands on to a handler and keeps what it drafted."""

    def __init__(self, handler: DraftRunner) -> None:
        self._handler = handler
        self.drafted: list[int] = []

    def handle(self, step: DraftStep) -> DraftReply:
        reply = self._handler.handle(step)
        self.drafted += [token for tree in reply.trees for token in tree.tokens.tolist()]
        return reply

    def reset(self) -> None:
        self._handler.reset()


def tree_of(handler: DraftHandler, dtype: torch.dtype = torch.float32, *, depth: int = 3, top_k: int = 4) -> DraftTree:
    features = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    entry = DraftEntry(1, 0, 0, features, torch.tensor(list(b"the queen")))
    (tree,) = handler.handle(DraftStep(2, 0, depth, top_k, 12, (entry,))).trees
    return tree


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [[EOS], LETTERS, list(range(97, 123))], ids=["1", "7", "26"])
def test_answers_are_those_without_speculation(ids: list[int], dtype: torch.dtype) -> None:
    sampling: tuple[dict[str, object], ...] = (
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.95},
        {"frequency_penalty": 1.1},
    )
    requests = [request(p, max_tokens=32, ignore_eos=i % 2 == 0, **sampling[i % 3]) for i, p in enumerate(PROMPTS)]
    expected = EngineKit(None, dtype=dtype).answers(*requests)
    watched = Watched(subset_head(ids, dtype))
    kit = EngineKit(watched, dtype=dtype, shape=TreeShape(3, 8, 20))
    answers = kit.answers(*requests)
    assert [(a.ids, a.text, a.finish_reason) for a in answers] == [(a.ids, a.text, a.finish_reason) for a in expected]
    assert watched.drafted
    assert set(watched.drafted) <= set(ids)
    assert set().union(*(answer.ids for answer in answers)) - set(ids), "the target says more than the head may draft"


def test_what_is_drafted_is_accepted_as_target_ids() -> None:
    """A head that scores what the answers are made of saves cycles; one whose ids were mixed up would not."""
    one = request(PROMPTS[0], max_tokens=60, ignore_eos=True)
    whole = EngineKit(draft_head()).answer(one)
    letters = EngineKit(subset_head([*range(32, 127), EOS])).answer(one)
    assert letters.ids == whole.ids
    assert whole.usage.accepted_prediction_tokens > 10
    assert letters.usage.accepted_prediction_tokens >= whole.usage.accepted_prediction_tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_ids_in_order_are_the_whole_head(dtype: torch.dtype) -> None:
    whole, all_ids = tree_of(draft_head(dtype=dtype), dtype), tree_of(subset_head(list(range(258)), dtype), dtype)
    assert whole.tokens.tolist() == all_ids.tokens.tolist()
    assert whole.parents.tolist() == all_ids.parents.tolist()
    torch.testing.assert_close(whole.scores, all_ids.scores, atol=1e-5, rtol=0)


def test_the_best_of_a_subset_and_their_confidence_within_it() -> None:
    """Level 1: the whole head's log-probabilities of those ids, renormalised."""
    ids = [*range(97, 123), 32, EOS]
    whole = subset_head(list(range(258)))
    tree = tree_of(subset_head(ids), depth=1, top_k=4)
    logits = _level_one_logits(whole)
    log_probs = logits[ids].log_softmax(0)
    best = log_probs.topk(4)
    assert sorted(tree.tokens.tolist()) == sorted(ids[i] for i in best.indices.tolist())
    torch.testing.assert_close(tree.scores.sort(descending=True).values, best.values, atol=1e-4, rtol=0)


def _level_one_logits(runner: DraftRunner) -> Tensor:
    seen: list[Tensor] = []

    def watched(network: DraftNetwork, features: Tensor, logits: Tensor, roots: Tensor, shape: TreeShape) -> Tree:
        seen.append(logits)
        return draft_trees(network, features, logits, roots, shape)

    runner.policy = watched
    tree_of(runner, depth=1)
    return seen[0][0]


def test_a_top_k_above_the_subset_counts_as_the_subset() -> None:
    tree = tree_of(subset_head([32, 101, EOS]), depth=2, top_k=10)
    assert tree.status == DraftStatus.OK
    assert len(tree.tokens) == 3 + 9
    assert sorted(tree.tokens[:3].tolist()) == [32, 101, EOS]
    runner = subset_head([32, 101, EOS])
    tree_of(runner, depth=4, top_k=10)
    runner.check_integrity()


def test_the_same_tree_twice() -> None:
    first, second = tree_of(subset_head(LETTERS)), tree_of(subset_head(LETTERS))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.scores, second.scores)


def test_ids_that_cannot_come_out_are_a_fault() -> None:
    with pytest.raises(AssertionError, match="cannot come out"):
        subset_head([32, 300], vocab_size=258)


# --- from settings -------------------------------------------------------------------------------------------------


@pytest.fixture
def write_pair(tmp_path: Path) -> Callable[..., Settings]:
    """Settings for the golden pair; the head has a table that counts the letters of a text."""

    def write(size: object, text: bytes | None = b"eeeeee      tttttaaaaooo") -> Settings:
        target, head = write_golden_target(tmp_path / "target"), tmp_path / "head"
        shutil.copytree(golden_head(), head, dirs_exist_ok=True)
        if text is not None:
            DraftVocabulary.from_counts(torch.bincount(torch.tensor(list(text)), minlength=258)).save(head)
        model = ModelSettings(target=str(target), draft=str(head), dtype="float32", draft_vocabulary=size)  # type: ignore[arg-type]
        return Settings(model=model, engine=EngineSettings(kv_slots=1024, threads=1))

    return write


def runner_of(settings: Settings) -> DraftRunner:
    return load_draft_runner(settings, load_checkpoint(settings.model), INCARNATION)


def scored(settings: Settings) -> list[int] | None:
    ids = runner_of(settings).model.token_ids
    return None if ids is None else ids.tolist()


def test_the_setting_says_how_many(write_pair: Callable[..., Settings], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eagle2.engine.assemble"):
        assert scored(write_pair(3)) == sorted([*b" e", EOS])
        assert scored(write_pair(5000)) == sorted([*b" etao", EOS])
        assert scored(write_pair("all")) is None
        assert scored(write_pair("auto")) is None
    said = [record.getMessage() for record in caplog.records if "scores" in record.getMessage()]
    assert said == [
        "The draft head scores 3 of 258 tokens, 50.0 % of the text that its table counts.",
        "The draft head scores 6 of 258 tokens, 100.0 % of the text that its table counts.",
        *["The draft head scores all 258 tokens."] * 2,
    ]


def test_a_number_without_a_table_is_refused(write_pair: Callable[..., Settings]) -> None:
    with pytest.raises(ConfigError, match=rf"draft_vocabulary is 64, .*head/{TABLE_NAME} is not there"):
        runner_of(write_pair(64, text=None))
    assert scored(write_pair("auto", text=None)) is None


def test_a_broken_table_is_refused_even_if_it_is_not_asked_for(write_pair: Callable[..., Settings]) -> None:
    settings = write_pair("all")
    assert settings.model.draft is not None
    (Path(settings.model.draft) / TABLE_NAME).write_bytes(b"nothing")
    with pytest.raises(ModelError, match=TABLE_NAME):
        runner_of(settings)


def test_the_proposer_service_drafts_from_the_subset(write_pair: Callable[..., Settings]) -> None:
    with tempfile.TemporaryDirectory(prefix="e2") as folder:
        settings = replace(write_pair(4), pair=PairSettings(socket_dir=folder))
        service = start_proposer(settings)
        try:
            fingerprint = load_checkpoint(settings.model).fingerprint
            link = NodeLink.connect(
                service.metadata()["socket"], verifier_incarnation=2, fingerprint=fingerprint, timeout_s=10
            )
            entry = DraftEntry(1, 0, 0, torch.randn(5, 64), torch.tensor(list(b"the q")))
            link.send(DraftStep(2, 0, 3, 4, 12, (entry,)))
            reply = link.receive(30.0)
            link.close()
        finally:
            service.close()
    assert reply is not None
    (tree,) = reply.trees
    assert len(tree.tokens) == 12
    assert set(tree.tokens.tolist()) <= {*b" et", EOS}
