"""Messages of a pair, small ones, and what the other side makes of them."""

from __future__ import annotations

import torch

from eagle2.transport.frames import HEADER_BYTES, Frame, FrameKind, decode_header
from eagle2.transport.messages import DraftEntry, DraftStep
from eagle2.transport.wire import decode_step, encode_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def body_of(frame: Frame, kind: FrameKind) -> bytearray:
    """What a peer would receive after the header."""
    data = b"".join(frame)
    assert decode_header(data[:HEADER_BYTES]) == (kind, len(data) - HEADER_BYTES)
    return bytearray(data[HEADER_BYTES:])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes, NaN included."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.contiguous().view(-1).view(torch.uint8).tolist()
        == other.contiguous().view(-1).view(torch.uint8).tolist()
    )


def step_of(*entries: DraftEntry, closed: tuple[int, ...] = ()) -> DraftStep:
    return DraftStep(2**63 + 5, 17, 6, 10, 59, entries, closed)


def entry_of(features: torch.Tensor, sequence: int = 3) -> DraftEntry:
    return DraftEntry(sequence, 4, 0, features, torch.arange(features.shape[0]))


def through_wire(features: torch.Tensor) -> torch.Tensor:
    """Features as the other side sees them."""
    return decode_step(body_of(encode_step(step_of(entry_of(features))), FrameKind.STEP)).entries[0].features
