"""Copies of frozen values, as `dataclasses.replace` makes them at ten times the cost. Pure.

A simulation of one month makes millions of them.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, TypeVar

Value = TypeVar("Value")


def replace(value: Value, /, **fields: Any) -> Value:
    """`value` with other `fields`: a frozen dataclass without slots and without a `__post_init__`. What it has derived
    and kept is derived anew, but where its class says in DERIVED from which fields it is, and those stay. Raises
    TypeError for a field that it does not have."""
    kind = type(value)
    names, derived = _about(kind)
    if not names.issuperset(fields):
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(fields.keys() - names))}")
    new = object.__new__(kind)
    new.__dict__.update(value.__dict__, **fields)
    for name, sources in derived:
        if not sources or any(s in fields for s in sources):
            new.__dict__.pop(name, None)
    return new


@lru_cache
def _about(kind: type) -> tuple[frozenset[str], tuple[tuple[str, tuple[str, ...]], ...]]:
    """The fields of a class, and what its values derive and keep, each with the fields that it is from."""
    sources = getattr(kind, "DERIVED", {})
    found = tuple((n, sources.get(n, ())) for n, member in vars(kind).items() if isinstance(member, cached_property))
    return frozenset(kind.__dataclass_fields__), found  # type: ignore[attr-defined]
