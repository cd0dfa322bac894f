"""The methods that are compared, by name: how each drafts."""

from __future__ import annotations

from eagle2.errors import ConfigError
from eagle2.speculative.ablation import Ablation
from eagle2.speculative.draft import Policy, draft_trees
from eagle2.speculative.static import Eagle1, Rates

PLAIN, EAGLE1, EAGLE2 = "plain", "eagle1", "eagle2"
NO_VALUE, NO_RERANK, NEITHER = "no_value", "no_rerank", "neither"

DRAFTING = (EAGLE1, EAGLE2, NO_VALUE, NO_RERANK, NEITHER)
"""All methods that draft; ``plain`` is what they are compared with."""


def parse_methods(text: str) -> tuple[str, ...]:
    """Methods from ``eagle2,eagle1``; ``all`` is every one, and ``plain`` may be named, though it is always measured.

    Raises ``ConfigError`` for a name that is none or comes twice.
    """
    names = list(DRAFTING) if text == "all" else [name.strip() for name in text.split(",")]
    for i, name in enumerate(names):
        if name not in (PLAIN, *DRAFTING):
            raise ConfigError(f"{name!r} is no method; there are {', '.join((PLAIN, *DRAFTING))}, and 'all'.")
        if name in names[:i]:
            raise ConfigError(f"The method {name} is named twice.")
    return tuple(name for name in names if name != PLAIN)


def policy_of(method: str, rates: Rates | None) -> Policy:
    """How a method drafts; ``eagle1`` places its nodes by the acceptance ``rates`` of ranks."""
    if method == EAGLE1:
        assert rates is not None, "a static tree is placed by rates"
        return Eagle1(rates)
    policies: dict[str, Policy] = {
        EAGLE2: draft_trees,
        NO_VALUE: Ablation(value=False),
        NO_RERANK: Ablation(rerank=False),
        NEITHER: Ablation(value=False, rerank=False),
    }
    return policies[method]
