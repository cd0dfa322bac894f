"""The command line. A command is a module with ``add_arguments`` and ``run``; only the one that is called is loaded."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from eagle2 import __version__
from eagle2.errors import Eagle2Error

_COMMANDS = {
    "serve": ("eagle2.operations.serve_command", "serve over HTTP on a Ray of its own, until Ctrl-C"),
    "generate": ("eagle2.operations.generate_command", "answer one prompt in this process, without a server"),
    "keys": ("eagle2.operations.keys_command", "make API keys, and check a file of them"),
    "sessions": (
        "eagle2.operations.sessions_command",
        "list, show, move and drop the conversations in the session store",
    ),
    "train": ("eagle2.training.command", "have the target answer prompts, and train a draft head on that"),
    "bench": ("eagle2.evaluation.command", "measure speed beside transformers, or methods by tasks as in the paper"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; a refusal is one sentence on stderr and status 1."""
    listing = "\n".join(f"  {name:<10}{text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="eagle2",
        description="Serve a chat model with EAGLE-2 speculative decoding.",
        epilog=f"commands:\n{listing}\n\n'eagle2 COMMAND --help' says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"eagle2 {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)

    module, text = _COMMANDS[given.command]
    try:
        command = importlib.import_module(module)
        options = argparse.ArgumentParser(prog=f"eagle2 {given.command}", description=f"{text.capitalize()}.")
        command.add_arguments(options)
        status: int = command.run(options.parse_args(given.arguments))
    except Eagle2Error as error:
        print(f"eagle2 {given.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
