"""Tree shapes that are compared, and an engine whose trees can take any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from eagle2.config import Settings
from eagle2.engine.assemble import build_engine, describe, load_checkpoint, load_draft_runner
from eagle2.errors import ConfigError
from eagle2.evaluation.foresight import ForesightLink
from eagle2.speculative.draft import Policy, TreeShape, draft_trees
from eagle2.transport.base import DraftHandler, ProposerLink
from eagle2.transport.local import LocalLink
from eagle2.transport.messages import DraftReply, DraftStep
from eagle2.verifier.service import VerifierService
from eagle2.verifier.start import new_incarnation

# Slots for each sequence of a batch where they are not set, in tokens. Longer ones wait for a place.
_TYPICAL_CONTEXT = 1536

# Counts the root, which ``num_draft_tokens`` does not.
PAPER = TreeShape(depth=6, top_k=10, num_nodes=60)


def parse_shapes(text: str) -> tuple[TreeShape, ...]:
    """Shapes from ``8/4/4,16/4/6,paper``: drafted tokens / depth / top_k each; ``paper`` is 59/6/10.

    Raises ``ConfigError`` for anything else, a shape named twice included.
    """
    shapes = tuple(_parse_shape(part.strip()) for part in text.split(","))
    for i, shape in enumerate(shapes):
        if shape in shapes[:i]:
            raise ConfigError(f"The tree shape {shape_name(shape)} is named twice.")
    return shapes


def _parse_shape(text: str) -> TreeShape:
    if text == "paper":
        return PAPER
    try:
        drafted, depth, top_k = (int(number) for number in text.split("/"))
    except ValueError:
        raise ConfigError(f"{text!r} is no tree shape; write drafted tokens/depth/top_k, such as 8/4/4.") from None
    if min(drafted, depth, top_k) < 1:
        raise ConfigError(f"The tree shape {text} has a number below 1.")
    return TreeShape(depth=depth, top_k=top_k, num_nodes=drafted + 1)


def shape_name(shape: TreeShape) -> str:
    return f"{shape.num_nodes - 1}/{shape.depth}/{shape.top_k}"


class ShapedLink:
    """A link within the process whose trees take the shape that is set here, whatever the engine asks for."""

    def __init__(self, handler: DraftHandler, shape: TreeShape, incarnation: int) -> None:
        self._link = LocalLink(handler, incarnation=incarnation)
        self.incarnation = incarnation
        self.shape = shape

    def send(self, step: DraftStep) -> None:
        shape = self.shape
        self._link.send(replace(step, depth=shape.depth, top_k=shape.top_k, num_draft_tokens=shape.num_nodes - 1))

    def receive(self, timeout_s: float) -> DraftReply | None:
        return self._link.receive(timeout_s)

    def close(self) -> None:
        self._link.close()


class ShapedEngine:
    """The engine of ``start_in_one_process`` with one set of weights for all tree shapes.

    ``shapes`` are those that will be asked for: slots are sized for the largest. Without a draft head there are
    none, and everything is decoded plainly. ``observe`` wraps the link to the draft head, to watch whole trees pass.
    """

    def __init__(
        self,
        settings: Settings,
        shapes: Sequence[TreeShape],
        observe: Callable[[ProposerLink], ProposerLink] = lambda link: link,
    ) -> None:
        checkpoint = load_checkpoint(settings.model)
        engine = settings.engine
        if shapes:
            engine = replace(
                engine,
                depth=max(shape.depth for shape in shapes),
                top_k=max(shape.top_k for shape in shapes),
                num_draft_tokens=max(shape.num_nodes for shape in shapes) - 1,
            )
        if engine.kv_slots is None:
            trees = engine.max_sequences * (engine.num_draft_tokens + 1)
            context = max(checkpoint.max_model_len, engine.max_sequences * _TYPICAL_CONTEXT)
            engine = replace(engine, kv_slots=context + trees)
        # Prompts are asked again and again, by one method and another: each is to read all of them. Trees have the
        # shape that is asked for, whatever it costs.
        settings = replace(settings, engine=replace(engine, prefix_cache=False, tree_budget="fixed"))
        self._link: ShapedLink | None = None
        self.foresight: ForesightLink | None = None
        connect = None
        if shapes:
            incarnation = new_incarnation()
            self._drafter = load_draft_runner(settings, checkpoint, incarnation)
            self._link = ShapedLink(self._drafter, shapes[0], incarnation)
            self.foresight = foresight = ForesightLink(observe(self._link))

            def connect() -> ProposerLink:
                return foresight

        self.folder = checkpoint.folder
        self.settings = settings
        self.description = describe(settings, checkpoint)
        self.service = VerifierService(build_engine(settings, checkpoint, connect, new_incarnation()), self.description)

    def use(self, shape: TreeShape, policy: Policy = draft_trees) -> None:
        """Draft trees of this shape, in this way, from the next step on. Nothing may be in the works."""
        assert self._link is not None, "an engine without a draft head has no trees"
        self._link.shape = shape
        self._drafter.policy = policy

    def close(self) -> None:
        self.service.close()
