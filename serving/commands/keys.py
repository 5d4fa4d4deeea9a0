"""`tetris-serve keys`: make, list and revoke API keys in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.commands.console import Console, complain
from serving.settings.key_file import (
    SCOPES,
    KeyEntry,
    hash_key,
    locked,
    make_key,
    read_keys,
    write_keys,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_FAILED = 1


def add_keys_command(commands: Any) -> None:
    """Add the command to the parser's others."""
    keys = commands.add_parser(
        "keys",
        help="make, list and revoke API keys",
        description="Keep the file that http.access.keys_file names; running fronts "
        "follow it within a second.",
    )
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    new = _add(actions, "new", "make a key and print it, this once", _new)
    new.add_argument("name", help="whose it is; shown in logs")
    new.add_argument("--scope", action="append", choices=SCOPES, dest="scopes")
    new.add_argument("--class", dest="request_class", help="one of policy.classes")
    new.add_argument("--requests-per-minute", type=int)
    new.add_argument("--tokens-per-minute", type=int)
    new.add_argument("--max-concurrent", type=int)
    _add(actions, "list", "list names, scopes and limits", _list)
    revoke = _add(actions, "revoke", "remove a key", _revoke)
    revoke.add_argument("name")


def _add(
    actions: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text)
    parser.add_argument("--file", type=Path, required=True, help="the file of keys")
    parser.set_defaults(run=lambda args: _report(run, args))
    return parser


def _report(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        return run(args)
    except (OSError, ValueError) as error:
        complain(f"error: {error}")
        return _FAILED


def _new(args: argparse.Namespace) -> int:
    key = make_key()
    limits = {
        name: getattr(args, name)
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent")
    }
    entry = KeyEntry(
        sha256=hash_key(key),
        scopes=tuple(args.scopes or ("chat",)),
        request_class=args.request_class,
        **limits,
    )
    with locked(args.file):
        keys = read_keys(args.file) if args.file.exists() else {}
        if args.name in keys:
            raise ValueError(f"{args.name}: has a key already; revoke it first")
        write_keys(args.file, {**keys, args.name: entry})
    Console().say(key)
    return 0


def _list(args: argparse.Namespace) -> int:
    for name, entry in read_keys(args.file).items():
        shown = entry.model_dump(exclude={"sha256", "scopes"}, exclude_none=True)
        rest = "  ".join(f"{field}={value}" for field, value in shown.items())
        Console().say(f"{name}  {','.join(entry.scopes)}  {rest}".rstrip())
    return 0


def _revoke(args: argparse.Namespace) -> int:
    with locked(args.file):
        keys = read_keys(args.file)
        if keys.pop(args.name, None) is None:
            raise ValueError(f"{args.name}: has no key in {args.file}")
        write_keys(args.file, keys)
    return 0
