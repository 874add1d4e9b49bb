"""Fast copies of frozen values: `dataclasses.replace` at a tenth of its cost. Pure.

A simulation of one month makes millions of them.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, TypeVar

Value = TypeVar("Value")


def replace(value: Value, /, **fields: Any) -> Value:
    """Return a copy of `value` with other `fields`. Raises TypeError for a field that `value` does not have.

    `value` is a frozen dataclass without slots and without a `__post_init__`. Cached properties are computed anew. One
    that its class lists in DERIVED, with the fields it depends on, is kept as long as those fields stay the same.
    """
    kind = type(value)
    names, derived = _fields_and_derived(kind)
    if not names.issuperset(fields):
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(fields.keys() - names))}")
    new = object.__new__(kind)
    new.__dict__.update(value.__dict__, **fields)
    for name, sources in derived:
        if not sources or any(s in fields for s in sources):
            new.__dict__.pop(name, None)
    return new


@lru_cache
def _fields_and_derived(kind: type) -> tuple[frozenset[str], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return the fields of a class, and its cached properties, each with the fields that it depends on."""
    sources = getattr(kind, "DERIVED", {})
    found = tuple((n, sources.get(n, ())) for n, member in vars(kind).items() if isinstance(member, cached_property))
    return frozenset(kind.__dataclass_fields__), found  # type: ignore[attr-defined]
