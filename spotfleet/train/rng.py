"""Random numbers that a replaced rank can continue: restarted for each microbatch from what all ranks know."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def reseed(seed: object, rank: int, round_: int, microbatch: int) -> int:
    """Restart torch (CPU and CUDA), `random` and, if it is in use, numpy; the seed used.

    `round_` counts the iterations whose gradients were reduced; without skipped steps it is the version.
    """
    digest = hashlib.blake2b(repr((seed, rank, round_, microbatch)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
    return value
