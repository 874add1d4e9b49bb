"""Random numbers that a replaced rank can continue: restarted for each microbatch from what all ranks know.

Between the reduction of one iteration and the first forward pass of the next (mixup, augmentation in this process)
they run in a stream of their own, BETWEEN, restarted at that reduction, whenever the user's function is entered, and
when an ElasticSampler hands out its first batch.

A generator of the user's own that is kept in the state goes with the position: see `is_generator`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

BETWEEN = -1  # in the place of the microbatch


def reseed(seed: object, rank: int, *where: int) -> int:
    """Restart torch (CPU and CUDA), `random` and, if it is in use, numpy; the seed used.

    `where` is (round, microbatch): iterations whose gradients were reduced, which is the version unless steps were
    skipped, and passes of this one. Jobs that copy give (version, steps since that commit, microbatch).
    """
    digest = hashlib.blake2b(repr((seed, rank, *where)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
    return value


def is_generator(value: Any) -> bool:
    """A torch.Generator, random.Random, numpy.random.Generator or numpy.random.RandomState."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random)
    return isinstance(value, kinds if numpy is None else (*kinds, numpy.random.Generator, numpy.random.RandomState))


def state_of(generator: Any) -> Any:
    """Its state, as a value of our own."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, held: Any) -> None:
    """Make `generator`, which whoever holds it goes on using, draw on from `held`."""
    if isinstance(generator, random.Random):
        generator.setstate(held)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = held
    else:
        generator.set_state(held)
