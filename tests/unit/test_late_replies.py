"""Draft replies that come when nobody expects them any more: scenario B24, within the process and over a real socket.

That tokens are right proves little here, since the target judges every tree: so what is counted is looked at as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle2.engine.draft import DraftRunner
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry import metrics
from eagle2.transport.messages import DraftReply, DraftStatus, DraftTree
from eagle2.transport.node import NodeLink
from eagle2.transport.server import NodeServer
from fakes.engines import INCARNATION, PROMPTS, Answer, EngineKit, draft_head, request
from fakes.proxies import Edit, MeddledLink, Meddler, ReplyProxy

WIRES = ("local", "socket")
# C goes on, A's reader leaves, B is put back: admitted in this order, so that B is the newest.
REQUESTS = [
    request(PROMPTS[0], max_tokens=70, ignore_eos=True),
    request(PROMPTS[1], max_tokens=70, ignore_eos=True, temperature=0.8, seed=5),
    request(PROMPTS[2], max_tokens=70, ignore_eos=True, temperature=0.7, seed=6, frequency_penalty=0.4),
]


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    return [EngineKit(None).answer(one) for one in REQUESTS]


@contextmanager
def paired(wire: str, folder: Path, **options: Any) -> Iterator[tuple[EngineKit, DraftRunner, Meddler]]:
    """An engine and its proposer, and what stands between them."""
    handler, meddler = draft_head(), Meddler()
    with ExitStack() as stack:
        if wire == "local":
            kit = EngineKit(handler, wrap=lambda link: MeddledLink(link, meddler), **options)
        else:
            upstream = folder / "p.sock"
            server = NodeServer(upstream, handler, INCARNATION, fingerprint="A")
            stack.callback(server.close)
            proxy = stack.enter_context(ReplyProxy(folder / "v.sock", upstream, meddler))

            def connect(_: object) -> NodeLink:
                return NodeLink.connect(proxy.path, verifier_incarnation=1, fingerprint="A", timeout_s=10)

            kit = EngineKit(handler, wrap=connect, **options)
        stack.callback(kit.pair.close)
        yield kit, handler, meddler


def step_until(kit: EngineKit, condition: Any) -> None:
    for _ in range(300):
        if condition():
            return
        kit.engine.step()
    raise AssertionError("it never came true")


@pytest.mark.parametrize("resumed", [False, True], ids=["while it waits", "after it was resumed"])
@pytest.mark.parametrize("wire", WIRES)
def test_cancelled_and_preempted_while_a_reply_is_500_ms_late(
    wire: str, resumed: bool, alone: list[Answer], tmp_path: Path
) -> None:
    """Three long requests in a pool too small for them. The reply that is owed speaks of all three as they were."""
    with paired(wire, tmp_path, num_slots=150, max_model_len=150, prefill_chunk=32, timeout_s=0.5) as parts:
        kit, handler, meddler = parts
        stats, scheduler = kit.stats, kit.engine.scheduler
        going_on, leaving, put_back = [Answer(), Answer(), Answer()]
        c, a, b = (
            kit.engine.submit(one, answer.commits.append)
            for one, answer in zip(REQUESTS, (going_on, leaving, put_back), strict=True)
        )
        step_until(kit, lambda: min(len(x.ids) for x in (going_on, leaving, put_back)) >= 3)
        assert scheduler.running == [c, a, b]
        assert stats.get(metrics.NUM_PREEMPTIONS) == 0

        meddler.hold()
        step_until(kit, lambda: stats.get(metrics.NUM_PREEMPTIONS) > 0)
        assert stats.get(metrics.DRAFT_TIMEOUTS) > 0, "a reply is owed"
        assert b in scheduler.waiting
        assert len(b.table) == 0
        kit.engine.cancel(a)
        drafts, stale = stats.get(metrics.NUM_DRAFTS), stats.get(metrics.STALE_REPLIES)
        before, heard = len(going_on.ids), len(leaving.ids)
        if resumed:
            step_until(kit, lambda: b in scheduler.running and b.num_to_prefill == 0)
            kit.engine.step()
            assert len(going_on.ids) > before, "C did not wait for anybody"
            assert stats.get(metrics.NUM_DRAFTS) == drafts, "nothing was drafted meanwhile"
        meddler.release()
        kit.run()

        assert put_back.ids == alone[2].ids, "token for token as without a preemption"
        assert (going_on.ids, going_on.text) == (alone[0].ids, alone[0].text)
        assert going_on.finish_reason == put_back.finish_reason == "length"
        assert leaving.ids == alone[1].ids[:heard], "nothing came behind the cancellation"
        assert leaving.finish_reason is None
        assert stats.get(metrics.STALE_REPLIES) > stale, "the late reply was dropped and counted"
        assert stats.get(metrics.NUM_DRAFTS) > drafts, "drafting goes on behind it"
        assert stats.get(metrics.NUM_REQUESTS_FAILED) == 0
        assert stats.get(metrics.PAIRINGS) == 1, "late is not dead"
        kit.check_idle()
        assert handler.pool.num_used == 0


def undisturbed(**options: Any) -> list[Answer]:
    return EngineKit(draft_head(), **options).answers(*REQUESTS)


def meddled(wire: str, folder: Path, edit: Edit, **options: Any) -> tuple[list[Answer], int, int]:
    """The answers when one reply to all three is edited, some steps behind the prompts; how many trees were verified in
    that step; how many replies or trees were dropped in all."""
    with paired(wire, folder, **options) as (kit, _, meddler):
        answers = [kit.submit(one) for one in REQUESTS]
        step_until(kit, lambda: min(len(answer.ids) for answer in answers) >= 4)
        assert kit.stats.get(metrics.STALE_REPLIES) == 0
        before = kit.stats.get(metrics.NUM_DRAFTS)
        meddler.once(edit)
        kit.engine.step()
        verified = kit.stats.get(metrics.NUM_DRAFTS) - before
        kit.run()
        kit.check_idle()
        return answers, int(verified), int(kit.stats.get(metrics.STALE_REPLIES))


def outcomes(answers: list[Answer]) -> list[tuple[list[int], str, str | None]]:
    return [(answer.ids, answer.text, answer.finish_reason) for answer in answers]


@pytest.mark.parametrize("wire", WIRES)
def test_a_reply_delivered_twice(wire: str, alone: list[Answer], tmp_path: Path) -> None:
    """The second is dropped: not even the counts of the requests show it."""
    answers, verified, dropped = meddled(wire, tmp_path, lambda reply: [reply, reply])
    expected = undisturbed()
    assert outcomes(answers) == outcomes(expected) == outcomes(alone)
    assert [answer.usage for answer in answers] == [answer.usage for answer in expected]
    assert (verified, dropped) == (3, 1)


@pytest.mark.parametrize("wire", WIRES)
def test_the_reply_to_an_earlier_step_again(wire: str, alone: list[Answer], tmp_path: Path) -> None:
    """Ahead of the one that is asked for, whose trees are used as if nothing had come."""
    expected = undisturbed()
    answers, verified, dropped = meddled(wire, tmp_path, lambda reply: [replace(reply, step=reply.step - 1), reply])
    assert outcomes(answers) == outcomes(expected) == outcomes(alone)
    assert [answer.usage for answer in answers] == [answer.usage for answer in expected]
    assert (verified, dropped) == (3, 1)


@pytest.mark.parametrize("wire", WIRES)
def test_trees_of_an_older_cycle(wire: str, alone: list[Answer], tmp_path: Path) -> None:
    """In a reply to the right step: none is believed, neither its nodes nor what it says is held. Of one sequence
    only the older tree comes, of another one both."""
    edited: list[DraftTree] = []

    def older(reply: DraftReply) -> list[DraftReply]:
        first, second, *others = reply.trees
        edited.extend([replace(first, cycle=first.cycle - 1, held=0), replace(second, cycle=second.cycle - 1, held=0)])
        return [replace(reply, trees=(*edited, second, *others))]

    expected = undisturbed()
    answers, verified, dropped = meddled(wire, tmp_path, older)
    assert outcomes(answers) == outcomes(expected) == outcomes(alone)
    assert (verified, dropped) == (2, 2), "the first sequence had no tree in that step"
    assert [answer.usage for answer in answers[1:]] == [answer.usage for answer in expected[1:]]


def empty(tree: DraftTree) -> DraftTree:
    return replace(tree, tokens=tree.tokens[:0], parents=tree.parents[:0], scores=tree.scores[:0])


@pytest.mark.parametrize("how", ["one reply", "two replies"])
@pytest.mark.parametrize("wire", WIRES)
def test_depth_0_followed_by_depth_5_for_the_same_cycle(
    wire: str, how: str, alone: list[Answer], tmp_path: Path
) -> None:
    """The first word counts: nothing is verified but the roots, and the deep trees are dropped."""

    def twice(reply: DraftReply) -> list[DraftReply]:
        assert all(tree.status == DraftStatus.OK for tree in reply.trees)
        roots = tuple(map(empty, reply.trees))
        if how == "one reply":
            return [replace(reply, trees=(*roots, *reply.trees))]
        return [replace(reply, trees=roots), reply]

    shape = TreeShape(5, 3, 10)
    answers, verified, dropped = meddled(wire, tmp_path, twice, shape=shape)
    assert outcomes(answers) == outcomes(undisturbed(shape=shape)) == outcomes(alone)
    assert (verified, dropped) == (0, 3 if how == "one reply" else 1)


@pytest.mark.parametrize("wire", WIRES)
def test_the_last_reply_of_all_is_late(wire: str, alone: list[Answer], tmp_path: Path) -> None:
    """It comes when nobody decodes any more, and is taken: the gauges tell what the proposer holds now."""
    with paired(wire, tmp_path, timeout_s=0.05) as (kit, handler, meddler):
        answers = [kit.submit(one) for one in REQUESTS]
        step_until(kit, lambda: min(len(answer.ids) for answer in answers) >= 60)
        meddler.hold()
        kit.run()
        assert outcomes(answers) == outcomes(alone)
        assert kit.stats.get(metrics.KV_SLOTS_USED, side="draft") > 0, "as far as has been heard"
        meddler.release()
        limit = time.monotonic() + 10
        while kit.stats.get(metrics.KV_SLOTS_USED, side="draft"):
            assert time.monotonic() < limit, "nobody has asked"
            kit.engine.step()
        assert handler.pool.num_used == 0
        assert kit.stats.get(metrics.PAIRINGS) == 1
