"""An answer in the making: what its client has been sent, and what another replica must be told to go on with it."""

from __future__ import annotations

from dataclasses import replace

from eagle2.protocol import Commit, GenerationRequest, Usage


class Answer:
    """All that came of one request so far, over all attempts."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._output_ids = list(request.output_ids)
        self._characters = request.characters_released
        self._attempts = 0
        # Of the attempts that broke: only the last one tells its counts.
        self._broken_cycles = 0
        self._broken_accepted = 0
        self._commits = 0
        self._cycles = 0
        self._tokens = 0

    @property
    def request(self) -> GenerationRequest:
        """As the client made it."""
        return self._request

    @property
    def has_tokens(self) -> bool:
        """Whether the client has been sent any."""
        return len(self._output_ids) > len(self._request.output_ids)

    def begin(self) -> GenerationRequest:
        """The request for one more attempt, which goes on behind the last token that was taken.

        The text may end before the tokens do: what was held back as a possible stop string, or as part of a character,
        comes out of the next verifier, which reads all tokens and releases what the client has not been sent yet.
        """
        self._broken_cycles += self._cycles
        self._broken_accepted += self._tokens - self._commits
        self._commits = self._cycles = self._tokens = 0
        request = replace(
            self._request,
            output_ids=tuple(self._output_ids),
            characters_released=self._characters,
            attempt=self._request.attempt + self._attempts,
        )
        self._attempts += 1
        return request

    def take(self, commit: Commit) -> Commit:
        """Note what is about to be sent to the client; the last item gets the counts of the whole answer."""
        if commit.token_ids:
            self._commits += 1
            self._cycles += bool(self._output_ids)  # reading the prompt gives the first token, before any cycle
            self._tokens += len(commit.token_ids)
            self._output_ids.extend(commit.token_ids)
        self._characters += len(commit.text)
        if commit.usage is None or self._attempts <= 1:
            return commit
        return replace(commit, usage=self.whole_usage(commit.usage))

    def whole_usage(self, last: Usage) -> Usage:
        """The counts of all attempts, of which only the ``last`` has told its own.

        Prompt and completion tokens are those of the answer, each once: a verifier that goes on counts the tokens
        that it was given as output. Cycles are summed, and so are accepted tokens: a broken attempt has one cycle for
        each commit that arrived behind the first token, and all tokens of a commit but one were accepted. Tokens that
        a broken attempt rejected, or lost on the way, are not known and not counted. Cached tokens are those of the
        last attempt.
        """
        return replace(
            last,
            accepted_prediction_tokens=last.accepted_prediction_tokens + self._broken_accepted,
            cycles=last.cycles + self._broken_cycles,
        )
