"""What every link promises, real or fake."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from eagle2.errors import LinkDownError
from eagle2.transport.base import DraftHandler, ProposerLink
from eagle2.transport.local import LocalLink
from eagle2.transport.messages import DraftEntry, DraftReply, DraftStatus, DraftStep
from eagle2.transport.node import NodeLink
from eagle2.transport.server import NodeServer
from fakes.links import (
    BookkeepingHandler,
    DelayedLink,
    DuplicatingLink,
    DyingLink,
    ForeignLink,
    OracleHandler,
    RandomHandler,
    StaleLink,
)

INCARNATION = 41
Open = Callable[[DraftHandler], ProposerLink]

WRAPPERS: dict[str, Callable[[ProposerLink], ProposerLink]] = {
    "plain": lambda link: link,
    "delayed": lambda link: DelayedLink(link, late=2),
    "duplicating": DuplicatingLink,
    "stale": StaleLink,
    "foreign": lambda link: ForeignLink(link, incarnation=INCARNATION + 1),
    "dying-late": lambda link: DyingLink(link, steps=10_000),
}


@pytest.fixture(params=["local", "node"])
def carrier(request: pytest.FixtureRequest) -> Iterator[Open]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="e2"))

        def open_link(handler: DraftHandler) -> ProposerLink:
            if request.param == "local":
                return LocalLink(handler, incarnation=INCARNATION)
            server = NodeServer(Path(folder) / "p.sock", handler, INCARNATION, fingerprint="m")
            stack.callback(server.close)
            link = NodeLink.connect(server.path, verifier_incarnation=5, fingerprint="m", timeout_s=10)
            stack.callback(link.close)
            return link

        yield open_link


@pytest.fixture(params=WRAPPERS)
def connect(request: pytest.FixtureRequest, carrier: Open) -> Open:
    return lambda handler: WRAPPERS[request.param](carrier(handler))


def oracle(slots: int = 100) -> OracleHandler:
    """Counts on from the root: 7 is followed by 8, 9, ..."""
    return OracleHandler(
        lambda context: list(range(context[-1] + 1, context[-1] + 9)), incarnation=INCARNATION, slots=slots
    )


def step_of(number: int, *entries: DraftEntry, closed: tuple[int, ...] = (), depth: int = 4) -> DraftStep:
    return DraftStep(5, number, depth, 3, 6, entries, closed)


def entry_of(sequence: int, base: int, tokens: list[int], *, cycle: int = 1, draft: bool = True) -> DraftEntry:
    features = torch.randn(len(tokens), 8).bfloat16()
    return DraftEntry(sequence, cycle, base, features, torch.tensor(tokens, dtype=torch.int64), draft)


def ask(link: ProposerLink, step: DraftStep) -> DraftReply:
    """Send and wait as an engine does: whatever does not answer this step is dropped."""
    link.send(step)
    for _ in range(100):
        reply = link.receive(10.0)
        if reply is not None and (reply.incarnation, reply.step) == (link.incarnation, step.step):
            return reply
    raise AssertionError(f"step {step.step} was never answered")


def test_the_link_names_the_proposer(connect: Open) -> None:
    link = connect(oracle())
    assert link.incarnation == INCARNATION


def test_a_step_is_answered_by_value(connect: Open) -> None:
    handler = oracle()
    link = connect(handler)
    entries = (entry_of(2, 0, [3, 4, 5], cycle=9), entry_of(8, 0, [20], cycle=1))
    reply = ask(link, step_of(77, *entries, closed=(6,)))
    assert [(tree.sequence, tree.cycle, tree.status, tree.held) for tree in reply.trees] == [
        (2, 9, DraftStatus.OK, 3),
        (8, 1, DraftStatus.OK, 1),
    ]
    assert reply.trees[0].tokens.tolist() == [6, 7, 8, 9]
    assert reply.trees[0].parents.tolist() == [0, 1, 2, 3]
    assert reply.trees[1].tokens.tolist() == [21, 22, 23, 24]
    assert reply.trees[0].tokens.dtype == reply.trees[0].parents.dtype == torch.int64
    assert reply.trees[0].scores.dtype == torch.float32
    assert reply.received <= reply.finished
    (seen,) = handler.steps
    assert (seen.incarnation, seen.step, seen.depth, seen.top_k, seen.num_draft_tokens) == (5, 77, 4, 3, 6)
    assert seen.closed == (6,)
    assert all(torch.equal(one.features, other.features) for one, other in zip(seen.entries, entries, strict=True))


def test_the_books_of_a_proposer(connect: Open) -> None:
    link = connect(oracle(slots=6))
    assert ask(link, step_of(1, entry_of(1, 0, [3, 4], draft=False))).trees[0].status is DraftStatus.SYNCED
    behind = ask(link, step_of(2, entry_of(1, 4, [9]))).trees[0]
    assert (behind.status, behind.held, behind.tokens.numel()) == (DraftStatus.MISSING, 2, 0)
    rewritten = ask(link, step_of(3, entry_of(1, 1, [30, 31]))).trees[0]
    assert (rewritten.held, rewritten.tokens.tolist()) == (3, [32, 33, 34, 35])
    full = ask(link, step_of(4, entry_of(2, 0, [1, 2, 3, 4]))).trees[0]
    assert (full.status, full.held) == (DraftStatus.FULL, 0)
    freed = ask(link, step_of(5, entry_of(2, 0, [1, 2, 3, 4]), closed=(1,)))
    assert freed.trees[0].status is DraftStatus.OK
    assert (freed.slots_used, freed.slots_total) == (4, 6)


def test_a_non_finite_row_harms_nobody_else(connect: Open) -> None:
    link = connect(oracle())
    entries = [entry_of(sequence, 0, [sequence]) for sequence in range(4)]
    entries[2].features[0, 3] = float("nan")
    trees = ask(link, step_of(1, *entries)).trees
    assert [tree.status for tree in trees] == [
        DraftStatus.OK,
        DraftStatus.OK,
        DraftStatus.NON_FINITE,
        DraftStatus.OK,
    ]
    assert [tree.held for tree in trees] == [1, 1, 0, 1]


def test_empty_steps_and_empty_trees(connect: Open) -> None:
    link = connect(oracle())
    assert ask(link, step_of(1)).trees == ()
    assert ask(link, step_of(2, entry_of(1, 0, [5]), depth=0)).trees[0].tokens.tolist() == []
    tree = ask(link, step_of(3, entry_of(1, 1, []))).trees[0]
    assert (tree.held, tree.tokens.tolist()) == (1, [6, 7, 8, 9])


def test_random_trees_are_well_formed_and_repeatable(connect: Open) -> None:
    link = connect(RandomHandler(seed=3, vocab_size=11, incarnation=INCARNATION))
    for number in range(6):
        tree = ask(link, step_of(2 * number, entry_of(number, 0, [number, 4]), depth=3)).trees[0]
        again = ask(link, step_of(2 * number + 1, entry_of(number, 0, [number, 4]), depth=3)).trees[0]
        assert torch.equal(tree.tokens, again.tokens)
        assert torch.equal(tree.parents, again.parents)
        depth, paths = [0], set()
        for index, parent in enumerate(tree.parents.tolist()):
            assert 0 <= parent <= index
            depth.append(depth[parent] + 1)
            paths.add((parent, int(tree.tokens[index])))
            if parent:
                assert tree.scores[index] <= tree.scores[parent - 1]
        assert max(depth) <= 3
        assert len(paths) == tree.tokens.numel() == 6


def test_several_steps_under_way_are_answered_in_order(connect: Open) -> None:
    link = connect(oracle())
    for number in range(3):
        link.send(step_of(number, entry_of(number, 0, [number])))
    found: list[int] = []
    for _ in range(100):
        reply = link.receive(10.0)
        if reply is not None and reply.incarnation == link.incarnation and reply.step not in found:
            found.append(reply.step)
        if len(found) == 3:
            break
    assert found == [0, 1, 2]


def test_nothing_asked_nothing_received(connect: Open) -> None:
    assert connect(oracle()).receive(0.01) is None


def test_a_new_link_resets_the_handler(connect: Open) -> None:
    handler = oracle()
    link = connect(handler)
    ask(link, step_of(1))
    assert handler.resets == 1


class _FailingHandler(BookkeepingHandler):
    def draft(self, context: list[int], step: DraftStep) -> list[tuple[int, int, float]]:
        if step.step == 2:
            raise ZeroDivisionError("a fault of the head")
        return []


def test_a_failing_handler_takes_the_link_down_for_good(connect: Open) -> None:
    link = connect(_FailingHandler(incarnation=INCARNATION))
    ask(link, step_of(1, entry_of(1, 0, [4])))
    with pytest.raises(LinkDownError):
        ask(link, step_of(2, entry_of(1, 1, [5])))
    with pytest.raises(LinkDownError):
        ask(link, step_of(3, entry_of(1, 1, [5])))


def test_a_closed_link_is_down(connect: Open) -> None:
    link = connect(oracle())
    ask(link, step_of(1))
    link.close()
    link.close()
    with pytest.raises(LinkDownError):
        link.send(step_of(2))
    with pytest.raises(LinkDownError):
        while link.receive(10.0) is not None:
            pass


@pytest.mark.parametrize("at_send", [False, True])
def test_the_dying_link_dies_when_told(carrier: Open, at_send: bool) -> None:
    link = DyingLink(carrier(oracle()), steps=2, at_send=at_send)
    ask(link, step_of(1))
    ask(link, step_of(2))
    if not at_send:
        link.send(step_of(3))
        with pytest.raises(LinkDownError):
            link.receive(10.0)
    with pytest.raises(LinkDownError):
        link.send(step_of(4))


def test_what_the_misbehaving_links_deliver(carrier: Open) -> None:
    inner = carrier(oracle())

    def deliveries(link: ProposerLink, *numbers: int) -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for number in numbers:
            link.send(step_of(number))
            for _ in range(2):
                reply = link.receive(10.0 if number not in [item[1] for item in found if item] else 0.0)
                found.append(None if reply is None else (reply.incarnation, reply.step))
        return found

    own = INCARNATION
    assert deliveries(DelayedLink(inner, late=1), 1, 2) == [None, (own, 1), None, (own, 2)]
    assert deliveries(DuplicatingLink(inner), 3, 4) == [(own, 3), (own, 3), (own, 4), (own, 4)]
    assert deliveries(StaleLink(inner), 5, 6) == [(own, 5), None, (own, 5), (own, 6)]
    assert deliveries(ForeignLink(inner, incarnation=7), 8) == [(7, 8), (own, 8)]
