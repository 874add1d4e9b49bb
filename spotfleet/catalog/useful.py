"""What an hour of work on a GPU costs, not an hour of its machine: a formula for `offers` and for the choice of pools.

    cost = price x (1 + (boot_s + repeated_s) / expected lifetime) / GPUs

Each life of a host is paid for from its launch, and `boot_s` of it is no work, nor are the `repeated_s` that its loss
makes others do again. A host on demand has no end that we do not choose: its expected lifetime is infinite.

The lifetime is read off the cloud's own interruption band, where it publishes one. AWS's Spot Instance Advisor says
which share of a type's capacity it took back in the last month, which is no lifetime: with a constant hazard the
lifetimes of two bands are to each other as the logarithms of the shares left, and one measured lifetime fixes the
scale. That one is of p3 machines, which are in the highest band: 167 losses in 273.1 host-hours, or one in 1.64 h
(Bamboo, NSDI '23, p3-trace.csv, MIT licence). SkyPilot's V100 traces of 2023 have one in 1.4 to 16.7 h. It orders
offers; where hosts of a pool have been seen to live, `observed_s` counts instead.

Pure.
"""

from __future__ import annotations

import math

BANDS = ("<5%", "5-10%", "10-15%", "15-20%", ">20%")  # of Spot Instance Advisor: share taken back in a month
TAKEN = (0.025, 0.075, 0.125, 0.175, 0.25)  # the share that stands for each band; of the open one a guess
MEASURED_BAND, MEASURED_S = 4, 273.1 * 3600 / 167
UNKNOWN_BAND = 2  # counts where the cloud publishes nothing (GCP, Azure): the middle, neither praised nor blamed
BOOT_S = 180.0  # from a launch until the host works, where none was measured: as benchmarks of spot policies have it
REPEATED_S = 30.0  # done again after a loss that leaves no host: half of the default time between two checkpoints


def expected_lifetime_s(band: int | None, observed_s: float = 0.0) -> float:
    """Mean seconds until a spot host is taken. `band`: an index of BANDS, None where nobody knows; `observed_s`: the
    mean lifetime that was seen in the pool, 0 for none."""
    if observed_s > 0:
        return observed_s
    here = UNKNOWN_BAND if band is None else band
    return MEASURED_S * math.log1p(-TAKEN[MEASURED_BAND]) / math.log1p(-TAKEN[here])


def useful_micros_h(price_micros_h: int, slots: int, lifetime_s: float = math.inf, *, boot_s: float = BOOT_S,
                    repeated_s: float = REPEATED_S) -> int:
    """Micro-dollars for one hour of useful work of one GPU (of the host, where it has none), half up.

    `lifetime_s` as `expected_lifetime_s` says it; infinite on demand.
    """
    if lifetime_s <= 0:
        raise ValueError(f"a lifetime of {lifetime_s} s is none")
    return math.floor(price_micros_h * (1 + (boot_s + repeated_s) / lifetime_s) / max(1, slots) + 0.5)
