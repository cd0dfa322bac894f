"""``eagle2 sessions``: which verifier holds which conversation, read and changed by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from eagle2.config import load_settings
from eagle2.errors import ConfigError, UnavailableError
from eagle2.session.store import Owner, SessionEntry, SessionStore, StoreError
from eagle2.session.stores import create_store

_TIMEOUT_S = 5.0
_NAME_LENGTH = 64
_HEXADECIMAL = re.compile(r"[0-9a-f]{1,64}", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of ``eagle2 sessions`` and their options."""
    # The store may stand on either side of the action; what is not given must not undo what is.
    store = argparse.ArgumentParser(add_help=False)
    text = "the session store of the routers, redis://... ; default: EAGLE2_SESSION__STORE"
    store.add_argument("--store", metavar="URL", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--store", metavar="URL", default=argparse.SUPPRESS, help=text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|move|drop")

    listing = actions.add_parser("list", parents=[store], help="the sessions there are")
    listing.add_argument("--limit", type=int, default=100, metavar="N", help="so many at most (default 100)")
    listing.add_argument("--json", action="store_true", help="one JSON object a line")
    show = actions.add_parser("show", parents=[store], help="one session")
    show.add_argument("--json", action="store_true", help="as a JSON object")
    move = actions.add_parser("move", parents=[store], help="give a session another owner: its next turn goes there")
    drop = actions.add_parser("drop", parents=[store], help="forget a session: its next turn goes where there is room")
    for action in (show, move, drop):
        action.add_argument("name", help="the session's hash, or as much of its beginning as no other has")
    move.add_argument("replica", help="uid of the verifier")
    move.add_argument("incarnation", help="of which life of it; of another one nothing is believed")


def run(args: argparse.Namespace) -> int:
    """Do one action; 0. Raises ``ConfigError`` for what makes no sense and ``UnavailableError`` without a store."""
    given = getattr(args, "store", None)
    flags = {} if given is None else {"session": {"store": given}}
    settings = load_settings(flags=flags, environ=True).session
    if settings.store.startswith("memory://"):
        raise ConfigError("Sessions in memory:// live within their router; name the Redis that routers share: --store.")
    store = create_store(replace(settings, timeout_s=max(settings.timeout_s, _TIMEOUT_S)))
    asyncio.run(_act(store, args))
    return 0


async def _act(store: SessionStore, args: argparse.Namespace) -> None:
    actions: dict[str, Callable[[SessionStore, argparse.Namespace], Awaitable[None]]] = {
        "list": _list,
        "show": _show,
        "move": _move,
        "drop": _drop,
    }
    try:
        await actions[args.action](store, args)
    except StoreError as error:
        raise UnavailableError(str(error)) from None
    finally:
        await store.close()


async def _list(store: SessionStore, args: argparse.Namespace) -> None:
    if args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {args.limit}.")
    # One more tells whether there are more.
    entries = await store.sessions(args.limit + 1)
    shown = sorted(entries[: args.limit], key=lambda entry: entry.name)
    if args.json:
        for entry in shown:
            print(_as_json(entry))
        return
    _print_table(shown)
    if len(entries) > args.limit:
        print(f"There are more than {args.limit}; --limit shows more.")


async def _show(store: SessionStore, args: argparse.Namespace) -> None:
    entry = await _find(store, args.name)
    if args.json:
        print(_as_json(entry))
    else:
        _print_table([entry])


async def _move(store: SessionStore, args: argparse.Namespace) -> None:
    if not args.replica or not args.incarnation:
        raise ConfigError("A new owner needs a replica and an incarnation that are not ''.")
    entry = await _find(store, args.name)
    await store.move(entry.name, Owner(args.replica, args.incarnation))
    print(f"{entry.name} moved from {entry.owner.replica} to {args.replica}.")


async def _drop(store: SessionStore, args: argparse.Namespace) -> None:
    entry = await _find(store, args.name)
    if not await store.drop(entry.name):
        raise ConfigError(f"{entry.name} was forgotten by itself just now.")
    print(f"{entry.name} dropped.")


async def _find(store: SessionStore, beginning: str) -> SessionEntry:
    """The one session whose name begins so."""
    if not _HEXADECIMAL.fullmatch(beginning):
        raise ConfigError("A session is named by its hash, up to 64 of the digits 0-9 and a-f.")
    if len(beginning) == _NAME_LENGTH:
        entry = await store.session(beginning)
        found = [] if entry is None else [entry]
    else:
        found = await store.sessions(2, beginning=beginning)
    if not found:
        raise ConfigError(f"No session begins with {beginning}.")
    if len(found) > 1:
        raise ConfigError(f"More than one session begins with {beginning}; give more of its hash.")
    return found[0]


def _as_json(entry: SessionEntry) -> str:
    fields = {
        "session": entry.name,
        "replica": entry.owner.replica,
        "incarnation": entry.owner.incarnation,
        "expires_s": round(entry.expires_s, 3),
    }
    return json.dumps(fields)


def _print_table(entries: list[SessionEntry]) -> None:
    rows = [("SESSION", "REPLICA", "INCARNATION", "EXPIRES IN")]
    rows += [(e.name, e.owner.replica, e.owner.incarnation, f"{e.expires_s:.0f} s") for e in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
