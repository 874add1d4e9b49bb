"""Digests of tensors and values, exact to the bit and fast enough for a change of membership.

Tensors: each row of 4 KiB becomes two sums of its 64-bit words, each word times an odd number of its place; for the
second sum the words begin 4 bytes later, so that the upper half of each word is the lower half of another. This runs at
the speed of memory. The sums, and all bytes of small tensors, are then mixed with their places and summed once more.
Any change of a value, of several values, or of their places changes the digest, except by a chance of 1 in 2**32 at
most. (One sum alone would miss two changes of the highest bit, which is a sign.) The digest is the same on every
device, and one number per device travels to the host.

Values: a canonical walk through plain values, containers, tensors and objects' attributes. Objects of unknown types
without attributes count by their type alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import Enum
from typing import Any

import torch

ROW = 512  # 64-bit words of a row
CHUNK = 4096  # rows that are summed at once where that takes memory of their size
SMALL_BYTES = 16 << 10  # smaller tensors are mixed word by word
DEPTH = 20  # containers nested deeper than this do not count
# The constants of splitmix64.
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685

_places: dict[torch.device, torch.Tensor] = {}  # multiples of _GOLDEN
_factors: dict[torch.device, torch.Tensor] = {}  # odd numbers, one for each place of a row


@torch.no_grad()
def of_tensors(tensors: Iterable[torch.Tensor], go_on: Callable[[], bool] = lambda: True) -> int:
    """Return a digest of the tensors' bytes in the order of their memory.

    Tensors with equal values and other strides have another digest; `of_tensor` does not depend on strides. `go_on`
    may end the work early; the result is then without meaning.
    """
    parts: dict[torch.device, list[torch.Tensor]] = {}
    scraps: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if not go_on():
            return 0
        if tensor.layout is torch.strided:
            _add(_in_memory_order(tensor.detach()), parts.setdefault(tensor.device, []),
                 scraps.setdefault(tensor.device, []))
    return _fold([_mixed(torch.cat([*parts[d], *_words(scraps[d])])) for d in parts if parts[d] or scraps[d]])


@torch.no_grad()
def of_tensor(tensor: torch.Tensor) -> int:
    """Return a digest of one tensor's values and type."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return _fold([of_tensors([plain.contiguous()]), of_value((str(plain.dtype), tuple(plain.shape)))])


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    dense = tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))
    return dense if dense.is_contiguous() else tensor.contiguous()


def _add(tensor: torch.Tensor, sums: list[torch.Tensor], scraps: list[torch.Tensor]) -> None:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    row = 8 * ROW // flat.element_size()  # elements
    whole = flat.numel() // row * row if flat.nbytes >= SMALL_BYTES else 0
    if whole:
        body = flat if whole == flat.numel() else flat[:whole]
        body = body if body.data_ptr() % 8 == 0 else body.clone()
        sums.extend(_row_sums(body.view(torch.int64)))
        whole -= row  # the words that begin 4 bytes later end before the last row
    if whole < flat.numel():
        scraps.append(flat[whole:].view(torch.uint8))


