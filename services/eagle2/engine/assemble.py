"""Settings and checkpoints become runners: what a verifier and a proposer each load."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle2.config import EMBEDDED, ModelSettings, Settings
from eagle2.engine.budget import AdaptiveBudget
from eagle2.engine.costs import CostCurve, DraftCosts, sizes_up_to
from eagle2.engine.draft import DraftRunner
from eagle2.engine.engine import Engine, EngineLimits
from eagle2.engine.graphs import GraphLimits
from eagle2.engine.head import beam_slots
from eagle2.engine.measuring import measure_target
from eagle2.engine.pair import Connect, Pair
from eagle2.engine.target import TargetRunner
from eagle2.errors import ConfigError
from eagle2.models.checkpoint import DraftConfig, TargetConfig, check_head, load_tensors, real_vocab_size
from eagle2.models.draft import DraftModel
from eagle2.models.draft_vocabulary import DraftVocabulary, scored_ids
from eagle2.models.dtype import resolve_device, resolve_dtype, use_threads
from eagle2.models.embedded import EMBEDDED_NAME
from eagle2.models.layers import Weights
from eagle2.models.loader import resolve_draft, resolve_target
from eagle2.models.target import TargetModel
from eagle2.protocol import ModelDescription
from eagle2.speculative.draft import TreeShape
from eagle2.telemetry.recorder import Recorder
from eagle2.text.chat import ChatTemplate, special_tokens
from eagle2.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A forward of the draft head costs so much of the target's while nothing better is known.
_GUESS = 0.1
# Larger steps are not measured before there is work, and hardly ever pay: they would keep a start waiting.
_MOST_ROWS = 512
# The share of memory that a verifier's KV cache and features may take where kv_slots is not set.
_CPU_MEMORY_SHARE, _GPU_MEMORY_SHARE = 0.15, 0.5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A target on disk: where, of what shape, how it is to run."""

    folder: Path
    config: TargetConfig
    weights: Weights
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    max_model_len: int

    @property
    def vocab_size(self) -> int:
        """Ids that may come out."""
        return real_vocab_size(self.config, self.tokenizer.vocab_size)

    @property
    def fingerprint(self) -> str:
        """The same on both sides of a pair, else they do not belong together: config, and a part of the embedding."""
        rows = self.weights["model.embed_tokens.weight"][:64].float().numpy().tobytes()
        return hashlib.sha256((self.folder / "config.json").read_bytes() + rows).hexdigest()[:32]


def load_checkpoint(model: ModelSettings) -> Checkpoint:
    """Read the target of the settings. Raises ``ModelError`` or ``ConfigError`` with one sentence."""
    folder = resolve_target(model.target)
    config = TargetConfig.from_folder(folder)
    device = resolve_device(model.device)
    longest = min(config.max_position_embeddings, config.sliding_window or config.max_position_embeddings)
    if model.max_model_len is not None and model.max_model_len > longest:
        raise ConfigError(f"max_model_len is {model.max_model_len}, but {folder.name} reads at most {longest} tokens.")
    return Checkpoint(
        folder=folder,
        config=config,
        weights=load_tensors(folder),
        tokenizer=Tokenizer.from_folder(folder),
        device=device,
        dtype=resolve_dtype(model.dtype, device),
        max_model_len=model.max_model_len or longest,
    )


def load_draft_runner(settings: Settings, checkpoint: Checkpoint, incarnation: int) -> DraftRunner:
    """The proposer's half: the draft head with the target's embedding and lm_head, and slots for its own KV."""
    assert settings.model.draft is not None
    folder = resolve_draft(settings.model.draft)
    config, weights = DraftConfig.from_folder(folder), load_tensors(folder)
    embedding = checkpoint.weights["model.embed_tokens.weight"]
    check_head(config, weights, checkpoint.config, embedding)
    tied = checkpoint.config.tie_word_embeddings
    table = DraftVocabulary.load(folder, checkpoint.vocab_size)
    end_tokens = (token for token in checkpoint.config.eos_token_ids if token < checkpoint.vocab_size)
    token_ids = scored_ids(settings.model.draft_vocabulary, table, folder, end_tokens)
    model = DraftModel(
        config,
        {name: tensor for name, tensor in weights.items() if name != "embed_tokens.weight"},
        embedding,
        embedding if tied else checkpoint.weights["lm_head.weight"],
        dtype=checkpoint.dtype,
        device=checkpoint.device,
        token_ids=token_ids,
    )
    if table is not None and token_ids is not None:
        logger.info(
            "The draft head scores %d of %d tokens, %.1f %% of the text that its table counts.",
            len(token_ids),
            checkpoint.vocab_size,
            100 * table.coverage(token_ids),
        )
    else:
        logger.info("The draft head scores all %d tokens.", checkpoint.vocab_size)
    shape = tree_shape(settings)
    slots = num_slots(settings, checkpoint) + settings.engine.max_sequences * beam_slots(shape)
    runner = DraftRunner(
        model,
        slots,
        incarnation=incarnation,
        vocab_size=checkpoint.vocab_size,
        prefix_cache=settings.engine.prefix_cache,
        graphs=graph_limits(settings, checkpoint),
    )
    runner.warm_up()
    return runner


def load_target_model(settings: Settings, checkpoint: Checkpoint) -> TargetModel:
    """The target's network, for answers and trees as long as the settings allow."""
    return TargetModel(
        checkpoint.config,
        checkpoint.weights,
        dtype=checkpoint.dtype,
        device=checkpoint.device,
        max_positions=checkpoint.max_model_len + settings.engine.depth + 1,
    )


