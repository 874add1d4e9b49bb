"""The fleet's status and counters as OpenMetrics text. Pure.

METRICS lists every metric; examples/grafana.json asks for these names alone. A counter begins again where the
dispatcher's process did, as Prometheus expects of counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spotfleet.model import HostState, JobState, Role
from spotfleet.protocol.messages import FleetStatus, HostStatus, JobStatus

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MIB = 1 << 20
MOST_JOBS = 50  # newest jobs; each makes some ten series
Value = int | float
Sample = tuple[Mapping[str, str], Value]


@dataclass(frozen=True)
class Metric:
    name: str  # without the prefix `spotfleet_`, and for a counter without `_total`
    kind: str  # "gauge" or "counter"
    help: str
    unit: str = ""  # the name's ending, as OpenMetrics wants it

    @property
    def sample_name(self) -> str:
        """Name under which Prometheus stores it."""
        return f"spotfleet_{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = (
    Metric("hosts", "gauge", "Worker hosts by state and market."),
    Metric("hosts_wanted", "gauge", "The number of worker hosts that should exist now."),
    Metric("notices", "counter", "Notices from the cloud by kind."),
    Metric("hosts_taken", "counter", "Runs of hosts that the cloud ended."),
    Metric("jobs", "gauge", "Jobs by state."),
    Metric("job_steps", "gauge", "Optimizer steps applied; less after the return to a checkpoint."),
    Metric("job_step_seconds", "gauge", "Duration of a step.", "seconds"),
    Metric("job_workers", "gauge", "World size."),
    Metric("job_repeated_steps", "gauge", "Optimizer steps made again."),
    Metric("job_slow_workers", "gauge", "Workers slower than the median by 30 % over 50 steps."),
    Metric("job_changes", "counter", "Generations after the first, by cause."),
    Metric("job_paused_seconds", "counter", "Time from the last step before a change to the first one after it.",
           "seconds"),
    Metric("spent_dollars", "counter", "Cost since the fleet was made.", "dollars"),
    Metric("on_demand_dollars", "counter", "The same, had all machines been on demand.", "dollars"),
    Metric("burn_dollars_per_hour", "gauge", "Cost of an hour now."),
    Metric("on_demand_burn_dollars_per_hour", "gauge", "The same on demand."),
    Metric("budget_dollars", "gauge", "max_cost; absent without one.", "dollars"),
    Metric("gpu_used_ratio", "gauge", "Share of the time in which a kernel ran.", "ratio"),
    Metric("gpu_memory_used_bytes", "gauge", "Memory in use.", "bytes"),
    Metric("gpu_memory_bytes", "gauge", "Memory in all.", "bytes"),
    Metric("gpu_temperature_celsius", "gauge", "Temperature.", "celsius"),
    Metric("gpu_uncorrected_errors", "gauge", "Uncorrected ECC errors since the driver was loaded."),
    Metric("reconcile_seconds", "gauge", "Duration of the last reconcile tick, with the cloud's answers.", "seconds"),
)


@dataclass(frozen=True)
class Counters:
    """What only the past shows."""

    notices: Mapping[str, int]  # by kind
    taken: int
    changes: Mapping[tuple[str, str], int]  # by job and cause
    paused_s: Mapping[str, float]  # by job


def text(status: FleetStatus, counters: Counters) -> str:
    """Return the exposition of one fleet."""
    found = _samples(status, counters)
    lines = []
    for metric in METRICS:
        name = f"spotfleet_{metric.name}"
        lines += [f"# TYPE {name} {metric.kind}", *([f"# UNIT {name} {metric.unit}"] if metric.unit else []),
                  f"# HELP {name} {metric.help}"]
        lines += [f"{metric.sample_name}{_labels({'fleet': status.fleet, **labels})} {value}"
                  for labels, value in found[metric.name]]
    return "\n".join([*lines, "# EOF", ""])


def _samples(status: FleetStatus, counters: Counters) -> dict[str, list[Sample]]:
    jobs = status.jobs[-MOST_JOBS:]
    live = [j for j in jobs if not JobState(j.state).ended]
    found: dict[str, list[Sample]] = {
        "hosts": _hosts(status.hosts),
        "hosts_wanted": [({}, status.target if status.wanted is None else status.wanted)],
        "notices": [({"kind": kind}, n) for kind, n in sorted(({"interruption": 0} | dict(counters.notices)).items())],
        "hosts_taken": [({}, counters.taken)],
        "jobs": [({"state": s.value}, sum(j.state == s.value for j in status.jobs)) for s in JobState],
        "job_step_seconds": [(_of(j), j.step_s) for j in live if j.step_s],
        "job_workers": [(_of(j), j.world_size) for j in live],
        "job_steps": [(_of(j), j.version) for j in jobs],
        "job_repeated_steps": [(_of(j), j.repeated) for j in jobs],
        "job_slow_workers": [(_of(j), len(j.slow)) for j in live],
        "job_changes": [({"job": job, "cause": cause}, n) for (job, cause), n in sorted(counters.changes.items())],
        "job_paused_seconds": [({"job": job}, s) for job, s in sorted(counters.paused_s.items())],
        "spent_dollars": _dollars(status.spent_micros),
        "on_demand_dollars": _dollars(status.on_demand_spent_micros),
        "burn_dollars_per_hour": _dollars(status.burn_micros_h),
        "on_demand_burn_dollars_per_hour": _dollars(status.on_demand_burn_micros_h),
        "budget_dollars": _dollars((status.policy.max_micros if status.policy else 0) or None),
        "reconcile_seconds": [({}, status.tick_s)],
    }
    return {**found, **_gpus(status.hosts)}


def _hosts(hosts: Iterable[HostStatus]) -> list[Sample]:
    """Count by state and market; states without a host are 0, so that a graph has no gaps."""
    markets = ("on-demand", "spot")
    counts = Counter((h.state, h.pool.rpartition("/")[2]) for h in hosts if h.role == Role.WORKER.value)
    states = [s.value for s in HostState if s is not HostState.GONE]
    keys = dict.fromkeys([*((state, market) for state in states for market in markets), *sorted(counts)])
    return [({"state": state, "market": market}, counts[state, market]) for state, market in keys]


def _gpus(hosts: Iterable[HostStatus]) -> dict[str, list[Sample]]:
    read = [({"host": h.host, "gpu": str(g.index)}, g) for h in hosts for g in h.gpus if not g.why]
    fields: dict[str, list[tuple[Mapping[str, str], Value | None]]] = {
        "gpu_used_ratio": [(of, None if g.used_percent is None else g.used_percent / 100) for of, g in read],
        "gpu_memory_used_bytes": [(of, None if g.memory_mib is None else g.memory_mib * MIB) for of, g in read],
        "gpu_memory_bytes": [(of, None if g.memory_total_mib is None else g.memory_total_mib * MIB) for of, g in read],
        "gpu_temperature_celsius": [(of, g.celsius) for of, g in read],
        "gpu_uncorrected_errors": [(of, g.errors) for of, g in read],
    }
    return {name: [(of, value) for of, value in samples if value is not None] for name, samples in fields.items()}


def _of(job: JobStatus) -> dict[str, str]:
    return {"job": job.job}


def _dollars(micros: int | None) -> list[Sample]:
    return [] if micros is None else [({}, micros / 1e6)]


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
