"""The command line: ``eagle2 serve | generate | train | bench``. Each command imports what it needs, when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle2 import __version__
from eagle2.errors import Eagle2Error

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; refusals are one sentence on stderr and status 1."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except Eagle2Error as error:
        print(f"eagle2: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eagle2", description="Serve a chat model with EAGLE-2 speculative decoding.")
    parser.add_argument("--version", action="version", version=f"eagle2 {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve over HTTP on a local Ray, until Ctrl-C")
    serve.add_argument("--config", type=Path, metavar="FILE", help="a Serve config; default: the one of the package")
    _add_model_flags(serve)
    _add_engine_flags(serve)
    serve.add_argument("--served-model-name", metavar="NAME", help="the name that clients ask for")
    serve.add_argument("--host", help="the address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, help="the port to listen on (default 8000)")
    serve.set_defaults(command=_serve)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="MODEL", help="a folder, a hub id, a GGUF file, or 'embedded' (default)")
    parser.add_argument("--draft", metavar="HEAD", help="a folder, a hub id, 'embedded' (default), or 'none'")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: the fastest that the device has")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="default: what the checkpoint says")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-sequences", type=int, metavar="N", help="sequences that are decoded at once")
    parser.add_argument("--kv-slots", type=int, metavar="TOKENS", help="size of the KV cache; default: from memory")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the draft tree")
    parser.add_argument("--top-k", type=int, metavar="N", help="nodes that are expanded per level")
    parser.add_argument("--num-draft-tokens", type=int, metavar="N", help="nodes that are verified per step")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the verifier")


_FLAGS = {
    "model": ("target", "draft", "dtype", "device", "max_model_len", "served_model_name"),
    "engine": ("max_sequences", "kv_slots", "depth", "top_k", "num_draft_tokens", "threads"),
    "http": ("host", "port"),
}


def settings_flags(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The flags that were given, by section, for ``load_settings``."""
    given = {
        section: {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
        for section, names in _FLAGS.items()
    }
    if given["model"].get("draft") == "none":
        given["model"]["draft"] = None
    return {section: values for section, values in given.items() if values}


def _serve(arguments: argparse.Namespace) -> int:
    from eagle2.operations import serve_command

    return serve_command.run(arguments.config, settings_flags(arguments))


if __name__ == "__main__":
    sys.exit(main())
