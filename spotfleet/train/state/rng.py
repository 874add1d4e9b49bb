"""Random numbers that a replaced rank can continue: restarted for each iteration from values that all ranks know.

They restart where an iteration begins: at the end of a step, whenever the user's function is entered, at a commit, and
when an ElasticSampler yields its first batch.

A user's own generator in the state is part of the position: see `is_generator`.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from typing import Any

import torch
from torch.utils.data import dataloader


def reseed(seed: object, rank: int, *where: int) -> int:
    """Restart torch (CPU and CUDA), `random` and, if it is in use, numpy; return the seed used.

    `where` is (round, reductions begun in it), and in copy mode (version, steps since that commit, 0).
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


def keep_loaders_apart() -> None:
    """Let iterators of DataLoaders take their seeds without moving torch's generator.

    They are made at the start of an epoch, for evaluations, and where the user's function is called again; draws of an
    iteration must not depend on that.
    """
    iterator: Any = dataloader._BaseDataLoaderIter
    built = iterator.__init__
    if hasattr(built, "__wrapped__"):
        return

    @functools.wraps(built)
    def init(self: Any, *args: Any, **more: Any) -> None:
        held = torch.get_rng_state()
        try:
            built(self, *args, **more)
        finally:
            torch.set_rng_state(held)

    iterator.__init__ = init


def is_generator(value: Any) -> bool:
    """Return whether it is a torch.Generator, random.Random, numpy.random.Generator or numpy.random.RandomState."""
    numpy = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random)
    return isinstance(value, kinds if numpy is None else (*kinds, numpy.random.Generator, numpy.random.RandomState))


def state_of(generator: Any) -> Any:
    """Return a copy of the generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: Any, held: Any) -> None:
    """Set the state of `generator` to `held`, in place: the script keeps its reference to it."""
    if isinstance(generator, random.Random):
        generator.setstate(held)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = held
    else:
        generator.set_state(held)


def marks(generators: dict[str, Any]) -> dict[str, Any]:
    """Return the states of the global generators and of those in the state, by name, to compare them later."""
    found = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()].get_offset()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, words, at, *_ = numpy.random.get_state()
        found["numpy"] = (at, words.tobytes())
    return {**found, **{f"state.{name}": state_of(g) for name, g in generators.items()}}


def same(a: Any, b: Any) -> bool:
    """Return whether two marks are equal."""
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)
