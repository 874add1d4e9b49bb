"""Versions of libraries that a job's workers report, in words. Pure."""

from __future__ import annotations

from spotfleet.protocol.messages import JobStatus


def nccl_of(job: JobStatus) -> str:
    """Return the job's version of NCCL, as "NCCL 2.28.9"; with several, what is wrong; "" if no worker has any."""
    hosts: dict[str, set[str]] = {}
    for worker in job.workers:
        if worker.nccl:
            hosts.setdefault(worker.nccl, set()).add(worker.host)
    if len(hosts) < 2:
        return f"NCCL {next(iter(hosts))}" if hosts else ""
    each = ", ".join(f"{version} on {' '.join(sorted(on))}" for version, on in sorted(hosts.items()))
    return f"its workers have different versions of NCCL, {each}; hosts of one image or one pinned torch have the same"


def differs(job: JobStatus) -> bool:
    return len({worker.nccl for worker in job.workers if worker.nccl}) > 1
