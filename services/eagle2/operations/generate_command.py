"""``eagle2 generate``: one answer in this process, its tokens as they come and a closing line."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from eagle2.config import Settings, load_settings
from eagle2.errors import ConfigError
from eagle2.operations.settings_flags import add_model_flags, given_settings
from eagle2.protocol import GenerationRequest, ModelDescription, SamplingParams, StopConditions

if TYPE_CHECKING:
    from eagle2.evaluation.measure import Generation
    from eagle2.verifier.service import VerifierService

_WARM_UP_TOKENS = 8
_CLOSED_PIPE = 128 + 13  # the status of a process that SIGPIPE ends


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eagle2 generate``. ``--top-k`` is the sampling one, ``--top-k-draft`` the tree's."""
    add = parser.add_argument
    add("prompt", help="what to say to the model; - reads it from standard input")
    add("--system", metavar="TEXT", help="a system message before it")
    add("--raw", action="store_true", help="continue the text as it stands, without a chat template")
    add("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that sum up to P")
    add("--top-k", type=int, default=0, dest="sample_top_k", metavar="N", help="sample from the N likeliest tokens")
    add("--seed", type=int, metavar="N", help="of the sampling; default: drawn")
    add("--no-speculation", action="store_true", help="decode plainly, one token a step")
    add("--compare", action="store_true", help="decode plainly too; compare tokens and speed")
    add_model_flags(parser)
    add("--depth", type=int, metavar="N", help="levels of the draft tree")
    add("--top-k-draft", type=int, dest="top_k", metavar="N", help="nodes of the tree that are expanded per level")
    add("--num-draft-tokens", type=int, metavar="N", help="nodes of the tree that are verified per step")
    add("--threads", type=int, metavar="N", help="CPU threads; default: all cores")


def run(args: argparse.Namespace) -> int:
    """Generate; returns 1 where --compare finds another token. Raises ``Eagle2Error`` for what cannot be done."""
    settings = load_settings(flags=given_settings(args), environ=True)
    # Slots for one sequence are enough here.
    settings = replace(settings, engine=replace(settings.engine, max_sequences=1))
    sampling, stop = _sampling(args), _stop(args)
    if args.compare and (args.no_speculation or settings.model.draft is None):
        raise ConfigError("--compare needs speculation, which --no-speculation or --draft none switches off.")
    if args.raw and args.system is not None:
        raise ConfigError("--system belongs to a chat, and --raw continues a text without one.")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    try:
        return asyncio.run(_generate(args, settings, text, sampling, stop))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise
    except BrokenPipeError:
        # Nobody reads any more. What is still buffered must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """Raises ``ConfigError`` with the option's name for a value out of its range."""
    for name, value, low, high in (
        ("--max-tokens", args.max_tokens, 1, None),
        ("--temperature", args.temperature, 0, 2),
        ("--top-p", args.top_p, 0, 1),
        ("--top-k", args.sample_top_k, 0, None),
        ("--seed", args.seed, 0, 2**64 - 1),
    ):
        inside = value is None or (value >= low and (high is None or value <= high))
        if not inside:
            bound = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{name} must be {bound}, not {value}.")
    if args.top_p == 0:
        raise ConfigError("--top-p must be above 0, or no token is left.")
    return SamplingParams(
        seed=secrets.randbits(64) if args.seed is None else args.seed,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.sample_top_k,
    )


def _stop(args: argparse.Namespace) -> StopConditions:
    return StopConditions(max_tokens=args.max_tokens)


async def _generate(
    args: argparse.Namespace, settings: Settings, text: str, sampling: SamplingParams, stop: StopConditions
) -> int:
    # The command line loads this module to show its options; torch comes in only now.
    from eagle2.evaluation.measure import measure, wait_until_paired
    from eagle2.verifier.start import start_in_one_process

    service = start_in_one_process(settings)
    try:
        description = await service.describe()
        ids = _prompt_ids(args, description, text)
        speculation = description.speculation and not args.no_speculation
        if speculation:
            await wait_until_paired(service)

        def request(name: str, speculation: bool) -> GenerationRequest:
            return GenerationRequest(name, "local", ids, sampling, stop, speculation)

        if args.compare:
            # What the first forward passes have to prepare would count for the one that goes first.
            for name, on in (("warm-up", True), ("warm-up-plain", False)):
                warm = replace(request(name, on), stop=StopConditions(min(_WARM_UP_TOKENS, stop.max_tokens)))
                await measure(service, warm)
        result = await measure(service, request("answer", speculation), _write)
        _write("\n")
        _say(_closing_line(result, description.dtype, speculation))
        return await _compare(service, request("plain", False), result) if args.compare else 0
    finally:
        service.close()


def _prompt_ids(args: argparse.Namespace, description: ModelDescription, text: str) -> tuple[int, ...]:
    from eagle2.evaluation.prompts import PromptEncoder

    encoder = PromptEncoder(description)
    return encoder.raw(text) if args.raw else encoder.chat(text, args.system)


async def _compare(service: VerifierService, request: GenerationRequest, result: Generation) -> int:
    """Run the same request plainly and say how it compares. 1 where a token differs."""
    from eagle2.evaluation.divergence import best_two_gap, is_rounding
    from eagle2.evaluation.measure import first_difference, measure

    plain = await measure(service, request)
    position = first_difference(result.token_ids, plain.token_ids)
    if position is not None:
        with_it, without = (_token_at(ids, position) for ids in (result.token_ids, plain.token_ids))
        context = [*request.prompt_ids, *plain.token_ids[:position]]
        model = service.target_model
        gap = best_two_gap(model, context)
        allowed = is_rounding(gap, model.dtype, model.device)
        _say(
            f"Speculation changed the answer: at position {position} it gives {with_it}, plain decoding {without}; "
            f"the two best logits there are {gap:.4f} apart, "
            + ("which is rounding on this device." if allowed else "which rounding does not explain.")
        )
        return 0 if allowed else 1
    faster = f"{result.decode_rate / plain.decode_rate:.2f} times as fast" if plain.decode_rate else "too short to time"
    _say(f"Plain decoding: {plain.decode_rate:.1f} tok/s, the same {len(plain.token_ids)} token ids; "
         f"speculation is {faster}.")  # fmt: skip
    return 0


def _token_at(ids: tuple[int, ...], position: int) -> str:
    return f"token {ids[position]}" if position < len(ids) else "no token"


def _closing_line(result: Generation, dtype: str, speculation: bool) -> str:
    parts = [f"{len(result.token_ids)} tokens", f"first after {result.first_token_s:.2f} s"]
    parts.append(f"then {result.decode_rate:.1f} tok/s")
    if speculation and result.cycles:
        parts.append(f"tau {result.tau:.2f}")
    parts.append(dtype)
    if result.finish_reason == "length":
        parts.append("cut at the length limit")
    return ", ".join(parts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    """On stderr: stdout is the answer alone."""
    print(f"eagle2: {text}", file=sys.stderr, flush=True)
