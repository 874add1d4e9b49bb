"""Elements of HTML and SVG. Whatever text comes in is escaped here, and nowhere else: names are anybody's."""

from __future__ import annotations

import re
from html import escape

# Controls, halves of characters, and marks that turn the direction of the text around them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_VOID = {"meta", "link", "br", "hr"}


class Safe(str):
    """Markup. Only this module makes it from text."""

    __slots__ = ()


Node = str | Safe | None


def text(value: object) -> Safe:
    """`value` as it reads, with nothing in it that a browser could take for markup."""
    return value if isinstance(value, Safe) else Safe(escape(_UNSEEN.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: Node, **attributes: object) -> Safe:
    """An element. Attributes: `class_` is class, `aria_label` is aria-label, viewBox stays; None leaves one out."""
    said = "".join(f' {_attribute(key)}="{text(value)}"' for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Safe(f"<{name}{said}>")
    return Safe(f"<{name}{said}>{join(*children)}</{name}>")


def join(*children: Node) -> Safe:
    return Safe("".join(text(child) for child in children if child is not None))


def short(value: str, most: int) -> str:
    """At most `most` characters of it."""
    return value if len(value) <= most else value[: most - 1] + "…"


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
