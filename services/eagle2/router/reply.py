"""The response of a generation: one JSON object, or one event per commit."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eagle2.errors import RequestError, UnavailableError
from eagle2.protocol import Commit
from eagle2.router.failures import GenerationError, JSONReply, describe_failure
from eagle2.router.replies import ReplyShape
from eagle2.router.settings import RouterSettings
from eagle2.router.sse import DONE, event
from eagle2.router.stream import ClientGone, CommitStream, SlowReader, bounded, while_connected
from eagle2.telemetry import metrics
from eagle2.telemetry.recorder import Recorder

_LOG = logging.getLogger(__name__)
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationReply(Response):
    """Runs the generation while it is sent. Until the first commit a failure still gets its own status."""

    def __init__(
        self,
        generate: Callable[[], AsyncIterator[Commit]],
        request_id: str,
        shape: ReplyShape,
        *,
        stream: bool,
        include_usage: bool,
        endpoint: str,
        settings: RouterSettings,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.generate = generate
        self.request_id = request_id
        self.shape = shape
        self.stream = stream
        self.include_usage = include_usage
        self.endpoint = endpoint
        self.settings = settings
        self.recorder = recorder
        self.clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = self.clock()
        write = bounded(send, self.settings.slow_reader_timeout_s)
        commits = CommitStream(self.generate(), self.settings.close_timeout_s)
        self.recorder.add(metrics.ROUTER_REQUESTS_RUNNING, 1)
        try:
            if self.stream:
                await while_connected(receive, lambda: self._stream(write, commits, began))
            else:
                whole = await while_connected(receive, lambda: self._whole(commits, began))
                await whole(scope, receive, write)
        except ClientGone:
            self.recorder.add(metrics.REQUESTS_ABORTED, endpoint=self.endpoint, reason="disconnect")
        except SlowReader:
            # Returning with the response incomplete makes the server close the connection.
            self.recorder.add(metrics.REQUESTS_ABORTED, endpoint=self.endpoint, reason="slow_reader")
        finally:
            self.recorder.add(metrics.ROUTER_REQUESTS_RUNNING, -1)
            self.recorder.observe(metrics.REQUEST_SECONDS, self.clock() - began, endpoint=self.endpoint)
            await commits.close()

    async def _first(self, commits: CommitStream, began: float) -> Commit:
        commit = await commits.next()
        self.recorder.observe(metrics.TIME_TO_FIRST_TOKEN, self.clock() - began, endpoint=self.endpoint)
        return commit

    async def _whole(self, commits: CommitStream, began: float) -> Response:
        commit = await self._first(commits, began)
        texts, ids = [commit.text], list(commit.token_ids)
        while not commits.finished:
            commit = await commits.next()
            texts.append(commit.text)
            ids.extend(commit.token_ids)
        assert commit.finish_reason is not None
        assert commit.usage is not None
        return JSONReply(self.shape.whole("".join(texts), tuple(ids), commit.finish_reason, commit.usage))

    async def _stream(self, write: Send, commits: CommitStream, began: float) -> None:
        commit = await self._first(commits, began)
        await write({"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)})
        opening = self.shape.opening()
        await self._send(write, b"" if opening is None else event(opening), commit)
        try:
            while not commits.finished:
                commit = await commits.next()
                await self._send(write, b"", commit)
        except SlowReader:
            raise
        except Exception as error:
            await write({"type": "http.response.body", "body": self._failure(error)})
            return
        tail = DONE
        if self.include_usage:
            assert commit.usage is not None
            tail = event(self.shape.counts(commit.usage)) + DONE
        await write({"type": "http.response.body", "body": tail})

    async def _send(self, write: Send, before: bytes, commit: Commit) -> None:
        if commit.text or commit.token_ids:
            before += event(self.shape.delta(commit.text, commit.token_ids))
        if commit.finish_reason is not None:
            before += event(self.shape.closing(commit.finish_reason))
        if before:
            await write({"type": "http.response.body", "body": before, "more_body": True})

    def _failure(self, error: Exception) -> bytes:
        if not isinstance(error, GenerationError | UnavailableError | RequestError):
            _LOG.error("request %s failed in its stream: %s", self.request_id, type(error).__name__)
        self.recorder.add(metrics.STREAM_ERRORS, endpoint=self.endpoint)
        _, body = describe_failure(error, self.request_id)
        return event({"error": body})
