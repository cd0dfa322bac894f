"""The bytes of steps and replies: fixed tables, raw tensor bytes. Nothing is pickled.

Bodies of the frames of ``frames.py``, little-endian, everything at a multiple of its own word size:

    step    incarnation u64 | step u64 | depth u32 | top_k u32 | num_draft_tokens u32 | entries u32 | closed u32
            | hidden u32 | dtype name 8s
            entries * (sequence i64 | cycle i64 | base i64 | rows u32 | draft u8 | opening u8 | pad)
            closed * i64
            openings * (tenant 16s | tokens u32 | pad), one for each entry that says it has one, in their order
            tokens i64 of all openings | tokens i64 of all entries | features of all entries
    reply   incarnation u64 | step u64 | received i64 | finished i64 | slots used i64 | slots total i64
            | slots cached i64 | trees u32 | pad
            trees * (sequence i64 | cycle i64 | held i64 | status u32 | nodes u32)
            tokens i64 of all trees | parents i64 of all trees | scores f32 of all trees

Features travel in the sender's dtype, named in the step, so that a receiver never guesses what the bytes mean; it
converts by value with ``features.features_as``. All entries of a step share one dtype and one hidden size (a pair has
one target), so a receiver makes a few tensors per message and not a few per sequence. An entry without an opening,
which is every one but a sequence's first, pays nothing for it.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eagle2.transport.frames import Body, Frame, FrameError, FrameKind, frame_of, pack
from eagle2.transport.messages import (
    TENANT_BYTES,
    DraftEntry,
    DraftReply,
    DraftStatus,
    DraftStep,
    DraftTree,
    Opening,
)

assert sys.byteorder == "little", "the pair protocol sends tensor bytes as they lie in memory"

_STEP = struct.Struct("<QQIIIIII8s")
_ENTRY = struct.Struct("<qqqIBB2x")
_OPENING = struct.Struct(f"<{TENANT_BYTES}sI4x")
_REPLY = struct.Struct("<QQqqqqqI4x")
_TREE = struct.Struct("<qqqII")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name.encode().ljust(8, b"\0") for name, dtype in _DTYPES.items()}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}
_TREE_DTYPES = (torch.int64, torch.int64, torch.float32)


_STATUSES = {int(status): status for status in DraftStatus}


def encode_step(step: DraftStep) -> Frame:
    """A whole frame as buffers to be sent in order. The feature buffers are the tensors' own memory where possible.

    Raises ``FrameError`` for a shape or dtype that the message does not allow, or a number out of range.
    """
    entries = step.entries
    dtype, hidden = _shared_features(entries)
    table: list[int] = []
    features: Frame = []
    for entry in entries:
        rows = _check_entry(entry, dtype, hidden)
        table += (entry.sequence, entry.cycle, entry.base, rows, entry.draft, entry.opening is not None)
        if rows and hidden:
            features.append(_memory(entry.features))
    counts = (step.depth, step.top_k, step.num_draft_tokens, len(entries), len(step.closed))
    fixed = pack(_STEP.format, step.incarnation, step.step, *counts, hidden, _NAMES[dtype])
    tables = pack("<" + _ENTRY.format[1:] * len(entries), *table)
    closed = pack(f"<{len(step.closed)}q", *step.closed)
    openings = [entry.opening for entry in entries if entry.opening is not None]
    begun = b"".join([pack(_OPENING.format, opening.tenant, _check_opening(opening)) for opening in openings])
    tokens = _joined([*(opening.tokens for opening in openings), *(entry.tokens for entry in entries)])
    return frame_of(FrameKind.STEP, b"".join((fixed, tables, closed, begun, tokens)), features)


def decode_step(body: Body) -> DraftStep:
    """The step in a frame's body; its tensors are views of ``body``, which must not be reused.

    Raises ``FrameError`` for lengths that contradict each other or an unknown dtype name; allocates nothing by
    what the body claims.
    """
    size = len(body)
    if size < _STEP.size:
        raise FrameError(f"a step of {size} bytes is shorter than its {_STEP.size} fixed bytes")
    incarnation, number, depth, top_k, drafted, num_entries, num_closed, hidden, name = _STEP.unpack_from(body)
    closed_at = _STEP.size + num_entries * _ENTRY.size
    openings_at = closed_at + 8 * num_closed
    if openings_at > size:
        raise FrameError(f"a step of {size} bytes cannot hold {num_entries} entries and {num_closed} closed sequences")
    if name not in _BY_NAME:
        raise FrameError(f"features of dtype {name!r} are none of {', '.join(_DTYPES)}")
    dtype = _BY_NAME[name]
    table = list(_ENTRY.iter_unpack(memoryview(body)[_STEP.size : closed_at]))
    closed = struct.unpack_from(f"<{num_closed}q", body, closed_at)
    rows = [row[3] for row in table]
    total = sum(rows)
    openings, tokens_at = _decode_openings(body, openings_at, [bool(row[5]) for row in table])
    features_at = tokens_at + 8 * total
    end = features_at + total * hidden * dtype.itemsize
    if end != size:
        raise FrameError(
            f"a step of {size} bytes announces {total} rows of {hidden} numbers, which make it {end} bytes"
        )

    tokens = _view(body, torch.int64, total, tokens_at).split_with_sizes(rows)
    features = _view(body, dtype, total * hidden, features_at).view(total, hidden).split_with_sizes(rows)
    entries = tuple(
        DraftEntry(sequence, cycle, base, features[index], tokens[index], bool(draft), openings[index])
        for index, (sequence, cycle, base, _, draft, _) in enumerate(table)
    )
    return DraftStep(incarnation, number, depth, top_k, drafted, entries, closed)


def encode_reply(reply: DraftReply) -> Frame:
    """A whole frame as buffers to be sent in order. Raises ``FrameError`` like ``encode_step``."""
    trees = reply.trees
    table: list[int] = []
    for tree in trees:
        table += (tree.sequence, tree.cycle, tree.held, tree.status, _check_tree(tree))
    clock, slots = (reply.received, reply.finished), (reply.slots_used, reply.slots_total, reply.slots_cached)
    fixed = pack(_REPLY.format, reply.incarnation, reply.step, *clock, *slots, len(trees))
    tables = pack("<" + _TREE.format[1:] * len(trees), *table)
    tokens = _joined([tree.tokens for tree in trees])
    parents = _joined([tree.parents for tree in trees])
    scores = _joined([tree.scores for tree in trees])
    return frame_of(FrameKind.REPLY, b"".join((fixed, tables, tokens, parents, scores)), [])


def decode_reply(body: Body) -> DraftReply:
    """The reply in a frame's body; its tensors are views of ``body``, which must not be reused.

    Raises ``FrameError`` for lengths that contradict each other or an unknown status. Token ids and parents are not
    looked at: whoever builds a tree from them checks them.
    """
    size = len(body)
    if size < _REPLY.size:
        raise FrameError(f"a reply of {size} bytes is shorter than its {_REPLY.size} fixed bytes")
    incarnation, number, received, finished, used, total, cached, num_trees = _REPLY.unpack_from(body)
    tokens_at = _REPLY.size + num_trees * _TREE.size
    if tokens_at > size:
        raise FrameError(f"a reply of {size} bytes cannot hold {num_trees} trees")
    table = list(_TREE.iter_unpack(memoryview(body)[_REPLY.size : tokens_at]))
    counts = [row[4] for row in table]
    nodes = sum(counts)
    end = tokens_at + nodes * (8 + 8 + 4)
    if end != size:
        raise FrameError(f"a reply of {size} bytes announces {nodes} nodes, which make it {end} bytes")

    tokens = _view(body, torch.int64, nodes, tokens_at).split_with_sizes(counts)
    parents = _view(body, torch.int64, nodes, tokens_at + 8 * nodes).split_with_sizes(counts)
    scores = _view(body, torch.float32, nodes, tokens_at + 16 * nodes).split_with_sizes(counts)
    trees: list[DraftTree] = []
    for index, (sequence, cycle, held, code, _) in enumerate(table):
        status = _STATUSES.get(code)
        if status is None:
            raise FrameError(f"a reply names the status {code}, which does not exist")
        trees.append(DraftTree(sequence, cycle, status, held, tokens[index], parents[index], scores[index]))
    return DraftReply(incarnation, number, tuple(trees), received, finished, used, total, cached)


def _decode_openings(body: Body, at: int, expected: list[bool]) -> tuple[list[Opening | None], int]:
    """Each entry's opening, where one is ``expected``, and the offset behind them all."""
    if not any(expected):
        return [None] * len(expected), at
    tokens_at = at + sum(expected) * _OPENING.size
    if tokens_at > len(body):
        raise FrameError(f"a step of {len(body)} bytes cannot hold {sum(expected)} openings")
    table = list(_OPENING.iter_unpack(memoryview(body)[at:tokens_at]))
    lengths = [length for _, length in table]
    if 0 in lengths:
        raise FrameError("an opening is of no token")
    end = tokens_at + 8 * sum(lengths)
    if end > len(body):
        raise FrameError(f"a step of {len(body)} bytes cannot hold openings of {sum(lengths)} tokens")
    tokens = _view(body, torch.int64, sum(lengths), tokens_at).split_with_sizes(lengths)
    found = iter([Opening(tenant, part) for (tenant, _), part in zip(table, tokens, strict=True)])
    return [next(found) if is_there else None for is_there in expected], end


