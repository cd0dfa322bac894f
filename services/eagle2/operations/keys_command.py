"""``eagle2 keys``: new API keys, and whether a key file can be used."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from eagle2.router.tenants import KeyFile, key_line, new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``new`` and ``check``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a key: it goes to stderr, its line for the key file to stdout")
    new.add_argument("tenant", help="whose key it is: 1 to 128 of A-Z a-z 0-9 . _ : @ -")
    check = actions.add_parser("check", help="say how many keys of how many tenants a key file has")
    check.add_argument("file", type=Path)


def run(args: argparse.Namespace) -> int:
    """Raises ``ConfigError`` for a tenant's name or a file that cannot be used."""
    if args.action == "check":
        callers = KeyFile(args.file).callers
        print(f"keys: {len(callers)}, tenants: {len({caller.tenant for caller in callers})}")
        return 0
    key = new_key()
    line = key_line(args.tenant, key)
    print(f"The key, which is stored nowhere: {key}", file=sys.stderr)
    print(line)
    return 0
