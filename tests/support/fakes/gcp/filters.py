"""The filter of a listing, in both of its languages: AIP-160 and `eq`/`ne` with regular expressions.

The two cannot be mixed in one request, and constraints on several fields cannot be combined by regular expressions, as
the documentation of the parameter `filter` has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.support.fakes.gcp.errors import GcpError

TOKEN = re.compile(r"""\s*(?:(?P<open>\()|(?P<close>\))|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
                   r"""|(?P<op><=|>=|!=|=|<|>|:)|(?P<word>[^\s()=<>!:"']+))""")
ONE = re.compile(r"""([\w.-]+)\s+(eq|ne)\s+("[^"]*"|'[^']*'|[^"'].*)""", re.DOTALL)
SEVERAL = re.compile(r"""\s*\(\s*([\w.-]+)\s+(eq|ne)\s+("[^"]*"|'[^']*'|[^"'].*?)\s*\)(?=\s*(?:\(|$))""", re.DOTALL)
Test = Callable[[Any], bool]


def compiled(text: str) -> Test:
    """Return the test of an item. GcpError for a filter that the service refuses."""
    if not text.strip():
        return lambda _item: True
    text = text.strip()
    if ONE.match(text) or SEVERAL.match(text):
        return _legacy(text)
    parser = _Parser(text)
    found = parser.either()
    if parser.left:
        raise _wrong(text)
    return found


def _wrong(text: str) -> GcpError:
    return GcpError("invalid", f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.")


def value_at(item: Any, path: str) -> Any:
    for name in path.split("."):
        item = item.get(name) if isinstance(item, dict) else None
    return item


def _legacy(text: str) -> Test:
    one = ONE.fullmatch(text)
    pieces = [one.groups()] if one else [m.groups() for m in SEVERAL.finditer(text)]
    if not one and SEVERAL.sub("", text).strip():  # what else there is, is of the other language
        raise _wrong(text)
    tests = []
    for field, operator, literal in pieces:
        try:
            pattern = re.compile(literal.strip("\"'"))
        except re.error:
            raise _wrong(text) from None
        tests.append((field, operator, pattern))
    return lambda item: all((pattern.fullmatch(_text(value_at(item, field))) is not None) == (operator == "eq")
                            for field, operator, pattern in tests)


def _text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class _Parser:
    """either := both (OR both)*; both := one ([AND] one)*; one := [NOT|-] ( "(" either ")" | field op value )"""

    def __init__(self, text: str) -> None:
        self.text, at = text, 0
        self.left: list[tuple[str, str]] = []
        while text[at:].strip():
            found = TOKEN.match(text, at)
            if found is None:
                raise _wrong(text)
            self.left.append((found.lastgroup or "", found.group().strip()))
            at = found.end()

    def _next(self, *kinds: str) -> str:
        if not self.left or (kinds and self.left[0][0] not in kinds):
            raise _wrong(self.text)
        return self.left.pop(0)[1]

    def _comes(self, *words: str) -> bool:
        return bool(self.left) and self.left[0][1] in words

    def either(self) -> Test:
        tests = [self.both()]
        while self._comes("OR"):
            self._next()
            tests.append(self.both())
        return lambda item: any(test(item) for test in tests)

    def both(self) -> Test:
        tests = [self.one()]
        while self.left and not self._comes(")", "OR"):
            if self._comes("AND"):
                self._next()
            tests.append(self.one())
        return lambda item: all(test(item) for test in tests)

    def one(self) -> Test:
        if self._comes("NOT", "-"):
            self._next()
            inner = self.one()
            return lambda item: not inner(item)
        if self._comes("("):
            self._next()
            found = self.either()
            self._next("close")
            return found
        field, operator = self._next("word"), self._next("op")
        kind, literal = self.left.pop(0) if self.left else ("", "")
        if kind not in ("word", "text"):
            raise _wrong(self.text)
        literal = literal[1:-1] if kind == "text" else literal
        return lambda item: _compare(value_at(item, field), operator, literal)


def _compare(value: Any, operator: str, literal: str) -> bool:
    if operator == ":":
        if literal == "*":
            return value is not None
        if isinstance(value, list):
            return literal in map(str, value)
        return value is not None and _like(literal, contains=True).fullmatch(_text(value)) is not None
    if operator in ("=", "!="):
        same = value is not None and _like(literal).fullmatch(_text(value)) is not None
        return same == (operator == "=")
    if value is None:
        return False
    try:
        left, right = float(value), float(literal)
    except ValueError:
        left, right = str(value), literal  # type: ignore[assignment]
    return {"<": left < right, ">": left > right, "<=": left <= right, ">=": left >= right}[operator]


def _like(literal: str, contains: bool = False) -> re.Pattern[str]:
    """`*` stands for any text; case does not count."""
    middle = re.escape(literal).replace(r"\*", ".*")
    return re.compile(f".*{middle}.*" if contains and "*" not in literal else middle, re.IGNORECASE | re.DOTALL)
