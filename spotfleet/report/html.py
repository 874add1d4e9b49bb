"""Elements of HTML and SVG. All incoming text is escaped here, and nowhere else, because names are untrusted."""

from __future__ import annotations

from html import escape

from spotfleet.words import UNSEEN

_VOID = {"meta", "link", "br", "hr"}


class SafeHtml(str):
    """Markup. Only this module makes it from text."""

    __slots__ = ()


Node = str | SafeHtml | None


def text(value: object) -> SafeHtml:
    """Escape `value`, so that a browser can take nothing in it for markup."""
    return value if isinstance(value, SafeHtml) else SafeHtml(escape(UNSEEN.sub("\ufffd", str(value)), quote=True))


def tag(name: str, /, *children: Node, **attributes: object) -> SafeHtml:
    """Return an element. Attributes: `class_` is class, `aria_label` is aria-label, viewBox stays; None leaves one out.
    """
    markup = "".join(f' {_attribute(key)}="{text(value)}"' for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return SafeHtml(f"<{name}{markup}>")
    return SafeHtml(f"<{name}{markup}>{join(*children)}</{name}>")


def join(*children: Node) -> SafeHtml:
    return SafeHtml("".join(text(child) for child in children if child is not None))


def short(value: str, most: int) -> str:
    """Shorten `value` to at most `most` characters."""
    return value if len(value) <= most else value[: most - 1] + "…"


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
