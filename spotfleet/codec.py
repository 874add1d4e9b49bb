"""Frozen dataclasses <-> plain JSON values, in both directions, without a library.

The training runtime may need nothing but torch and the standard library, and the CLI must start fast,
so the wire and the ledger use this instead of pydantic. Enums travel as their values, tuples as lists.
Unknown keys are ignored (a newer peer may say more); a missing key takes the field's default.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from enum import Enum
from typing import Any


def to_json(value: Any) -> Any:
    """The JSON form of a dataclass, Enum, tuple, list, dict or plain value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list, set, frozenset)):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    return value


def parse(text: str | bytes) -> Any:
    """JSON from somebody who may mean harm: ValueError also for NaN, infinities and nesting without end."""
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def from_json(kind: Any, data: Any) -> Any:
    """Rebuild `kind` (a dataclass or an annotation used in one) from `data`; ValueError says what differs."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind), data)
    if origin is tuple:
        return _tuple(typing.get_args(kind), data)
    if origin in (list, dict):
        return _container(origin, typing.get_args(kind), data)
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError:
            raise ValueError("too large a number") from None
    if kind is None or kind is type(None):
        if data is None:
            return None
    elif isinstance(data, kind) and not (kind in (int, float) and isinstance(data, bool)):
        return data
    raise ValueError(f"expected {getattr(kind, '__name__', kind)}, got {type(data).__name__}")


def _union(options: tuple[Any, ...], data: Any) -> Any:
    if data is None and type(None) in options:
        return None
    problem: ValueError | None = None
    for option in options:
        if option is type(None):
            continue
        try:
            return from_json(option, data)
        except ValueError as error:
            problem = error
    raise problem or ValueError("expected a value, got null")


def _tuple(args: tuple[Any, ...], data: Any) -> tuple:
    if not isinstance(data, (list, tuple)):
        raise ValueError(f"expected a list, got {type(data).__name__}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(from_json(args[0], v) for v in data)
    if len(args) != len(data):
        raise ValueError(f"expected {len(args)} items, got {len(data)}")
    return tuple(from_json(a, v) for a, v in zip(args, data, strict=True))


def _container(origin: Any, args: tuple[Any, ...], data: Any) -> Any:
    if not isinstance(data, origin):
        raise ValueError(f"expected a {origin.__name__}, got {type(data).__name__}")
    if origin is list:
        return [from_json(args[0], v) for v in data]
    return {k: from_json(args[1], v) for k, v in data.items()}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _dataclass(kind: Any, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__}: expected an object, got {type(data).__name__}")
    hints, values = _hints(kind), {}
    for field in dataclasses.fields(kind):
        if field.name in data:
            try:
                values[field.name] = from_json(hints[field.name], data[field.name])
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{field.name}: {error}") from None
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{kind.__name__}.{field.name} is missing")
    return kind(**values)