def _row_sums(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums of the rows of `words`, and of all but the last row of the words that begin 4 bytes later."""
    if words.device not in _factors:
        _factors[words.device] = _mixed_words(_multiples(words.device, ROW)[:ROW]) | 1
    sums = _products if words.device.type == "cpu" else _products_in_pieces  # elsewhere `mv` has no integers
    return sums(words, _factors[words.device])


def _products(words: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    memory = (ctypes.c_char * (words.nbytes - 8 * ROW)).from_address(words.data_ptr() + 4)
    later = torch.frombuffer(memory, dtype=torch.int64)
    return words.view(-1, ROW).mv(factors), later.view(-1, ROW).mv(factors)


def _products_in_pieces(words: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    step, last = CHUNK * ROW, len(words) - ROW
    pieces = [words[i:i + step] for i in range(0, len(words), step)]
    upper = ((words[i:min(i + step, last)] >> 32) & 0xFFFFFFFF | words[i + 1:min(i + step, last) + 1] << 32
             for i in range(0, last, step))  # as bytes lie in memory, the lowest first
    sums = [torch.cat([(piece.view(-1, ROW) * factors).sum(1) for piece in of]) for of in (pieces, upper)]
    return sums[0], sums[1]


def _words(scraps: list[torch.Tensor]) -> list[torch.Tensor]:
    if not scraps:
        return []
    size = sum(s.numel() for s in scraps)
    padding = torch.zeros(-size % 8 + 8, dtype=torch.uint8, device=scraps[0].device)
    return [torch.cat([*scraps, padding]).view(torch.int64)]


def _mixed(words: torch.Tensor) -> int:
    """Return the sum of the words, each after mixing it with its place."""
    return int(_mixed_words(words + _multiples(words.device, words.numel())[:words.numel()]).sum())


def _multiples(device: torch.device, count: int) -> torch.Tensor:
    places = _places.get(device)
    if places is None or places.numel() < count:
        places = _places[device] = torch.arange(1, count + 1, device=device) * _GOLDEN
    return places


def _mixed_words(words: torch.Tensor) -> torch.Tensor:
    """Return the words after the finalizer of splitmix64, each of whose bits depends on every bit of the word."""
    mixed = words.clone()
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= mixed >> shift
        mixed *= factor
    return mixed ^ (mixed >> 31)


def _fold(numbers: Sequence[int]) -> int:
    """Return one signed 64-bit number for several."""
    if len(numbers) == 1:
        return numbers[0]
    data = struct.pack(f">{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def of_value(value: Any, floats: bool = True) -> int:
    """Return a digest of a value. With `floats` off, all floating-point numbers count as equal."""
    sha = hashlib.blake2b(digest_size=8)
    _walk(value, floats, sha.update, DEPTH, set())
    return int.from_bytes(sha.digest(), "big", signed=True)


def _walk(value: Any, floats: bool, put: Callable[[bytes], None], depth: int, inside: set[int]) -> None:
    if isinstance(value, float):
        put(b"f" + struct.pack(">d", value) if floats else b"f")
    elif value is None or isinstance(value, bool | int | str | bytes | complex):
        put(f"{type(value).__name__}:{value!r};".encode())
    elif isinstance(value, torch.Tensor):
        _walk_tensor(value, floats, put)
    elif depth == 0 or id(value) in inside:
        put(b"...")
    elif isinstance(value, Enum):
        put(f"enum:{type(value).__qualname__}.{value.name};".encode())
    else:
        _walk_parts(value, lambda part: _walk(part, floats, put, depth - 1, inside | {id(value)}), floats, put)


def _walk_tensor(tensor: torch.Tensor, floats: bool, put: Callable[[bytes], None]) -> None:
    counts = floats or not (tensor.is_floating_point() or tensor.is_complex())
    put(f"tensor:{of_tensor(tensor) if counts else tuple(tensor.shape)};".encode())


def _walk_parts(value: Any, walk: Callable[[Any], None], floats: bool, put: Callable[[bytes], None]) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return walk(value.item())
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype != object:
        data = value.tobytes() if floats or value.dtype.kind not in "fc" else b""
        return put(f"array:{value.dtype}{value.shape}{hashlib.blake2b(data, digest_size=8).hexdigest()};".encode())
    put(f"{type(value).__qualname__}(".encode())
    if isinstance(value, Mapping):
        for key, part in sorted(value.items(), key=lambda item: (str(type(item[0])), repr(item[0]))):
            walk(key)
            walk(part)
    elif isinstance(value, Set):
        for number in sorted(of_value(part, floats) for part in value):
            put(f"{number};".encode())
    elif isinstance(value, Sequence):
        for part in value:
            walk(part)
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type) and not callable(value):
        walk(value.__dict__)
    put(b")")
    return None
