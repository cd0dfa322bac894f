"""Trees without the nodes that a known answer does not go through: the cycles stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle2.evaluation.foresight import ForesightLink, path_through
from eagle2.evaluation.ranks import RankCounter, probing_tree
from eagle2.speculative.draft import TreeShape
from eagle2.speculative.static import StaticTree
from eagle2.transport.base import ProposerLink
from eagle2.transport.local import LocalLink
from eagle2.transport.messages import DraftEntry, DraftStatus, DraftStep, DraftTree
from fakes.drafts import BookkeepingHandler, Nodes
from fakes.engines import INCARNATION, PROMPTS, EngineKit, draft_head, plain, request


def _tree(*nodes: tuple[int, int]) -> DraftTree:
    """Nodes as (token, parent)."""
    tokens, parents = (torch.tensor(column, dtype=torch.int64) for column in zip(*nodes, strict=True))
    return DraftTree(1, 1, DraftStatus.OK, 3, tokens, parents, -torch.arange(1.0, len(nodes) + 1))


FORK = _tree((5, 0), (6, 0), (7, 1), (8, 2), (9, 2), (5, 5))


def test_a_path_goes_as_far_as_children_carry_the_tokens() -> None:
    assert path_through(FORK, [6, 9, 5, 1]) == [0, 2, 5, 6]
    assert path_through(FORK, [6, 7]) == [0, 2]
    assert path_through(FORK, [9]) == [0]
    assert path_through(FORK, []) == [0]


class Forked(BookkeepingHandler):
    def draft(self, context: list[int], step: DraftStep) -> Nodes:
        return list(zip(FORK.tokens.tolist(), FORK.parents.tolist(), FORK.scores.tolist(), strict=True))


def _reply(link: ForesightLink, tokens: list[int], base: int = 0, number: int = 1) -> DraftTree:
    entry = DraftEntry(1, number, base, torch.zeros(len(tokens), 2), torch.tensor(tokens))
    link.send(DraftStep(3, number, 3, 2, 6, (entry,)))
    reply = link.receive(1.0)
    assert reply is not None
    return reply.trees[0]


def test_what_the_answer_does_not_go_through_is_taken_out() -> None:
    link = ForesightLink(LocalLink(Forked(), incarnation=0))
    link.foretell([((1, 2, 3), (4, 6, 9, 7))])
    cut = _reply(link, [2, 3, 4])
    assert (cut.tokens.tolist(), cut.parents.tolist(), cut.scores.tolist()) == ([6, 9], [0, 1], [-2.0, -5.0])
    # Behind 6, 9 and 7, which the engine committed, nothing is known any more: one child stays.
    link.foretell([((1, 2, 3), (4, 6, 9, 7, 1))])
    assert _reply(link, [2, 3, 4], number=2).tokens.tolist() == [6, 9]
    last = _reply(link, [6, 9, 7], base=3, number=3)
    assert (last.tokens.tolist(), last.parents.tolist()) == ([5], [0])


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [((1, 2, 9), (4, 6))],  # another prompt
        [((1, 2), (3, 4, 6))],  # the prompt of another sequence that begins alike
        [((1, 2, 3), (4, 6)), ((1, 2, 3), (4, 5))],  # two answers to one prompt
    ],
)
def test_what_is_not_foretold_stays_whole(answers: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    link = ForesightLink(LocalLink(Forked(), incarnation=0))
    link.foretell(answers)
    assert _reply(link, [2, 3, 4]).tokens.tolist() == FORK.tokens.tolist()


def test_an_answer_that_comes_out_otherwise_is_not_cut_any_more() -> None:
    link = ForesightLink(LocalLink(Forked(), incarnation=0))
    link.foretell([((1, 2, 3), (4, 6, 9))])
    assert len(_reply(link, [2, 3, 4]).tokens) == 2
    assert _reply(link, [5], base=3, number=2).tokens.tolist() == FORK.tokens.tolist()


def test_the_cycles_are_those_of_whole_trees() -> None:
    links: list[ForesightLink] = []

    def wrap(link: ProposerLink) -> ProposerLink:
        links.append(ForesightLink(link))
        return links[-1]

    kit = EngineKit(draft_head(), wrap=wrap, shape=TreeShape(5, 6, 30))
    asked = [request(prompt, max_tokens=24, temperature=t, seed=7) for prompt in PROMPTS[:4] for t in (0.0, 1.0)]
    expected = kit.answers(*map(plain, asked))
    whole = kit.answers(*asked)
    greedy = [(one, answer) for one, answer in zip(asked, expected, strict=True) if one.sampling.temperature == 0]
    sampled = [(one, answer) for one, answer in zip(asked, expected, strict=True) if one.sampling.temperature > 0]
    for half in (greedy, sampled):
        links[0].foretell([(one.prompt_ids, answer.ids) for one, answer in half])
        fast = kit.answers(*(replace(one, request_id="again") for one, _ in half))
        for (one, answer), found in zip(half, fast, strict=True):
            reference = whole[asked.index(one)]
            assert found.ids == reference.ids == answer.ids
            assert [len(c.token_ids) for c in found.commits] == [len(c.token_ids) for c in reference.commits]
            assert found.usage.cycles == reference.usage.cycles < len(answer.ids)
            assert found.usage.rejected_prediction_tokens < reference.usage.rejected_prediction_tokens
    assert links[0].incarnation == INCARNATION


def test_a_probing_tree_has_all_children_where_it_has_any() -> None:
    for depth, top_k in ((1, 3), (2, 8), (6, 10), (3, 1)):
        tree = probing_tree(depth, top_k)
        assert max(map(len, tree.paths)) == depth
        inner = {path[:-1] for path in tree.paths}
        assert all((*path, rank) in tree.paths for path in inner for rank in range(top_k))
        assert all(sum(len(path) == level for path in inner) <= top_k for level in range(depth))
        StaticTree(tree.paths)


def test_ranks_are_counted_by_depth() -> None:
    # The root with ranks 0 and 1 (tokens 5, 6); below 5: 7, 8; below 6 nothing that was probed.
    tree = _tree((5, 0), (6, 0), (7, 1), (8, 1))
    counter = RankCounter(2)
    for coming in ([5, 8, 1], [5, 9], [6, 7], [4], [5]):
        counter.watch(tree, coming, path_through(tree, coming))
    # Depth 0: 5, 5, 6, nothing, 5. Depth 1, reached with a known end twice: 8, nothing. The last answer ends there.
    assert counter.visits == [5, 2]
    rates = counter.rates()
    average = (3 / 7, 2 / 7)
    assert rates[0] == pytest.approx([(3 + 20 * average[0]) / 25, (1 + 20 * average[1]) / 25])
    assert rates[1] == pytest.approx([(0 + 20 * average[0]) / 22, (1 + 20 * average[1]) / 22])


def test_without_a_visit_no_rank_is_better_than_another() -> None:
    assert RankCounter(3).rates() == ((0.0, 0.0, 0.0),)
