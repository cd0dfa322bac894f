"""What the options of several commands take."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """Raises ``ArgumentTypeError`` for a number below 1, and ``ValueError`` for what is no number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return value
