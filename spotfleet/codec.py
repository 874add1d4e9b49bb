"""Codec between frozen dataclasses and plain JSON values, without a library.

The training runtime may depend only on torch and the standard library, and the CLI must start fast. The wire and the
ledger therefore use this module instead of pydantic. Enums travel as their values, tuples as lists.
Unknown keys are ignored (a newer peer may send more); a missing key takes the field's default. A class method
`from_older(data)` of a dataclass converts the object of an earlier release before that.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any


def to_json(value: Any) -> Any:
    """Return the JSON form of a dataclass, Enum, tuple, list, dict or plain value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list, set, frozenset)):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    return value


def to_text(value: Any) -> str:
    """Return `to_json(value)` as JSON text without spaces, in one pass."""
    kind = type(value)
    leaf = _LEAVES.get(kind)
    if leaf is not None:
        return leaf(value)
    if kind is tuple:
        return _strings(value) if _STRINGS.issuperset(map(type, value)) else f"[{','.join(map(to_text, value))}]"
    keys = _keys(kind)
    if keys is not None:
        return f"{{{','.join([key + to_text(getattr(value, name)) for name, key in keys])}}}"
    return json.dumps(to_json(value), separators=(",", ":"))


_STRINGS = frozenset([str])
_LEAVES: dict[type, Callable[[Any], str]] = {
    str: json.encoder.encode_basestring_ascii, int: repr, float: json.dumps,
    bool: lambda value: "true" if value else "false", type(None): lambda _: "null",
}


@functools.lru_cache(maxsize=64)
def _strings(values: tuple[str, ...]) -> str:
    """Encode a tuple of strings once: a thousand hosts receive the same thousand names."""
    return json.dumps(values, separators=(",", ":"))


@functools.cache
def _keys(kind: type) -> tuple[tuple[str, str], ...] | None:
    """Return each field's name and the text before its value; None for anything but a dataclass."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple((f.name, f"{json.dumps(f.name)}:") for f in dataclasses.fields(kind))


def parse(text: str | bytes) -> Any:
    """Parse untrusted JSON: ValueError also for NaN, infinities and endless nesting."""
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
    """Rebuild `kind` (a dataclass or an annotation used in one) from `data`; ValueError names the difference."""
    if type(data) is kind and kind in _LEAVES:
        return data
    origin, args = _shape(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(args, data)
    if origin is tuple:
        return _tuple(args, data)
    if origin in (list, dict):
        return _container(origin, args, data)
    if kind is Any:
        return data
    if _fields(kind) is not None:
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
def _shape(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...] | None:
    """Return each field's name, annotation and whether it is required; None for anything but a dataclass."""
    if not dataclasses.is_dataclass(kind):
        return None
    hints = typing.get_type_hints(kind)
    return tuple((f.name, hints[f.name], f.default is f.default_factory is dataclasses.MISSING)
                 for f in dataclasses.fields(kind))


def _dataclass(kind: Any, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__}: expected an object, got {type(data).__name__}")
    if (from_older := getattr(kind, "from_older", None)) is not None:
        data = from_older(data)
    values = {}
    for name, hint, required in _fields(kind) or ():
        if name in data:
            try:
                values[name] = from_json(hint, data[name])
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        elif required:
            raise ValueError(f"{kind.__name__}.{name} is missing")
    return kind(**values)
