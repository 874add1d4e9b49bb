"""Validation of jobs that the command line submits or that hosts report to hold. Pure."""

from __future__ import annotations

import re
import shlex

from spotfleet.errors import UsageError
from spotfleet.model import JOB_KINDS, RAY_KIND, RESIZE_POLICIES, JobSpec
from spotfleet.protocol.ray_cluster import TOKEN
from spotfleet.storage.schemes import ANY_SCHEME, SCHEMES

NAME_CHARS = 200
URL_CHARS = 2000
MOST_PRIORITY = 1000  # the lowest is its negative
MOST_WORKERS = 100_000
MOST_STEPS = 1_000_000_000
MOST_ENTRIES = 1000
LONGEST_GRACE_S = 3600.0
LONGEST_INTERVAL_S = 366 * 86_400.0
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
BUNDLE = re.compile(r"[0-9a-f]{64}")


def check(spec: JobSpec, secrets: dict[str, str]) -> None:
    """Raise UsageError for values with which a worker cannot be started, or which would overload the dispatcher."""
    if not spec.name or len(spec.name) > NAME_CHARS:
        raise UsageError(f"spec.name: expected 1 to {NAME_CHARS} characters")
    if spec.max_workers > MOST_WORKERS:
        raise UsageError(f"spec.max_workers: {spec.max_workers} is more than {MOST_WORKERS}")
    if not 0 <= spec.spares <= MOST_WORKERS:
        raise UsageError(f"spec.spares: {spec.spares} is not from 0 to {MOST_WORKERS}")
    if not -MOST_PRIORITY <= spec.priority <= MOST_PRIORITY:
        raise UsageError(f"spec.priority: {spec.priority} is not from -{MOST_PRIORITY} to {MOST_PRIORITY}",
                         hint="--priority 10 goes before the usual 0")
    if spec.spares and not spec.argv:
        raise UsageError("spec.spares: a command has no spares, as nothing tells when it could take a lost one's place",
                         hint="train a script that uses spotfleet.train, or leave --spares out")
    for where, variables in (("spec.envs", spec.envs), ("secrets", secrets)):
        for name, value in variables.items():
            if not VARIABLE.fullmatch(name) or not _is_plain(value):
                raise UsageError(f"{where}.{name[:40]}: a process's environment cannot hold it",
                                 hint="a name is of letters, digits and _; a value holds no NUL")
    if not all(map(_is_plain, (spec.name, *spec.argv, spec.run, spec.setup))):
        raise UsageError("spec: name, argv, run and setup hold no NUL and nothing that is not Unicode")
    if not 0 <= spec.setup_timeout_s <= LONGEST_INTERVAL_S:
        raise UsageError("spec.setup_timeout_s: expected 0 s to a year")
    _check_mounts(spec)
    if spec.bundle and not BUNDLE.fullmatch(spec.bundle):
        raise UsageError(f"spec.bundle: {spec.bundle[:80]!r} is no sha256 in hex")
    if not 0 <= spec.checkpoint.interval_s <= LONGEST_INTERVAL_S or not 0 <= spec.checkpoint.keep <= MOST_WORKERS:
        raise UsageError("spec.checkpoint: interval_s and keep are numbers from 0 on, an interval at most a year")
    _check_resize(spec)
    _check_restarts(spec)
    if spec.kind == RAY_KIND:
        _check_ray(spec, secrets)


def _check_ray(spec: JobSpec, secrets: dict[str, str]) -> None:
    if not spec.run or spec.argv or spec.gang or not spec.per_host or spec.container.image:
        raise UsageError("spec: a job of kind ray runs one command on each host by itself, without a container",
                         hint="`spotfleet ray start` submits one")
    if not secrets.get(TOKEN):
        raise UsageError(f"secrets: a job of kind ray needs {TOKEN}, as its cluster never runs without authentication",
                         hint="`spotfleet ray start` makes one")


def _check_restarts(spec: JobSpec) -> None:
    if spec.kind not in ("", *JOB_KINDS):
        raise UsageError(f"spec.kind: {spec.kind[:80]!r} is unknown", hint=f"use one of {', '.join(JOB_KINDS)}")
    if not 0 <= spec.grace_s <= LONGEST_GRACE_S or not 0 <= spec.max_restarts <= MOST_STEPS:
        raise UsageError(f"spec: grace_s is from 0 to {LONGEST_GRACE_S:g} s, max_restarts from 0 to {MOST_STEPS}")
    parts = spec.checkpoint_dir.split("/")
    if spec.checkpoint_dir and (any(part in ("", ".", "..") for part in parts) or not _is_plain(spec.checkpoint_dir)):
        raise UsageError(f"spec.checkpoint_dir: {spec.checkpoint_dir[:80]!r} is no name inside the working directory")
    if not _is_plain(spec.resume_args):
        raise UsageError("spec.resume_args: holds a NUL or what is not Unicode")
    try:
        shlex.split(spec.resume_args)
    except ValueError as error:
        raise UsageError(f"spec.resume_args: {error}", hint="quote it as for a shell") from None


def _check_mounts(spec: JobSpec) -> None:
    if len(spec.file_mounts) > MOST_ENTRIES:
        raise UsageError(f"spec.file_mounts: {len(spec.file_mounts)} are more than {MOST_ENTRIES}")
    for name, url in spec.file_mounts.items():
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts) or not _is_plain(name) or len(name) > NAME_CHARS:
            raise UsageError(f"spec.file_mounts: {name[:80]!r} is no name inside the working directory")
        if url.partition("://")[0] not in SCHEMES or not _is_plain(url) or len(url) > URL_CHARS:
            raise UsageError(f"spec.file_mounts.{name}: expected {ANY_SCHEME}, got {url[:80]!r}")


def _check_resize(spec: JobSpec) -> None:
    resize = spec.resize
    if resize.policy not in RESIZE_POLICIES:
        raise UsageError(f"spec.resize.policy: {resize.policy[:80]!r} is unknown",
                         hint=f"use one of {', '.join(RESIZE_POLICIES)}")
    counts = {"warmup_steps": resize.warmup_steps, "max_join": resize.max_join, "max_leave": resize.max_leave}
    for name, value in counts.items():
        if not 0 <= value <= MOST_STEPS:
            raise UsageError(f"spec.resize.{name}: {value} is not from 0 to {MOST_STEPS}")
    if not 0 <= resize.every_s <= LONGEST_INTERVAL_S:
        raise UsageError("spec.resize.every_s: expected 0 s to a year")
    epochs = [epoch for epoch, _ in resize.growth]
    if epochs and (epochs[0] != 0 or epochs != sorted(set(epochs)) or len(epochs) > MOST_ENTRIES):
        raise UsageError(f"spec.resize.growth: expected at most {MOST_ENTRIES} epochs in order, 0 first",
                         hint="--growth 0:2,30:4")
    for epoch, workers in resize.growth:
        if not spec.min_workers <= workers <= spec.max_workers:
            raise UsageError(f"spec.resize.growth: {workers} workers from epoch {epoch}, but the job may have "
                             f"{spec.min_workers} to {spec.max_workers}", hint="change the growth, or --np MIN:MAX")


def _is_plain(text: str) -> bool:
    """Return whether a process can receive the text. A lone surrogate, which JSON can contain, is not a character."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
