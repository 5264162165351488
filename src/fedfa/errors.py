"""What the user did wrong, as opposed to what we did."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """A mistake in the input, in one line that says what is wrong and what to do. The command line prints the
    line and exits with 2."""


class Busy(UserError):
    """Another process is at work on it."""


class Damaged(UserError):
    """A file of ours is not what was written."""


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few of the names, and how many more there are: for one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
