"""LEAF's files: JSON with all users' samples, as large as the disk allows, read a user at a time.

{"users": [...], "num_samples": [...], "user_data": {"f0001_41": {"x": [[...], ...], "y": [...]}, ...}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedfa.data.sources.reading import Broken

PIECE = 1 << 20
MOST_CHARACTERS = 1 << 30
"""Of one user. LEAF's have about a million."""
STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*(")?|[][{}]', re.DOTALL)
"""Brackets, and strings, in which brackets mean nothing; of a string that is cut off, its end (group 1) is missing."""
BLANK = re.compile(r"[ \t\n\r]*")
SCALAR_END = re.compile(r"[,}\]\s]")


@dataclass
class _Text:
    """A file's text from some place on, of which only a piece is in memory."""

    file: IO[str]
    held: str = ""
    at: int = 0
    ended: bool = False

    def more(self) -> None:
        """Hold more, and let go of what was passed."""
        piece = self.file.read(max(PIECE, len(self.held) - self.at))
        self.held, self.at, self.ended = self.held[self.at :] + piece, 0, not piece
        if len(self.held) > MOST_CHARACTERS:
            raise Broken(f"a value has more than the {MOST_CHARACTERS:,} characters allowed")

    def peek(self) -> str:
        """The next character that is not blank; '' at the end."""
        while True:
            found = BLANK.match(self.held, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.held) or self.ended:
                return self.held[self.at : self.at + 1]
            self.more()

    def take(self, wanted: str) -> None:
        found = self.peek()
        if found != wanted:
            raise Broken(f"{found!r} where {wanted!r} should be" if found else "ends in the middle")
        self.at += 1

    def value(self, parse: bool = True) -> Any:
        """The next value, read whole; None, and nothing kept of it, unless it is to be parsed."""
        first, start, depth = self.peek(), self.at, 0
        if first not in ("{", "[", '"'):
            return self._scalar()
        while True:
            for mark in STRUCTURE.finditer(self.held, start):
                if mark[0][0] == '"' and mark[1] is None:
                    start = mark.start()
                    break
                start = mark.end()
                depth += (mark[0] in "[{") - (mark[0] in "]}")
                if depth == 0:
                    text, self.at = self.held[self.at : start], start
                    return _parsed(text) if parse else None
            if self.ended:
                raise Broken("ends in the middle")
            if not parse:
                self.at = start
            start -= self.at
            self.more()

    def _scalar(self) -> Any:
        while not (end := SCALAR_END.search(self.held, self.at)) and not self.ended:
            self.more()
        stop = end.start() if end else len(self.held)
        text, self.at = self.held[self.at : stop], stop
        return _parsed(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Broken(f"not JSON: {error}") from None


def users(path: Path) -> Iterator[tuple[str, Any]]:
    """Every user's name and data, one after another: memory is bounded by the largest of them."""
    with open(path, encoding="utf-8") as file:
        text = _Text(file)
        try:
            for key in _keys(text):
                if key == "user_data":
                    for name in _keys(text):
                        yield name, text.value()
                else:
                    text.value(parse=False)
        except (UnicodeDecodeError, RecursionError) as error:
            raise Broken(f"not JSON: {' '.join(str(error).split())}") from None


def _keys(text: _Text) -> Iterator[str]:
    """The keys of the object that comes next; the value of each is to be read before the next is asked for."""
    text.take("{")
    if text.peek() == "}":
        text.take("}")
        return
    while True:
        if text.peek() not in ('"', ""):
            text.take('"')
        key = str(text.value())
        text.take(":")
        yield key
        if text.peek() != ",":
            break
        text.take(",")
    text.take("}")
