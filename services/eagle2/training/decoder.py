"""Plain decoding of many sequences at once: as one ends, the next one takes its place."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle2.engine.assemble import Checkpoint
from eagle2.engine.batch import RowsBuilder
from eagle2.errors import ModelError
from eagle2.kv_cache.slots import SlotPool, SlotTable
from eagle2.models.target import TargetModel

# Prompt tokens that one step takes beside the decoding rows: few enough that no step is long.
_PREFILL_ROWS = 192
_BLOCK = 256  # tokens that are summed before the first look at where a draw falls


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be decoded. ``key`` and the tokens before decide, by their hash, what is drawn: nothing else does."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    key: str


@dataclass(frozen=True, slots=True)
class Completion:
    """``output_ids`` hold the end token where the sequence ended by one."""

    task: Task
    output_ids: tuple[int, ...]
    finish: Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class _Sequence:
    task: Task
    table: SlotTable
    tokens: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Tokens whose keys and values are not computed yet: a prompt's, or the last one."""
        return len(self.tokens) - len(self.table)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.task.prompt_ids)


class BatchDecoder:
    """Decodes with the forward of the serving engine, without drafting, and without its streams and their threads.

    On a CPU a row's result does not depend on the rows beside it, so that an output is the same whatever the batch is.
    """

    def __init__(self, checkpoint: Checkpoint, *, sequences: int, slots: int) -> None:
        """sequences: how many are decoded at once. slots: tokens of all of them together, prompts included."""
        self._model = TargetModel(
            checkpoint.config,
            checkpoint.weights,
            dtype=checkpoint.dtype,
            device=checkpoint.device,
            max_positions=checkpoint.max_model_len,
        )
        self._vocab_size = checkpoint.vocab_size
        self._ends = frozenset(checkpoint.config.eos_token_ids)
        self._sequences = sequences
        self._pool = SlotPool(slots)
        self._kv = self._model.new_pool(slots)
        self.num_generated = 0

    def run(self, tasks: Iterable[Task]) -> Iterator[Completion]:
        """Completions as they end. Prompt and output of a task must fit the slots and the target's context.

        Raises ``ModelError`` where the model's output is not a number.
        """
        waiting = deque(tasks)
        running: list[_Sequence] = []
        promised = 0  # slots that the running sequences may come to fill
        while waiting or running:
            while waiting and len(running) < self._sequences:
                need = len(waiting[0].prompt_ids) + waiting[0].max_tokens
                assert need <= self._pool.num_slots, "a task is larger than the pool"
                if promised + need > self._pool.num_slots:
                    break
                promised += need
                task = waiting.popleft()
                running.append(_Sequence(task, SlotTable(self._pool), list(task.prompt_ids)))
            self._step(running)
            still: list[_Sequence] = []
            for sequence in running:
                task = sequence.task
                ended = sequence.num_output > 0 and sequence.tokens[-1] in self._ends
                if not ended and sequence.num_output < task.max_tokens:
                    still.append(sequence)
                    continue
                sequence.table.free()
                promised -= len(task.prompt_ids) + task.max_tokens
                output = tuple(sequence.tokens[len(task.prompt_ids) :])
                yield Completion(task, output, "stop" if ended else "length")
            running = still

    def _step(self, running: Sequence[_Sequence]) -> None:
        """One forward: a token more for every sequence whose prompt is read, and the next part of the prompts."""
        builder = RowsBuilder()
        budget = _PREFILL_ROWS
        ready: list[_Sequence] = []
        last_rows: list[int] = []
        for sequence in running:
            missing = sequence.num_missing
            count = missing if sequence.num_output else min(missing, budget)
            if not count:
                continue
            budget -= 0 if sequence.num_output else count
            first = len(sequence.table)
            sequence.table.extend(count)
            builder.add_span(sequence.table.slots, first, sequence.tokens[first : first + count])
            if count == missing:
                ready.append(sequence)
                last_rows.append(len(builder) - 1)
        features = self._model.forward(builder.build(self._model.device), self._kv)
        if ready:
            logits = self._model.logits(features[last_rows])[:, : self._vocab_size]
            for sequence, token in zip(ready, pick_tokens(logits, ready), strict=True):
                sequence.tokens.append(token)
            self.num_generated += len(ready)


@torch.inference_mode()
def pick_tokens(logits: Tensor, sequences: Sequence[_Sequence]) -> list[int]:
    """The next token of each sequence, from its logits (R, V) float32: the arg-max, or a draw at its temperature.

    A draw inverts the distribution at one number, a hash of key and position. The server's ``choose_token`` hashes
    every token id, so that drafted and plain text agree; nothing is drafted here, and this takes a third of the time.
    """
    best = logits.max(dim=1)
    if not bool(best.values.isfinite().all()):
        raise ModelError("The model's output is not a number for one of the prompts.")
    tokens: list[int] = best.indices.tolist()
    drawn = [i for i, sequence in enumerate(sequences) if sequence.task.temperature > 0]
    if drawn:
        temperatures = torch.tensor([sequences[i].task.temperature for i in drawn], device=logits.device)
        weights = logits[drawn].sub_(best.values[drawn, None]).div_(temperatures[:, None]).exp_()
        shares = [_uniform(sequences[i].task.key, len(sequences[i].tokens)) for i in drawn]
        found = inverted(weights, torch.tensor(shares, dtype=torch.float64, device=logits.device))
        for i, token in zip(drawn, found.tolist(), strict=True):
            tokens[i] = token
    return tokens


def inverted(weights: Tensor, shares: Tensor) -> Tensor:
    """The token at which each row's running sum passes its share of the whole. weights (R, V), shares (R,) -> (R,).

    First the block of tokens, then the token in it: a running sum over the whole vocabulary is slow. A token of no
    weight is never returned.
    """
    rows = torch.arange(len(weights), device=weights.device)
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(dim=2).double().cumsum(dim=1)
    points = sums[:, -1:] * shares[:, None]
    block = torch.searchsorted(sums, points, right=True)
    points -= F.pad(sums, (1, 0)).gather(1, block)
    inside = blocks[rows, block[:, 0]].double().cumsum(dim=1)
    # The two ways to sum a block may differ by rounding: the last token of weight takes what is left.
    last = (inside < inside[:, -1:]).sum(dim=1)
    return block[:, 0] * _BLOCK + torch.searchsorted(inside, points, right=True)[:, 0].minimum(last)


def _uniform(key: str, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    digest = hashlib.blake2b(f"{key} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
