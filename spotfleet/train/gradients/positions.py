"""Check that all ranks are at one position, made in each gradient reduction without a collective of its own.

Each rank adds to the tail of the gradients FIELDS numbers h of 7 bits, a hash of the whole numbers in its state, and
their squares. Over n ranks (sum of h)^2 = n * (sum of h^2) holds exactly if all h are equal (Cauchy-Schwarz), and
float32 holds both sums exactly for up to MOST_RANKS ranks. So every rank finds the same result, at the same step. Two
different positions have the same hash once in 2^28 times, and hardly at the next step again.

Values that are meant to differ by rank are declared: TorchState(..., per_rank=("seen",)).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from spotfleet.errors import UsageError
from spotfleet.train.comm.group import Group

FIELDS, BITS = 4, 7
WIDTH = 2 * FIELDS  # numbers in the tail
MOST_RANKS = 1024  # beyond, sums of squares are not exact and nothing is checked


def hashes(scalars: dict[str, int]) -> list[int]:
    """Return FIELDS numbers of 7 bits that depend on all names and values."""
    digest = hashlib.blake2b(repr(sorted(scalars.items())).encode(), digest_size=FIELDS).digest()
    return [byte % (1 << BITS) for byte in digest]


def write(tail: torch.Tensor, scalars: dict[str, int]) -> None:
    """Write the hash of `scalars` into the WIDTH numbers of `tail`."""
    found = hashes(scalars)
    tail.copy_(torch.tensor([*found, *(h * h for h in found)], dtype=torch.float32), non_blocking=True)


def differ(sums: Sequence[float], size: int) -> bool:
    """Return whether the hashes of `size` ranks, summed, were not all equal."""
    plain, squares = sums[:FIELDS], sums[FIELDS:]
    return size <= MOST_RANKS and any(int(s) ** 2 != size * int(q) for s, q in zip(plain, squares, strict=True))


def error(group: Group, scalars: dict[str, int]) -> UsageError:
    """Collect the scalars of all ranks, which all call this, and return the error to raise."""
    own = torch.frombuffer(bytearray(json.dumps(scalars).encode()), dtype=torch.uint8)
    lengths = [int(n) for n in group.allgather(torch.tensor([own.numel()]))]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[:own.numel()] = own
    rows = [json.loads(bytes(row[:n].tolist())) for row, n in zip(group.allgather(padded), lengths, strict=True)]
    parts = []
    for name in sorted({name for row in rows for name in row}):
        ranks: dict[int | None, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks.setdefault(row.get(name), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(f"{value} on rank {', '.join(map(str, who))}" for value, who in ranks.items())
            parts.append(f"state.{name} is {values}")
    names = ", ".join(repr(part.split(" ")[0].removeprefix("state.")) for part in parts)
    return UsageError(f"the ranks train at different positions: {'. '.join(parts)}",
                      hint="let all ranks take equally many steps, with hvd.elastic.ElasticSampler for instance; "
                           f"values that are meant to differ are declared by TorchState(..., per_rank=({names},))")
