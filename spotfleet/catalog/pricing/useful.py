"""Cost of an hour of useful GPU work, for `offers` and for the choice of pools.

    cost = price x (1 + (BOOT_S + REPEATED_S) / expected lifetime) / GPUs

A host is billed from its launch. BOOT_S of its life is no useful work, and neither is REPEATED_S, which other hosts
repeat after its loss. We choose the end of an on-demand host ourselves: its expected lifetime is infinite.

The lifetime comes from the cloud's own interruption band, if it publishes one. AWS's Spot Instance Advisor gives the
share of a type's capacity that was taken back in the last month, which is no lifetime. With a constant hazard the
lifetimes of two bands relate as the logarithms of the shares left, and one measured lifetime fixes the scale. That one
is of p3 machines, which are in the highest band: 167 losses in 273.1 host-hours, or one in 1.64 h (Bamboo, NSDI '23,
p3-trace.csv, MIT licence). SkyPilot's V100 traces of 2023 have one in 1.4 to 16.7 h.

Pure.
"""

from __future__ import annotations

import math

BANDS = ("<5%", "5-10%", "10-15%", "15-20%", ">20%")  # bands of Spot Instance Advisor: share taken back in a month
TAKEN = (0.025, 0.075, 0.125, 0.175, 0.25)  # share that represents each band; for the open one a guess
MEASURED_BAND, MEASURED_S = 4, 273.1 * 3600 / 167
UNKNOWN_BAND = 2  # band used where the cloud publishes nothing (GCP, Azure): the middle, a neutral choice
BOOT_S = 180.0  # from a launch until the host works, if never measured: as benchmarks of spot policies define it
REPEATED_S = 30.0  # repeated after a loss that leaves no host: half of the default time between two checkpoints


def expected_lifetime_s(band: int | None) -> float:
    """Return the mean seconds until a spot host is taken. `band`: an index of BANDS, None where nobody knows."""
    here = UNKNOWN_BAND if band is None else band
    return MEASURED_S * math.log1p(-TAKEN[MEASURED_BAND]) / math.log1p(-TAKEN[here])


def useful_micros_h(price_micros_h: int, slots: int, lifetime_s: float = math.inf) -> int:
    """Return the micro-dollars for one hour of useful work of one GPU (of the host, where it has none), half up.

    `lifetime_s` is the result of `expected_lifetime_s`; infinite on demand.
    """
    if lifetime_s <= 0:
        raise ValueError(f"a lifetime of {lifetime_s} s is none")
    return math.floor(price_micros_h * (1 + (BOOT_S + REPEATED_S) / lifetime_s) / max(1, slots) + 0.5)
