"""Flags of a command line for the settings that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

_FLAGS = {
    "model": ("target", "draft", "draft_vocabulary", "dtype", "device", "max_model_len", "served_model_name"),
    "engine": ("max_sequences", "kv_slots", "depth", "top_k", "num_draft_tokens", "tree_budget", "overlap", "threads"),
    "http": ("host", "port"),
    "session": ("store",),
    "tenants": ("keys_file",),
}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which networks, in which precision, where."""
    parser.add_argument("--target", metavar="MODEL", help="a folder, a hub id, a GGUF file, or 'embedded' (default)")
    parser.add_argument("--draft", metavar="HEAD", help="a folder, a hub id, 'embedded' (default), or 'none'")
    vocabulary = "score only the N most frequent tokens when drafting, or 'all'; default: what is fastest"
    parser.add_argument("--draft-vocabulary", metavar="N", help=vocabulary)
    dtypes = ("auto", "bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, help="default: the fastest that the device has")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; default: a GPU where there is one")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS", help="default: what the checkpoint says")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """How the engine runs, and how large its trees are."""
    parser.add_argument("--max-sequences", type=int, metavar="N", help="sequences that are decoded at once")
    parser.add_argument("--kv-slots", type=int, metavar="TOKENS", help="size of the KV cache; default: from memory")
    parser.add_argument("--depth", type=int, metavar="N", help="levels of the draft tree, at most")
    parser.add_argument("--top-k", type=int, metavar="N", help="nodes that are expanded per level, at most")
    parser.add_argument("--num-draft-tokens", type=int, metavar="N", help="nodes that are verified per step, at most")
    budget = "trees as large as pays at every step (default), or always of the largest size"
    parser.add_argument("--tree-budget", choices=("fixed", "adaptive"), help=budget)
    overlap = "draft for one half of the batch while the other is verified; default: where that pays"
    parser.add_argument("--overlap", choices=("auto", "on", "off"), help=overlap)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each service; default: all cores")


def given_settings(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings whose flags were given, by section, for ``load_settings``."""
    given = {
        section: {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
        for section, names in _FLAGS.items()
    }
    if given["model"].get("draft") == "none":
        given["model"]["draft"] = None
    return {section: values for section, values in given.items() if values}
