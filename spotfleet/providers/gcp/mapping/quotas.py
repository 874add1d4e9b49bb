"""Quotas of Compute Engine: which one counts a machine, and how many units it takes. Pure.

Source: Compute Engine, "Allocation quotas" and "GPU quota".
"""

from __future__ import annotations

from collections.abc import Mapping

from spotfleet.model import Market, Offer
from spotfleet.providers.gcp.mapping.listing import split

GPUS = {"a2-highgpu": "A100", "a2-megagpu": "A100", "a2-ultragpu": "A100_80GB", "a3-highgpu": "H100",
        "a3-edgegpu": "H100", "a3-megagpu": "H100_MEGA", "a3-ultragpu": "H200", "a4-highgpu": "B200", "g2-": "L4",
        "g4-": "RTX_PRO_6000"}
ATTACHED = {"nvidia-tesla-t4": "T4", "nvidia-tesla-v100": "V100", "nvidia-tesla-p100": "P100", "nvidia-tesla-p4": "P4"}
FAMILIES = {"n2-": "N2_CPUS", "c2-": "C2_CPUS", "n2d-": "N2D_CPUS", "c3-": "C3_CPUS"}
ALL_REGIONS = "GPUS_ALL_REGIONS"  # the project has it; it counts GPUs of both markets


def metric(kind: str, market: Market) -> str:
    """Return the name of the region's quota that counts machines of this type: of GPUs, or else of vCPUs."""
    base, accelerator, _ = split(kind)
    gpu = ATTACHED.get(accelerator, "") or next((g for begin, g in GPUS.items() if base.startswith(begin)), "")
    if gpu:
        return f"PREEMPTIBLE_NVIDIA_{gpu}_GPUS" if market is Market.SPOT else f"NVIDIA_{gpu}_GPUS"
    if market is Market.SPOT:
        return "PREEMPTIBLE_CPUS"
    return next((name for begin, name in FAMILIES.items() if base.startswith(begin)), "CPUS")


def counting(offer: Offer, limits: Mapping[str, float]) -> str:
    """Return the quota that counts an offer's machines in a region with these limits.

    A project without preemptible quota in the region may launch Spot machines by its standard quota.
    """
    standard = metric(offer.instance_type, Market.ON_DEMAND)
    return standard if limits.get(offer.quota) == 0 and limits.get(standard) else offer.quota


def units(offer: Offer, vcpus: int) -> int:
    """Return how much of its quota one machine takes."""
    return offer.slots if metric(offer.instance_type, offer.market).endswith("GPUS") else vcpus
