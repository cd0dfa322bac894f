"""Questions of two turns: the second is asked after the answer to the first."""

from __future__ import annotations

from collections.abc import AsyncIterator

from eagle2.evaluation.acceptance import Acceptance, Cell, Lost, lost_in, same_cycles
from eagle2.evaluation.conversation import Turn, converse, converse_all
from eagle2.evaluation.prompts import PromptEncoder
from eagle2.evaluation.questions import Question
from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Usage
from fakes.verifier import describe


class Echo:
    """Answers a prompt with its number, one token first and then two at a time; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def describe(self) -> ModelDescription:
        return describe()

    async def stats(self) -> dict[str, float]:
        return {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        self.asked.append(request)
        answer = f"answer{len(self.asked)}"[: request.stop.max_tokens]
        runs = [answer[:1], *(answer[i : i + 2] for i in range(1, len(answer), 2))]
        for run in runs:
            yield Commit(tuple(run.encode()), run)
        yield Commit((), "", "length", Usage(len(request.prompt_ids), len(answer), cycles=len(runs) - 1))


TWO = Question("set/1", "x", ("first?", "second?"))


async def test_the_second_turn_is_asked_after_the_answer() -> None:
    verifier, seen = Echo(), []
    turns = await converse(
        verifier, PromptEncoder(describe()), TWO, 5, 0.0, speculation=True, on_turn=lambda turn: seen.append(turn.name)
    )
    assert [bytes(request.prompt_ids) for request in verifier.asked] == [
        b"[user]first?\n[assistant]",
        b"[user]first?\n[assistant]answe\n[user]second?\n[assistant]",  # cut where the answer was
    ]
    assert [turn.name for turn in turns] == seen == ["set/1", "set/1 turn 2"]
    assert turns[0].prompt_ids == verifier.asked[0].prompt_ids
    assert turns[1].token_ids == tuple(b"answe")
    assert [turn.commits for turn in turns] == [(1, 2, 2)] * 2
    assert all(request.sampling.temperature == 0 and request.speculation for request in verifier.asked)
    measured = Acceptance(Cell(0.0, "set", "eagle2", "2/1/2"), tuple(turns), 1.0)
    # The prompt's own token counts nowhere: two cycles of two tokens, twice.
    assert (measured.cycles, measured.tokens, measured.tau) == (4, 8, 2.0)


async def test_whoever_answers_samples_with_the_seed_of_the_prompt() -> None:
    one, other = Echo(), Echo()
    encoder = PromptEncoder(describe())
    questions = [TWO, Question("set/2", "x", ("third?",))]
    await converse_all(one, encoder, questions[:1], 6, 1.0, 1, speculation=True)
    turns = await converse_all(other, encoder, questions, 6, 1.0, 1, speculation=False)
    seeds = {bytes(request.prompt_ids): request.sampling.seed for request in other.asked}
    assert len(set(seeds.values())) == 3
    assert all(seeds[bytes(request.prompt_ids)] == request.sampling.seed for request in one.asked[:1])
    assert {request.sampling.temperature for request in one.asked + other.asked} == {1.0}
    assert [turn.name for turn in turns] == ["set/1", "set/1 turn 2", "set/2"]


def _measured(method: str, *commits: tuple[int, ...], tree: str = "4/3/2") -> Acceptance:
    turns = [Turn(f"q{i}", 1, (1,), tuple(range(sum(c))), c) for i, c in enumerate(commits)]
    return Acceptance(Cell(0.0, "set", method, tree), tuple(turns), 1.5)


def test_shares_by_depth_and_one_add_up_to_tau() -> None:
    measured = _measured("eagle2", (1, 3, 1, 4), (1, 2))
    assert measured.tau == 10 / 4
    assert measured.per_position(3) == (3 / 4, 2 / 4, 1 / 4)
    assert 1 + sum(measured.per_position(3)) == measured.tau
    empty = _measured("eagle2", (1,))
    assert (empty.tau, empty.per_position(2)) == (0.0, (0.0, 0.0))


def test_other_tokens_than_plain_decodings_are_found() -> None:
    plain = _measured("plain", (1, 1, 1), (1, 1), tree="")
    same, cut = _measured("eagle2", (1, 2), (1, 1)), _measured("eagle2", (1, 2), (1,))
    assert lost_in(same, plain) == []
    assert lost_in(cut, plain) == [Lost(cut.cell, "q1", 1)]
    assert not same_cycles(same.turns, plain.turns)
    assert same_cycles(same.turns, same.turns)
    assert Acceptance.from_json(cut.as_json()) == cut
