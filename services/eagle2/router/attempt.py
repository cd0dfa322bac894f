"""One attempt at a generation: the stream of one replica, with a bound on every wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

from eagle2.errors import DrainingError, UnavailableError
from eagle2.protocol import Commit
from eagle2.router.stream import close_quietly

Failure = Literal["crash", "hang", "drain", "end"]
"""Why a stream broke: its replica is gone, gave no sign of life, takes nothing new, or ended without saying why."""


class BrokenError(Exception):
    """A stream that another replica has to go on with. The message is fit for the client."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class Attempt:
    """Reads the commits of one replica, by one task at a time.

    Nothing may take longer than ``progress_timeout_s``: a replica that is at work says so with empty commits.
    """

    def __init__(self, commits: AsyncIterator[Commit], *, progress_timeout_s: float, close_timeout_s: float) -> None:
        self._commits = commits
        self._progress_timeout_s = progress_timeout_s
        self._close_timeout_s = close_timeout_s
        self._finished = False

    async def next(self) -> Commit:
        """The next commit, maybe an empty one. Raises BrokenError, and RequestError as the replica does."""
        try:
            async with asyncio.timeout(self._progress_timeout_s):
                commit = await anext(self._commits)
        except TimeoutError as error:
            seconds = f"{self._progress_timeout_s:g} seconds"
            raise BrokenError("hang", f"The verifier gave no sign of life for {seconds}.") from error
        except DrainingError as error:
            raise BrokenError("drain", str(error) or "The verifier is shutting down.") from error
        except UnavailableError as error:
            raise BrokenError("crash", str(error) or "The verifier is gone.") from error
        except StopAsyncIteration as error:
            raise BrokenError("end", "The generation ended without saying why.") from error
        if commit.error_code == "verifier_failed":
            raise BrokenError("crash", commit.error or "The verifier has failed.")
        if commit.error_code == "verifier_stopped":
            raise BrokenError("drain", commit.error or "The verifier has stopped.")
        self._finished = commit.finish_reason is not None
        return commit

    async def close(self) -> None:
        """End the decoding, within ``close_timeout_s``. Raises nothing."""
        await close_quietly(self._commits, finished=self._finished, timeout_s=self._close_timeout_s)
