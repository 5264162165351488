"""HTML from Python: whatever is not markup already is escaped, so that no name can become a tag."""

from __future__ import annotations

import html
import json
from typing import Any


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def escaped(value: Any) -> Markup:
    """A value as HTML text."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def joined(*parts: Any) -> Markup:
    """Values one after the other; None is nothing, and lists are taken apart."""
    texts = (joined(*part) if isinstance(part, (list, tuple)) else escaped(part) for part in parts if part is not None)
    return Markup("".join(texts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. Of attributes, ``class_`` is ``class`` and ``aria_label`` is ``aria-label``; True has no value, and
    None and False are left out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        title = key.rstrip("_").replace("_", "-")
        words.append(title if value is True else f'{title}="{escaped(value)}"')
    if name in ("meta", "input"):
        return Markup(f"<{' '.join(words)}>")
    return Markup(f"<{' '.join(words)}>{joined(*children)}</{name}>")


def json_block(value: Any, identity: str) -> Markup:
    """Data for a script. No ``<`` is left in it, so that no text can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(f'<script type="application/json" id="{escaped(identity)}">{text}</script>')
