"""Machine types of a cloud, the types that satisfy a need, and the words for a need that none can satisfy. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from spotfleet.matching import fits_size
from spotfleet.model import Market, Need
from spotfleet.words import did_you_mean

SHOWN = 8  # sizes in a message


@dataclass(frozen=True)
class OfferedType:
    """Facts about one machine type. A cloud adds its own."""

    name: str
    vcpus: int
    memory_mib: int
    gpus: int = 0  # as the machine reports them; a fraction of one counts as one
    accelerator: str = ""  # "A10G", "A100-80GB"; "" on a CPU host
    architectures: tuple[str, ...] = ("x86_64",)
    markets: tuple[Market, ...] = (Market.ON_DEMAND, Market.SPOT)
    clusters: bool = False  # its machines may be placed close to each other

    @property
    def slots(self) -> int:
        """Return the number of workers that fit."""
        return self.gpus or 1

    @property
    def x86_64(self) -> bool:
        return "x86_64" in self.architectures


M = TypeVar("M", bound=OfferedType)


def same_accelerator(wanted: str, name: str) -> bool:
    """Return whether a user's `wanted` means `name`. Case, blanks, hyphens and the maker's name do not matter."""
    return _key(wanted) == _key(name)


def _key(name: str) -> str:
    return re.sub(r"^(nvidia|amd|tesla)+", "", re.sub(r"[^a-z0-9]", "", name.lower()))


def market_of(need: Need) -> Market:
    return Market.SPOT if need.use_spot else Market.ON_DEMAND


def fitting(need: Need, types: Iterable[M]) -> dict[str, M]:
    """Return the types that satisfy `need`, at any price and in any zone. The images are for x86_64."""
    return {t.name: t for t in types
            if t.x86_64 and market_of(need) in t.markets
            and (not need.accelerator or same_accelerator(need.accelerator, t.accelerator))
            and (not need.accelerator_count or t.gpus == need.accelerator_count)
            and fits_size(need, t.vcpus, t.memory_mib / 1024)}


def unknown_type(need: Need, sold: Sequence[str], where: str) -> str:
    """Name the type of `need` if it is none of those `sold`, with the nearest; else ""."""
    if not need.instance_type or need.instance_type in sold:
        return ""
    return f"instance_type '{need.instance_type}' is not known in {where}{did_you_mean(need.instance_type, sold)}"


def problems(need: Need, types: Sequence[OfferedType], where: str) -> list[str]:
    """Name the words in `need` for which there is no type. `types`: those meant, or all that have accelerators."""
    found = [*_accelerators(need, [t for t in types if t.x86_64], where), *_unsold(need, types, where)]
    return found or _sizes(need, types, where)


def _sizes(need: Need, types: Sequence[OfferedType], where: str) -> list[str]:
    if not need.sized or fitting(need, types):
        return []
    fit = fitting(replace(need, min_vcpus=0.0, max_vcpus=0.0, min_memory_gib=0.0, max_memory_gib=0.0), types).values()
    sizes = sorted({(t.vcpus, round(t.memory_mib / 1024)) for t in fit})
    there = f": there are {', '.join(f'{cpus} vCPUs with {gib} GiB' for cpus, gib in sizes[:SHOWN])}" if sizes else ""
    more = " ..." if len(sizes) > SHOWN else ""
    return [f"no type fits {size_of(need)} in {where}{there}{more}"]


def size_of(need: Need) -> str:
    """Format the sizes that `need` asks for, as the fleet file has them: "cpus 4+ and memory 32"."""
    return " and ".join(filter(None, [_range("cpus", need.min_vcpus, need.max_vcpus),
                                      _range("memory", need.min_memory_gib, need.max_memory_gib)]))


def _range(key: str, least: float, most: float) -> str:
    if not least and not most:
        return ""
    return f"{key} {least:g}" + ("" if least == most else "+" if not most else f" to {most:g}")


def _accelerators(need: Need, types: Sequence[OfferedType], where: str) -> list[str]:
    alike = [t for t in types if same_accelerator(need.accelerator, t.accelerator)] if need.accelerator else list(types)
    if need.accelerator and not alike:
        known = sorted({t.accelerator for t in types} - {""})
        return [f"accelerators '{need.accelerator}' is none of {', '.join(known)} ({where})"
                f"{did_you_mean(need.accelerator, known)}"]
    counts = sorted({t.gpus for t in alike})
    if need.accelerator_count and need.accelerator_count not in counts:
        return [f"no type has {need.accelerator_count} of accelerators '{need.accelerator}' in {where}: there are "
                f"types with {', '.join(map(str, counts))}"]
    return []


def _unsold(need: Need, types: Sequence[OfferedType], where: str) -> list[str]:
    named = [t for t in types if t.name == need.instance_type]
    if named and not any(t.x86_64 for t in named):
        return [f"instance_type '{need.instance_type}' has no x86_64 processor, which the images are for"]
    if named and not any(market_of(need) in t.markets for t in named):
        return [f"instance_type '{need.instance_type}' is not sold as {market_of(need).value} in {where}"]
    return []
