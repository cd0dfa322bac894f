"""Frames over a connected Unix-domain stream socket: no copy of a tensor, a deadline on every wait within a frame."""

from __future__ import annotations

import os
import select
import socket
import struct
from pathlib import Path

import numpy as np

from eagle2.errors import ConfigError, LinkDownError
from eagle2.transport.frames import HEADER_BYTES, Frame, FrameKind, decode_header

# sockaddr_un holds 108 bytes on Linux and 104 elsewhere, the closing zero included.
MAX_PATH_BYTES = 103
_BUFFERS_PER_CALL = 512  # the kernel takes at most 1024
_SOCKET_BUFFER_BYTES = 1 << 20


def check_path(path: str | Path) -> str:
    """``path`` as a string. Raises ``ConfigError`` when it is longer than a socket address can be."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(f"the socket path {path} has {length} bytes; a Unix socket takes {MAX_PATH_BYTES} at most")
    return str(path)


class FrameStream:
    """One end of a connection. One thread may send while another one reads.

    ``stall_s`` bounds how long a begun frame may stand still in either direction; a peer that is slower is given up.
    """

    def __init__(self, connection: socket.socket, *, stall_s: float) -> None:
        self._socket = connection
        self._stall_s = stall_s
        self._header = bytearray(HEADER_BYTES)
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        # The kernel's own timeouts: Python's would poll before every call, and reading and sending need to differ.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(stall_s))
        self.set_read_deadline(stall_s)

    def set_read_deadline(self, seconds: float) -> None:
        """How long ``read`` waits for the next bytes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def send(self, frame: Frame) -> None:
        """Send a whole frame. Raises ``LinkDownError`` when the peer is gone or takes nothing for ``stall_s``."""
        buffers = frame
        while buffers:
            try:
                sent = self._socket.sendmsg(buffers[:_BUFFERS_PER_CALL])
            except BlockingIOError as error:
                raise LinkDownError(f"the peer took no byte of a frame for {self._stall_s:g} s") from error
            except OSError as error:
                raise LinkDownError(f"the peer is gone: {error}") from error
            buffers = _after(buffers, sent)

    def read(self, *, idle: bool) -> tuple[FrameKind, memoryview]:
        """The next frame, in memory of its own.

        With ``idle`` the wait for its first byte has no end. Raises ``LinkDownError`` when the peer closes or stalls,
        ``FrameError`` for what is no frame; the stream is of no use after either.
        """
        self._fill(memoryview(self._header), idle=idle)
        kind, length = decode_header(self._header)
        # numpy leaves the memory untouched, so a length that never arrives costs nothing.
        body = np.empty(length, dtype=np.uint8).data
        self._fill(body, idle=False)
        return kind, body

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, whatever is left to read."""
        watch = select.poll()
        watch.register(self._socket, select.POLLRDHUP)  # POLLHUP and POLLERR are always reported
        return bool(watch.poll(0))

    def shutdown(self) -> None:
        """End the connection for both sides; a thread that waits in ``read`` or ``send`` wakes up."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was faster

    def close(self) -> None:
        """Give the descriptor back. Only when no thread uses the stream any more."""
        self._socket.close()

    def _fill(self, view: memoryview, *, idle: bool) -> None:
        at, size = 0, len(view)
        while at < size:
            try:
                count = self._socket.recv_into(view[at:], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                if idle and at == 0:
                    continue
                raise LinkDownError("the peer did not send the rest of a frame in time") from error
            except OSError as error:
                raise LinkDownError(f"the peer is gone: {error}") from error
            if count == 0:
                raise LinkDownError("the peer closed the connection")
            at += count


def _after(buffers: Frame, sent: int) -> Frame:
    """What is left of ``buffers`` once ``sent`` bytes of them are out."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


def _timeval(seconds: float) -> bytes:
    # Zero would mean no timeout at all.
    microseconds = max(1, round(seconds * 1e6))
    return struct.pack("@ll", *divmod(microseconds, 1_000_000))
