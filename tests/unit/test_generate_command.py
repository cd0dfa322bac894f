"""``eagle2 generate``: the answer on stdout, what it took on stderr, and how it ends."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from eagle2.cli import main
from eagle2.config import Settings
from eagle2.evaluation.measure import bench_request, measure
from eagle2.models.tiny import write_tiny_target
from eagle2.protocol import Commit, GenerationRequest, ModelDescription, Usage, Verifier
from fakes.checkpoints import golden_flags, write_golden_target
from fakes.verifier import describe
from golden_pair import load_target

PROMPT = "our neighbour buys the red mirror "
CLOSING = re.compile(r"eagle2: (\d+) tokens, first after [\d.]+ s, then [\d.]+ tok/s(?:, tau ([\d.]+))?, float32(.*)\n")


def closing_line(text: str) -> re.Match[str]:
    found = CLOSING.fullmatch(text)
    assert found, text
    return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_golden_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def flags(target: Path) -> list[str]:
    return golden_flags(target)


def test_the_answer_alone_is_on_stdout_and_its_numbers_on_stderr(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", PROMPT, "--max-tokens", "40", *flags]) == 0
    speculated = capsys.readouterr()
    closing = closing_line(speculated.err)
    assert closing[1] == "40"
    assert closing[3] == ", cut at the length limit"
    assert 1.2 < float(closing[2]) <= 5.0

    assert main(["generate", PROMPT, "--max-tokens", "40", "--no-speculation", *flags]) == 0
    plain = capsys.readouterr()
    assert plain.out == speculated.out
    assert len(plain.out) == 41
    assert closing_line(plain.err)[2] is None


def test_without_a_draft_head_it_decodes_plainly(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--max-tokens", "9", *flags, "--draft", "none"]) == 0
    shown = capsys.readouterr()
    assert closing_line(shown.err).group(1, 2) == ("9", None)
    assert len(shown.out) == 10


def test_the_tree_is_as_the_flags_say(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    tree = ["--depth", "1", "--top-k-draft", "2", "--num-draft-tokens", "2"]
    assert main(["generate", PROMPT, "--max-tokens", "60", *tree, *flags]) == 0
    tau = float(closing_line(capsys.readouterr().err)[2])
    assert 1.0 < tau <= 2.0  # one level can add one token to the target's own


def test_a_seed_repeats_a_sampled_answer(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def sampled(seed: int, *more: str) -> str:
        options = ["--temperature", "1.2", "--top-p", "0.95", "--top-k", "50", "--seed", str(seed)]
        assert main(["generate", PROMPT, "--max-tokens", "30", *options, *more, *flags]) == 0
        return capsys.readouterr().out

    assert sampled(5) == sampled(5, "--no-speculation")
    assert sampled(5) != sampled(6)


def test_compare_says_that_the_tokens_are_the_same(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--max-tokens", "24", "--compare", *flags]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"eagle2: Plain decoding: [\d.]+ tok/s, the same 24 token ids; speculation is [\d.]+ times as fast.", last
    )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (b"abcXef", "at position 3 it gives token 100, plain decoding token 88"),
        (b"abcd", "at position 4 it gives token 101, plain decoding no token"),
    ],
)
def test_compare_fails_at_the_first_other_token(
    changed: bytes,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(settings: Settings) -> _Scripted:
        return _Scripted(b"abcdef", changed)

    monkeypatch.setattr("eagle2.verifier.start.start_in_one_process", start)
    assert main(["generate", "hello", "--compare"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "abcdef\n"
    assert f"Speculation changed the answer: {sentence}; the two best logits there are " in shown.err
    assert shown.err.endswith("which rounding does not explain.\n")


class _Scripted:
    """A service in which speculation changes the answer."""

    target_model = load_target("A")

    def __init__(self, speculated: bytes, plain: bytes) -> None:
        self._answers = {True: speculated, False: plain}

    async def describe(self) -> ModelDescription:
        return describe()

    async def stats(self) -> dict[str, float]:
        return {"proposer_up": 1.0}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
        answer = self._answers[request.speculation]
        usage = Usage(prompt_tokens=len(request.prompt_ids), completion_tokens=len(answer), cycles=2)
        yield Commit(tuple(answer[:1]), answer[:1].decode())
        yield Commit(tuple(answer[1:]), answer[1:].decode(), "stop", usage)

    def close(self) -> None:
        pass


def test_a_prompt_can_come_from_standard_input(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(prompt: str, *more: str) -> str:
        assert main(["generate", prompt, "--max-tokens", "12", *more, *flags]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    given = answer(PROMPT)
    assert answer("-") == given
    # The template of this model writes a system message before the user's, and nothing else.
    assert answer(PROMPT, "--raw") == given
    assert answer("buys the red mirror ", "--system", "our neighbour") == given


def test_a_model_without_a_template_continues_raw_text_only(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = ["--target", str(write_golden_target(tmp_path, template=False)), *flags[2:]]
    assert main(["generate", PROMPT, "--max-tokens", "4", *bare]) == 1
    assert "has no chat template: it can only continue a raw text (--raw)" in capsys.readouterr().err
    assert main(["generate", PROMPT, "--max-tokens", "4", "--raw", *bare]) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1, not 0."),
        (["--temperature", "-1"], "--temperature must be between 0 and 2, not -1.0."),
        (["--temperature", "nan"], "--temperature must be between 0 and 2, not nan."),
        (["--top-p", "0"], "--top-p must be above 0, or no token is left."),
        (["--top-k", "-4"], "--top-k must be at least 0, not -4."),
        (["--seed", "-1"], f"--seed must be between 0 and {2**64 - 1}, not -1."),
        (["--compare", "--no-speculation"], "--compare needs speculation"),
        (["--compare", "--draft", "none"], "--compare needs speculation"),
        (["--raw", "--system", "x"], "--system belongs to a chat"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", *options]) == 1
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


@pytest.fixture
def running(tmp_path: Path) -> subprocess.Popen[bytes]:
    """An answer of a random target, long enough not to end before a test that has to wait for a core."""
    target = write_tiny_target(tmp_path / "target", max_position_embeddings=65536)
    flags = ["--target", str(target), "--draft", "none", "--dtype", "float32", "--threads", "1"]
    command = [sys.executable, "-m", "eagle2.cli", "generate", PROMPT, "--raw", "--max-tokens", "60000", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heed_interrupts)


def _heed_interrupts() -> None:
    """Whoever runs the tests in the background has them ignored, and what is started inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_in_the_middle_of_an_answer_ends_cleanly(running: subprocess.Popen[bytes]) -> None:
    assert running.stdout
    assert running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"Traceback" not in errors
    assert b"tok/s" not in errors


def test_a_cancelled_measurement_does_not_wait_for_the_items_that_are_there_already() -> None:
    class Ready:
        """A verifier whose whole answer is there at once."""

        async def generate(self, request: GenerationRequest) -> AsyncIterator[Commit]:
            for _ in range(100):
                yield Commit((1,), "a")
            yield Commit((), "", "length", Usage(prompt_tokens=1, completion_tokens=100))

    shown: list[str] = []

    async def interrupted() -> None:
        request = bench_request((1,), 100, speculation=False, name="x")
        task = asyncio.current_task()
        assert task is not None

        def show(text: str) -> None:
            shown.append(text)
            if len(shown) == 3:
                task.cancel()

        await measure(cast(Verifier, Ready()), request, show)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert len(shown) == 3


def test_a_reader_that_has_left_ends_it_quietly(running: subprocess.Popen[bytes]) -> None:
    assert running.stdout
    assert running.stderr
    assert running.stdout.read(1)
    running.stdout.close()
    errors = running.stderr.read()
    running.stderr.close()
    assert running.wait(timeout=60) == 141
    assert errors == b""
