"""The whole soak: one engine under mixed traffic with a proposer that may die, then every answer compared."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.soak.clients import Clients
from benchmarks.soak.memory import Census, resident_bytes
from benchmarks.soak.outcome import Outcome, difference, question
from benchmarks.soak.proposers import ProcessProposer, Proposer, ThreadProposer
from benchmarks.soak.references import References
from benchmarks.soak.traffic import Ask, Sizes, traffic
from eagle2.config import Settings
from eagle2.engine.assemble import Checkpoint, build_engine, load_checkpoint, load_draft_runner
from eagle2.engine.engine import Engine
from eagle2.engine.pair import Connect
from eagle2.errors import UnavailableError
from eagle2.telemetry import metrics

Say = Callable[[str], None]

_START_S = 300.0  # for the first proposer to load its head

_COUNTS = {
    "preemptions": metrics.NUM_PREEMPTIONS,
    "aborted": metrics.NUM_REQUESTS_ABORTED,
    "failed": metrics.NUM_REQUESTS_FAILED,
    "cycles": metrics.CYCLES,
    "generated_tokens": metrics.GENERATION_TOKENS,
    "prefilled_tokens": metrics.PREFILL_TOKENS,
    "cached_prompt_tokens": metrics.CACHED_PROMPT_TOKENS,
    "evicted_tokens": metrics.PREFIX_CACHE_EVICTIONS,
    "trees": metrics.NUM_DRAFTS,
    "drafted_tokens": metrics.NUM_DRAFT_TOKENS,
    "accepted_tokens": metrics.NUM_ACCEPTED_TOKENS,
    "pairings": metrics.PAIRINGS,
    "stale_replies": metrics.STALE_REPLIES,
    "draft_timeouts": metrics.DRAFT_TIMEOUTS,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """requests: how many. kill_every: a proposer is killed when it has served so many requests, 0 never.
    in_process: the proposer is a thread of this process instead of a process of its own."""

    requests: int
    seed: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    at_once: int = 20
    kill_every: int = 0
    in_process: bool = False


@dataclass(slots=True)
class Report:
    """What a soak has found. ``mismatches``: what is not as it should be, by request; none is the aim."""

    requests: int
    compared: int = 0
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    kills: int = 0
    leaked: dict[str, int] = field(default_factory=dict)
    growth: dict[str, int] = field(default_factory=dict)
    rss_mib: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not self.mismatches and self.compared == self.requests and not any(self.leaked.values())

    def as_dict(self) -> dict[str, Any]:
        return {"clean": self.is_clean, **asdict(self)}


def soak(
    settings: Settings,
    plan: Plan,
    *,
    say: Say = lambda _: None,
    wrap: Callable[[Connect], Connect] = lambda connect: connect,
) -> Report:
    """Run ``plan`` on an engine of ``settings``. ``wrap`` may put faults between the engine and its proposer.

    Raises RuntimeError where the engine fails or nothing moves any more.
    """
    with tempfile.TemporaryDirectory(prefix="e2soak") as folder:
        checkpoint = load_checkpoint(settings.model)
        # Both sides and all runs in one format, even where a measurement chose it.
        dtype = str(checkpoint.dtype).removeprefix("torch.")
        settings = replace(
            settings,
            model=replace(settings.model, dtype=dtype),  # type: ignore[arg-type]
            pair=replace(settings.pair, socket_dir=folder, retry_s=0.05),
        )
        proposer: ThreadProposer | ProcessProposer
        proposer = (
            ThreadProposer(settings, checkpoint)
            if plan.in_process
            else ProcessProposer(settings, checkpoint.fingerprint)
        )
        try:
            return _soak(settings, checkpoint, proposer, plan, say, wrap)
        finally:
            proposer.close()


def _soak(
    settings: Settings,
    checkpoint: Checkpoint,
    proposer: ThreadProposer | ProcessProposer,
    plan: Plan,
    say: Say,
    wrap: Callable[[Connect], Connect],
) -> Report:
    report, empty = Report(plan.requests), Census.now()
    proposer.restart()
    engine = build_engine(settings, checkpoint, wrap(proposer.connect), incarnation=1)
    tokenizer = checkpoint.tokenizer
    bos = tokenizer.encode("", add_special_tokens=True)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    asks = traffic(plan.seed, plan.requests, encode, plan.sizes, bos[0] if bos else None)

    killer = _Killer(engine, proposer, plan.kill_every)

    def on_end(ended: int) -> None:
        if ended < 0.8 * plan.requests:  # the last one serves to the end
            killer.one_more()
        if ended % max(1, plan.requests // 20) == 0:
            pid = "" if isinstance(proposer, ThreadProposer) else f", proposer {_mib(proposer.pid or 0):.0f}"
            say(f"{ended}/{plan.requests} ended; resident MiB: {_mib('self'):.0f}{pid}; {_summary(engine)}")

    clients = Clients(engine, plan.sizes, at_once=plan.at_once, on_end=on_end)
    engine.start()
    try:
        _wait_for_proposer(engine)
        began = time.monotonic()
        warm = plan.requests // 3
        clients.ask(asks[:warm])
        before = Census.now()
        clients.ask(asks[warm:])
        report.seconds["soak"], report.kills = time.monotonic() - began, killer.kills
        after = Census.now()
        report.leaked = _leaks(engine, proposer, empty, after)
    finally:
        engine.stop()
    report.growth = after.growth(before)
    report.growth |= {"threads": after.threads - before.threads, "files": after.files - before.files}
    report.rss_mib = {"warm": before.rss / 2**20, "end": after.rss / 2**20}
    report.counts = {name: int(engine.stats.get(metric)) for name, metric in _COUNTS.items()}
    report.ends, report.kinds = _ends(clients.outcomes), _kinds(clients.outcomes, asks)
    _compare(report, settings, checkpoint, engine, clients.outcomes, say)
    return report


class _Killer:
    """Kills the proposer each time it has been there over ``every`` requests; 0 never."""

    def __init__(self, engine: Engine, proposer: Proposer, every: int) -> None:
        self._engine, self._proposer, self._every = engine, proposer, every
        self._served = 0
        self.kills = 0

    def one_more(self) -> None:
        """A request has ended. It counts when the present proposer has been found by the engine."""
        self._served += self._engine.stats.get(metrics.PAIRINGS) > self.kills
        if 0 < self._every <= self._served:
            self._served, self.kills = 0, self.kills + 1
            self._proposer.restart()


def _wait_for_proposer(engine: Engine) -> None:
    limit = time.monotonic() + _START_S
    while not engine.stats.get(metrics.PROPOSER_UP):
        if time.monotonic() > limit:
            raise UnavailableError(f"No proposer was there within {_START_S:g} s.")
        time.sleep(0.05)


def _leaks(engine: Engine, proposer: Proposer, empty: Census, after: Census) -> dict[str, int]:
    """What an idle pair must not hold; other engines of the process may have left their things. Raises AssertionError
    where the books of a side do not add up."""
    engine.scheduler.check_integrity()
    if isinstance(proposer, ThreadProposer):
        proposer.runner.check_integrity()
    return {
        "target_slots": int(engine.stats.get(metrics.KV_SLOTS_USED, side="target")),
        "draft_slots": int(engine.stats.get(metrics.KV_SLOTS_USED, side="draft")),
        "sequences": max(0, after.sequences - empty.sequences),
        "tables": max(0, after.tables - empty.tables),
    }


def _compare(
    report: Report, settings: Settings, checkpoint: Checkpoint, engine: Engine, outcomes: list[Outcome], say: Say
) -> None:
    """Every answer with that of the request alone, and with that without speculation."""
    drafter = load_draft_runner(settings, checkpoint, incarnation=2)
    references = References(settings, checkpoint, engine.target_model, drafter, incarnation=2)
    began = time.monotonic()
    say("without speculation ...")
    plain = references.plain(outcomes)
    report.seconds["plain"] = time.monotonic() - began
    began = time.monotonic()
    for outcome, without in zip(outcomes, plain, strict=True):
        for name, expected in (("alone", references.alone(outcome)), ("without speculation", without)):
            found = difference(outcome, expected)
            if found is not None:
                report.mismatches.append(_mismatch(outcome, name, found))
                say(f"request {outcome.number} differs from its run {name}: {found}")
        report.compared += 1
        if report.compared % max(1, len(outcomes) // 20) == 0:
            say(f"{report.compared}/{len(outcomes)} compared, {len(report.mismatches)} mismatches")
    report.seconds["alone"] = time.monotonic() - began


def _mismatch(outcome: Outcome, name: str, found: str) -> dict[str, Any]:
    return {
        "request": outcome.number,
        "run": name,
        "difference": found,
        "ids": list(outcome.ids),
        "question": asdict(question(outcome.request)),
    }


def _ends(outcomes: list[Outcome]) -> dict[str, int]:
    names = ("left" if outcome.finish_reason is None else outcome.finish_reason for outcome in outcomes)
    return dict(sorted(Counter(names).items()))


def _kinds(outcomes: list[Outcome], asks: list[Ask]) -> dict[str, int]:
    """How many requests of which kind there were."""
    sampling = [outcome.request.sampling for outcome in outcomes]
    penalties = [(s.presence_penalty, s.frequency_penalty, s.repetition_penalty) for s in sampling]
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    return {
        "greedy": sum(s.temperature == 0 for s in sampling),
        "sampled": sum(s.temperature > 0 for s in sampling),
        "penalties": sum(values != (0, 0, 1) for values in penalties),
        "logit_bias": sum(bool(s.logit_bias) for s in sampling),
        "stop_strings": sum(bool(o.request.stop.stop_strings) for o in outcomes),
        "stop_tokens": sum(bool(o.request.stop.stop_token_ids) for o in outcomes),
        "ignore_eos": sum(o.request.stop.ignore_eos for o in outcomes),
        "without_speculation": sum(not o.request.speculation for o in outcomes),
        "batch_priority": sum(o.request.priority == "batch" for o in outcomes),
        "deadlines": sum(o.request.deadline is not None for o in outcomes),
        "left_early": sum(o.left for o in outcomes),
        "gone_on_with": sum(o.request.prompt_ids != ask.prompt for o, ask in zip(outcomes, asks, strict=True)),
        "different_questions": len({question(outcome.request) for outcome in outcomes}),
        "prompt_tokens": sum(len(outcome.request.prompt_ids) for outcome in outcomes),
        "answer_tokens": sum(len(outcome.ids) for outcome in outcomes),
        "with_a_cached_prefix": sum(o.usage is not None and o.usage.cached_tokens > 0 for o in whole),
    }


def _summary(engine: Engine) -> str:
    stats = engine.stats
    return (
        f"{stats.get(metrics.GENERATION_TOKENS):.0f} tokens, {stats.get(metrics.NUM_PREEMPTIONS):.0f} preemptions, "
        f"{stats.get(metrics.NUM_ACCEPTED_TOKENS):.0f} of {stats.get(metrics.NUM_DRAFT_TOKENS):.0f} drafts accepted, "
        f"{stats.get(metrics.PAIRINGS):.0f} pairings"
    )


def _mib(pid: int | str) -> float:
    return resident_bytes(pid) / 2**20
