"""Frames of the pair protocol: what every message is wrapped in, and the greeting. Nothing is pickled.

Little-endian, version 2, everything at a multiple of its own word size:

    frame     header | body
    header    magic 4s | version u16 | kind u16 | body length u64
    greeting  incarnation u64 | UTF-8 text          (HELLO, WELCOME, BUSY, MISMATCH, see ``node.py``)

``wire.py`` says what the bodies of steps and replies are. Both ends speak one version; a frame of another is refused.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeAlias

from eagle2.errors import Eagle2Error

Frame: TypeAlias = list[bytes | memoryview]
Body: TypeAlias = bytearray | memoryview

MAGIC = b"EAG2"
VERSION = 2
MAX_BODY_BYTES = 256 * 1024 * 1024

_HEADER = struct.Struct("<4sHHQ")
_TEXT = struct.Struct("<Q")

HEADER_BYTES = _HEADER.size


class FrameError(Eagle2Error, ValueError):
    """Bytes that are no frame of this protocol version, or a message that no frame can hold."""


class VersionError(FrameError):
    """A frame of the pair protocol, but of another version."""


class FrameKind(IntEnum):
    """What a frame's body is."""

    HELLO = 1  # verifier: its incarnation, the fingerprint of its model
    WELCOME = 2  # proposer: its incarnation, its fingerprint; the lease is granted
    BUSY = 3  # proposer: the incarnation of the verifier that holds the lease
    MISMATCH = 4  # proposer: its incarnation, its fingerprint, which is not the verifier's
    STEP = 5
    REPLY = 6


_KINDS = frozenset(FrameKind)


def encode_text(kind: FrameKind, incarnation: int, text: str) -> Frame:
    """A frame of the greeting."""
    return frame_of(kind, pack(_TEXT.format, incarnation) + text.encode(), [])


def decode_text(body: Body) -> tuple[int, str]:
    """Incarnation and text of a frame of the greeting. Raises ``FrameError``."""
    if len(body) < _TEXT.size:
        raise FrameError(f"a greeting of {len(body)} bytes is shorter than its {_TEXT.size} fixed bytes")
    try:
        return _TEXT.unpack_from(body)[0], bytes(body[_TEXT.size :]).decode()
    except UnicodeDecodeError as error:
        raise FrameError(f"a greeting is no UTF-8 text: {error}") from error


def decode_header(header: Body | bytes) -> tuple[FrameKind, int]:
    """Kind and body length in bytes of the frame that ``header`` opens.

    Raises ``VersionError`` for another version, ``FrameError`` for another protocol, an unknown kind or a length over
    ``MAX_BODY_BYTES``, so that nobody allocates what a stray peer asks for.
    """
    if len(header) != HEADER_BYTES:
        raise FrameError(f"a frame header has {HEADER_BYTES} bytes, not {len(header)}")
    magic, version, kind, length = _HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError(f"the peer does not speak the pair protocol: its frame opens with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise VersionError(
            f"the peer speaks version {version} of the pair protocol, this side speaks version {VERSION}"
        )
    if kind not in _KINDS:
        raise FrameError(f"a frame is of the kind {kind}, which does not exist")
    if length > MAX_BODY_BYTES:
        raise FrameError(f"a frame announces {length} bytes, more than the {MAX_BODY_BYTES} allowed")
    return FrameKind(kind), length


def pack(layout: str, *values: object) -> bytes:
    """``struct.pack`` that raises ``FrameError`` for a number out of range."""
    try:
        return struct.pack(layout, *values)
    except struct.error as error:
        raise FrameError(f"a number of {values} does not fit its field: {error}") from error


def frame_of(kind: FrameKind, head: bytes, rest: Frame) -> Frame:
    """A whole frame whose body is ``head`` and ``rest``. Raises ``FrameError`` when it is over ``MAX_BODY_BYTES``."""
    size = len(head) + sum(map(len, rest))
    if size > MAX_BODY_BYTES:
        raise FrameError(f"a message of {size} bytes is over the {MAX_BODY_BYTES} allowed: send its rows in chunks")
    return [_HEADER.pack(MAGIC, VERSION, kind, size) + head, *rest]