def build_engine(
    settings: Settings,
    checkpoint: Checkpoint,
    connect: Connect | None,
    incarnation: int,
    model: TargetModel | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """The verifier's half: target, slots, pair and the loop over them (not started).

    ``model``: a network that is loaded already, for engines that share it; they must not run at the same time.
    ``clock``: seconds, for what steps cost.
    """
    use_threads(settings.engine.threads)
    limits = EngineLimits(
        max_model_len=checkpoint.max_model_len,
        max_sequences=settings.engine.max_sequences,
        prefill_chunk=settings.engine.prefill_chunk,
        prefix_cache=settings.engine.prefix_cache,
        max_token_gap_s=settings.engine.max_token_gap_s,
    )
    slots = num_slots(settings, checkpoint)
    if slots < limits.max_model_len:
        raise ConfigError(f"kv_slots is {slots}, which does not hold one context of {limits.max_model_len} tokens.")
    if model is None:
        model = load_target_model(settings, checkpoint)
    stats = Recorder()
    pair = Pair(
        connect,
        stats,
        incarnation=incarnation,
        timeout_s=settings.engine.draft_timeout_s,
        retry_s=settings.pair.retry_s,
    )
    logger.info("%s runs in %s on %s with %d KV slots.", checkpoint.folder.name, checkpoint.dtype, model.device, slots)
    graphs = graph_limits(settings, checkpoint)
    target = TargetRunner(model, slots, vocab_size=checkpoint.vocab_size, graphs=graphs)
    target.warm_up()
    return Engine(
        target,
        checkpoint.tokenizer,
        pair,
        stats,
        limits,
        tree_shape(settings),
        frozenset(checkpoint.config.eos_token_ids),
        budget=adaptive_budget(settings, target) if connect and settings.engine.tree_budget == "adaptive" else None,
        overlap=settings.engine.overlap,
        clock=clock,
        on_thread_start=_thread_setter(settings.engine.threads),
    )


def describe(settings: Settings, checkpoint: Checkpoint) -> ModelDescription:
    template = ChatTemplate.from_folder(checkpoint.folder)
    bos, eos = special_tokens(checkpoint.folder)
    return ModelDescription(
        name=served_name(settings.model),
        created=int((checkpoint.folder / "config.json").stat().st_mtime),
        vocab_size=checkpoint.vocab_size,
        max_model_len=checkpoint.max_model_len,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        tokenizer_json=checkpoint.tokenizer.json,
        chat_template=None if template is None else template.source,
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=checkpoint.config.eos_token_ids,
        speculation=settings.model.draft is not None,
    )


def served_name(model: ModelSettings) -> str:
    """What clients call the model: as set, else the hub id, the folder's or the file's name."""
    if model.served_model_name:
        return model.served_model_name
    if model.target == EMBEDDED:
        return EMBEDDED_NAME
    path = Path(model.target).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model.target.partition("@")[0]


def graph_limits(settings: Settings, checkpoint: Checkpoint) -> GraphLimits | None:
    """What a GPU's forwards are recorded for: all trees of a full batch, and prompts in pieces. None on a CPU."""
    if checkpoint.device.type != "cuda":
        return None
    engine = settings.engine
    return GraphLimits(
        max_rows=engine.max_sequences * (engine.num_draft_tokens + 1) + engine.prefill_chunk,
        max_sequences=engine.max_sequences,
        max_context=checkpoint.max_model_len,
        max_path=engine.depth + 1,
    )


def tree_shape(settings: Settings) -> TreeShape:
    engine = settings.engine
    return TreeShape(depth=engine.depth, top_k=engine.top_k, num_nodes=engine.num_draft_tokens + 1)


def adaptive_budget(settings: Settings, target: TargetRunner) -> AdaptiveBudget:
    """A budget with the target's costs, measured now. The draft's are a guess until the pair is there to be asked."""
    engine = settings.engine
    verify = measure_target(target, min(engine.max_sequences * (engine.num_draft_tokens + 1), _MOST_ROWS))
    logger.info(
        "A step takes %s ms.",
        ", ".join(
            f"{1000 * s:.1f} (rows: {n:.0f})" for n, s in zip(verify.curve.sizes, verify.curve.seconds, strict=True)
        ),
    )
    sizes = sizes_up_to(engine.max_sequences * max(engine.top_k, 2))
    draft = CostCurve(sizes, [_GUESS * verify.curve.at(size) for size in sizes], guessed=True)
    return AdaptiveBudget(tree_shape(settings), verify, DraftCosts(draft))


def num_slots(settings: Settings, checkpoint: Checkpoint) -> int:
    """As set; else what a share of the memory holds, and not more than all sequences can fill."""
    engine = settings.engine
    if engine.kv_slots is not None:
        return engine.kv_slots
    config = checkpoint.config
    per_slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim + config.hidden_size
    size = per_slot * checkpoint.dtype.itemsize
    if checkpoint.device.type == "cpu":
        memory = int(_CPU_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    else:
        memory = int(_GPU_MEMORY_SHARE * torch.cuda.mem_get_info(checkpoint.device)[0])
    useful = engine.max_sequences * (checkpoint.max_model_len + engine.num_draft_tokens + 1)
    return min(memory // size, useful)


def _thread_setter(threads: int | None) -> Callable[[], None]:
    def set_threads() -> None:
        use_threads(threads)

    return set_threads
