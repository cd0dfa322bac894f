"""Who is blamed for a crash: the decisions alone, in a world where every step is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.router.probation import Probation, Trial

LENGTH = 5  # commits of an answer


@dataclass
class World:
    """Requests in flight on replicas; ``poison`` crashes its replica at its commit number ``at``."""

    replicas: int
    poison: frozenset[int]
    at: int
    probation: Probation = field(default_factory=Probation)
    progress: dict[int, int] = field(default_factory=dict)
    trials: dict[int, Trial] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    crashed: list[int] = field(default_factory=list)  # who crashed a replica, crash by crash
    guilty: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    lives: int = 0
    up: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(self.replicas):
            self.replace()

    def replace(self) -> None:
        self.lives += 1
        self.up.append(f"life{self.lives}")

    def place(self, request: int, draw: int) -> bool:
        """Send a waiting request somewhere. The second suspect on one replica would be a fault of the logic."""
        may = [life for life in self.up if self.probation.may_start(str(request), life)]
        if not may:
            return False
        life = may[draw % len(may)]
        trial = self.probation.start(str(request), life)
        self.trials[request] = trial
        self.waiting.remove(request)
        here = [t for t in self.trials.values() if t.incarnation == life and t.on_probation]
        assert len(here) <= 1
        self.probation.received(trial, has_tokens=False)
        return True

    def step(self, request: int) -> None:
        trial = self.trials[request]
        if request in self.poison and self.progress.get(request, 0) == self.at:
            self.crash(trial.incarnation, request)
            return
        self.progress[request] = self.progress.get(request, 0) + 1
        self.probation.received(trial, has_tokens=True)
        if self.progress[request] == LENGTH:
            self.probation.ended(trial)
            self.probation.forget(str(request))
            del self.trials[request]
            self.finished.add(request)

    def crash(self, life: str, by: int) -> None:
        self.crashed.append(by)
        self.up.remove(life)
        self.replace()
        for request, trial in [(r, t) for r, t in self.trials.items() if t.incarnation == life]:
            verdict = self.probation.crashed(trial)
            del self.trials[request]
            if verdict == "guilty":
                self.guilty.add(request)
                self.probation.forget(str(request))
            else:
                assert (verdict == "suspect") == self.probation.is_suspect(str(request))
                self.waiting.append(request)


def run(world: World, requests: int, data: st.DataObject) -> None:
    world.waiting = list(range(requests))
    for _ in range(400 + 60 * requests):
        ready = [r for r in world.waiting if any(world.probation.may_start(str(r), life) for life in world.up)]
        moves = [("place", r) for r in ready] + [("step", r) for r in world.trials]
        if not moves:
            break
        what, request = moves[data.draw(st.integers(0, len(moves) - 1))]
        if what == "place":
            assert world.place(request, data.draw(st.integers(0, 7)))
        else:
            world.step(request)
    assert not world.waiting, "nobody waits for ever"
    assert not world.trials


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 4), st.integers(0, LENGTH - 1))
def test_one_poison_request_crashes_two_replicas_and_is_the_only_one_blamed(
    data: st.DataObject, requests: int, replicas: int, at: int
) -> None:
    world = World(replicas, frozenset({data.draw(st.integers(0, requests - 1))}), at)
    run(world, requests, data)
    assert world.guilty == world.poison
    assert len(world.crashed) == 2
    assert world.finished == set(range(requests)) - world.poison


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 8), st.integers(1, 4), st.integers(0, LENGTH - 1))
def test_of_several_poison_requests_all_are_found(data: st.DataObject, requests: int, replicas: int, at: int) -> None:
    """One that crashes a replica on which another is on probation has that one blamed: that is a guess, and may be
    wrong. None of them survives, and nobody is lost."""
    poison = frozenset(data.draw(st.sets(st.integers(0, requests - 1), min_size=2, max_size=3)))
    world = World(replicas, poison, at)
    run(world, requests, data)
    assert poison <= world.guilty
    assert world.finished == set(range(requests)) - world.guilty
    assert len(world.crashed) <= 2 * len(world.guilty) + 1


def start(probation: Probation, request: str, life: str, *, items: int = 1, commits: int = 0) -> Trial:
    trial = probation.start(request, life)
    for number in range(items):
        probation.received(trial, has_tokens=number < commits)
    return trial


def suspects(probation: Probation, *requests: str) -> None:
    for trial in [start(probation, request, "first") for request in requests]:
        assert probation.crashed(trial) == "suspect"


def test_an_innocent_in_two_batches_of_a_poison_request_survives() -> None:
    probation = Probation()
    poison, other = start(probation, "poison", "a"), start(probation, "other", "a", items=3, commits=3)
    assert (probation.crashed(other), probation.crashed(poison)) == ("suspect", "suspect")
    other = start(probation, "other", "b", items=3, commits=3)
    assert not probation.is_suspect("other")
    late = start(probation, "late", "b")
    poison = start(probation, "poison", "b")
    # Whoever tells first, the verdict is the same.
    assert [probation.crashed(t) for t in (late, other, poison)] == ["innocent", "innocent", "guilty"]


def test_one_suspect_at_a_time_until_it_has_made_two_commits() -> None:
    probation = Probation()
    suspects(probation, "s", "t")
    trial = start(probation, "s", "a", items=5)
    assert not probation.may_start("t", "a")
    assert probation.may_start("t", "b")
    assert probation.may_start("new", "a")
    assert not probation.received(trial, has_tokens=True)
    assert not probation.may_start("t", "a")
    assert probation.received(trial, has_tokens=True)
    assert probation.may_start("t", "a")
    assert not probation.is_suspect("s")
    # A crash now is nobody's probation.
    assert probation.crashed(trial) == "suspect"


def test_a_suspect_that_leaves_makes_room_and_stays_one() -> None:
    probation = Probation()
    suspects(probation, "s", "t")
    probation.ended(start(probation, "s", "a"))
    assert probation.may_start("t", "a")
    assert probation.is_suspect("s")
    probation.forget("s")
    assert not probation.is_suspect("s")


def test_without_a_sign_of_life_one_crash_may_be_chance() -> None:
    """The replica may have been dead before the suspect got there; of a second one that is not believed."""
    probation = Probation()
    suspects(probation, "s")
    assert probation.crashed(start(probation, "s", "a", items=0)) == "suspect"
    assert probation.crashed(start(probation, "s", "b", items=0)) == "guilty"


def test_progress_that_was_still_on_its_way_clears() -> None:
    probation = Probation()
    suspects(probation, "s")
    trial, other = start(probation, "s", "a"), start(probation, "other", "a")
    assert probation.crashed(other) == "innocent"
    for _ in range(2):
        probation.received(trial, has_tokens=True)
    assert probation.crashed(trial) == "suspect"
    assert probation.is_suspect("s")


def test_requests_that_come_after_a_crash_are_not_in_it() -> None:
    probation = Probation()
    assert probation.crashed(start(probation, "a", "x")) == "suspect"
    # Sent to the dead replica before anybody knew: a batch of its own.
    assert probation.crashed(start(probation, "b", "x", items=0)) == "suspect"
    assert probation.may_start("a", "y")
