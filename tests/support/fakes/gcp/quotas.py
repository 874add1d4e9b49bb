"""Quotas of Compute Engine: which a machine uses, and which listings show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.fakes.gcp import catalog
from tests.support.fakes.gcp.state import SPOT, Instance, last

FAMILY_CPUS = {"n2": "N2_CPUS", "a2": "A2_CPUS"}  # others share CPUS
NO_CPUS = ("a3", "a4")  # counted by their GPUs alone
GLOBAL_GPUS, GLOBAL_CPUS = "GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS"
PROJECT_WIDE = (GLOBAL_GPUS, GLOBAL_CPUS)
ENDLESS = 100_000.0


def needed(instance: Instance, limit: Callable[[str], float] = lambda _metric: ENDLESS) -> dict[str, float]:
    """What a running machine uses; of its disks and addresses what a stopped one keeps is left out.

    Where there is no preemptible quota, the standard one counts a Spot VM. `limit`: of a metric in the region.
    """
    return {_standard(metric, instance, limit): amount for metric, amount in _needed(instance).items()}


def _standard(metric: str, instance: Instance, limit: Callable[[str], float]) -> str:
    standard = {"PREEMPTIBLE_CPUS": FAMILY_CPUS.get(instance.kind.family, "CPUS"),
                "PREEMPTIBLE_LOCAL_SSD_GB": "LOCAL_SSD_TOTAL_GB"}.get(metric, metric.removeprefix("PREEMPTIBLE_"))
    return standard if not limit(metric) and limit(standard) else metric


def _needed(instance: Instance) -> dict[str, float]:
    spot, kind = instance.market == SPOT, instance.kind
    card, count = instance.gpus
    found: dict[str, float] = {"INSTANCES": 1.0, GLOBAL_CPUS: float(kind.cpus)}
    if kind.family not in NO_CPUS:
        found["PREEMPTIBLE_CPUS" if spot else FAMILY_CPUS.get(kind.family, "CPUS")] = float(kind.cpus)
    if count:
        metric = catalog.ACCELERATORS[card].metric
        found |= {f"PREEMPTIBLE_{metric}" if spot else metric: float(count), GLOBAL_GPUS: float(count)}
    if nats := sum(bool(n.get("accessConfigs")) for n in instance.body["networkInterfaces"]):
        found["IN_USE_ADDRESSES"] = float(nats)
    ssds = [d for d in instance.body["disks"] if d["type"] == "SCRATCH"]
    if ssds:
        metric = "PREEMPTIBLE_LOCAL_SSD_GB" if spot else "LOCAL_SSD_TOTAL_GB"
        found[metric] = float(catalog.LOCAL_SSD_GB * len(ssds))
    return found


def disk_metric(disk: dict[str, Any]) -> str:
    return "DISKS_TOTAL_GB" if last(disk["type"]) == "pd-standard" else "SSD_TOTAL_GB"


def listed() -> list[str]:
    """Metrics of a region as `regions.get` shows them: those of the newest GPUs are not among them."""
    gpus = [a.metric for a in catalog.ACCELERATORS.values() if a.listed]
    return ["CPUS", "PREEMPTIBLE_CPUS", *FAMILY_CPUS.values(), "INSTANCES", "IN_USE_ADDRESSES", "STATIC_ADDRESSES",
            "DISKS_TOTAL_GB", "SSD_TOTAL_GB", "LOCAL_SSD_TOTAL_GB", "PREEMPTIBLE_LOCAL_SSD_GB", *gpus,
            *(f"PREEMPTIBLE_{g}" for g in gpus)]