def _check_opening(opening: Opening) -> int:
    """The number of tokens of a well-formed opening."""
    length = opening.tokens.numel()
    if opening.tokens.shape != (length,) or opening.tokens.dtype != torch.int64 or not length:
        shape = tuple(opening.tokens.shape)
        raise FrameError(f"the tokens of an opening are of shape {shape} and {opening.tokens.dtype}")
    if len(opening.tenant) != TENANT_BYTES:
        raise FrameError(f"an opening names its tenant with {len(opening.tenant)} bytes instead of {TENANT_BYTES}")
    return length


def _shared_features(entries: tuple[DraftEntry, ...]) -> tuple[torch.dtype, int]:
    """Dtype and hidden size of a step's features."""
    if not entries:
        return torch.float32, 0
    features = entries[0].features
    if features.dtype not in _NAMES:
        raise FrameError(f"features of {features.dtype} are none of {', '.join(_DTYPES)}")
    return features.dtype, features.shape[-1] if features.dim() else 0


def _check_entry(entry: DraftEntry, dtype: torch.dtype, hidden: int) -> int:
    """The number of rows of an entry that fits its step."""
    features, tokens = entry.features, entry.tokens
    rows = tokens.numel()
    if tokens.shape != (rows,) or tokens.dtype != torch.int64:
        raise FrameError(f"sequence {entry.sequence}: tokens of shape {tuple(tokens.shape)} and {tokens.dtype}")
    if features.shape != (rows, hidden) or features.dtype != dtype:
        raise FrameError(
            f"sequence {entry.sequence}: features of shape {tuple(features.shape)} and {features.dtype} instead of "
            f"({rows}, {hidden}) and {dtype}, which its tokens and the step's first entry ask for"
        )
    return rows


def _check_tree(tree: DraftTree) -> int:
    """The number of drafted nodes of a well-formed tree."""
    parts = (tree.tokens, tree.parents, tree.scores)
    nodes = tree.tokens.numel()
    for part, dtype in zip(parts, _TREE_DTYPES, strict=True):
        if part.shape != (nodes,) or part.dtype != dtype:
            found = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
            raise FrameError(f"sequence {tree.sequence}: tokens, parents and scores of a tree are {found}")
    return nodes


def _joined(tensors: list[torch.Tensor]) -> bytes:
    """The bytes of (n,) tensors of one dtype, one after another."""
    if len(tensors) > 1:
        return _array(torch.cat(tensors)).tobytes()
    return _array(tensors[0]).tobytes() if tensors else b""


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as numpy sees it, bfloat16 as int16."""
    if tensor.requires_grad or not tensor.is_cpu:
        tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor that is not empty, in row-major order; its own memory if it lies like that on the CPU."""
    return np.ascontiguousarray(_array(tensor)).data.cast("B")


def _view(body: Body, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
    """(count,) elements that lie in ``body`` from byte ``offset`` on."""
    if count == 0:  # frombuffer refuses it
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(body, dtype=dtype, count=count, offset=offset)
