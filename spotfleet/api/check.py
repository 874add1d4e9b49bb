"""`check`: findings of each provider about whether a fleet can be made, before anything is launched or paid for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet import config, providers
from spotfleet.api.home import FleetDir, Home
from spotfleet.api.machine import DispatcherMachine, load_provider, provider_config
from spotfleet.config import base as contracts
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import FleetSpec
from spotfleet.plugins import Base, Machines
from spotfleet.protocol.libraries import differs, nccl_of
from spotfleet.protocol.messages import JobStatus
from spotfleet.providers import ExistingMachines, Finding, ManagedResources, Provider
from spotfleet.providers.plugin import plugin_of
from spotfleet.version import __version__

PATIENCE_S = 2.0  # the other findings need no dispatcher


@dataclass(frozen=True)
class CheckSection:
    """Findings about one provider. `findings` is lazy: iterating over it sends the provider's requests."""

    provider: str
    fleet: str  # the fleet that it is about; "": any
    findings: Iterable[Finding]


def sections(home: Home, provider: str = "", file: Path | None = None, base: Base | None = None,
             ) -> Iterator[CheckSection]:
    """Yield the section of one provider, or of all that are installed; exactly for the fleet of `file`, or for the
    only fleet there is. `base`: the one that the fleet of `file` is to be on.

    Raises UsageError for a file that is wrong or names another provider.
    """
    if file is not None:
        spec = config.load(file, given=config.Given(base=base)).spec
        if provider not in ("", spec.provider):
            raise UsageError(f"{file} is of provider {spec.provider}, not {provider}",
                             hint=f"spotfleet check {file}")
        yield CheckSection(spec.provider, spec.name, _of_file(home, spec, base))
        return
    folder = _only_fleet(home)
    for name in [provider] if provider else providers.names():
        if folder is not None and folder.record.spec.provider == name:
            yield CheckSection(name, folder.name, _of_fleet(folder))
        else:
            yield CheckSection(name, "", _of_any(home, name, wanted=bool(provider)))


def needs_person(findings: Iterable[Finding]) -> bool:
    return any(f.level == "blocker" for f in findings)


def _only_fleet(home: Home) -> FleetDir | None:
    living = [f for f in home.living() if f.readable]
    return living[0] if len(living) == 1 else None


def _of_file(home: Home, spec: FleetSpec, base: Base | None) -> Iterator[Finding]:
    """Yield findings for the spec of a file. A fleet that exists already is checked with its own SSH key."""
    if base is not None:
        yield from _of_base(spec, base)
    folder = home.folder(spec.name)
    if folder.exists and folder.readable and not folder.is_down and folder.record.spec.provider == spec.provider:
        yield from _load_findings(lambda: load_provider(replace(folder.record, spec=spec), folder), spec, wanted=True)
    else:
        yield from _load_findings(lambda: providers.load(spec.provider, provider_config(home, spec)), spec, wanted=True)


def _of_base(spec: FleetSpec, base: Base) -> Iterator[Finding]:
    """Yield the differences between a base and what this release, and this fleet, expect of one. The provider's own
    findings name resources of it that are not there."""
    if other := contracts.difference(base):
        yield Finding(other, "warning", f"{contracts.APPLY_AGAIN} with `?ref=v{__version__}`", "base")
    else:
        yield Finding(f"{base.name} in {base.region}, made by the module of this release", about="base")
    if not base.checkpoints and not spec.checkpoint.target:
        yield Finding(f"base {base.name} has no bucket: checkpoints end with the dispatcher's disk", "warning",
                      "set `bucket` of the module, or `checkpoint.target` in the fleet file", "base")


def _of_fleet(folder: FleetDir) -> Iterator[Finding]:
    yield from _load_findings(lambda: load_provider(folder.record, folder), folder.record.spec, wanted=True)
    yield from _libraries(folder)


def _libraries(folder: FleetDir) -> Iterator[Finding]:
    """Yield the version of NCCL of each running job, from the dispatcher; nothing where that does not answer."""
    url = folder.record.url
    jobs: Sequence[JobStatus] = ()
    if url:
        with suppress(SpotfleetError):
            jobs = DispatcherMachine(folder).client(url, PATIENCE_S).status().jobs
    yield from (nccl_finding(job) for job in jobs if nccl_of(job))


def nccl_finding(job: JobStatus) -> Finding:
    if differs(job):
        return Finding(f"{job.job}: {nccl_of(job)}", "warning",
                       "start its hosts from one image (docs/clouds/images.md), or pin torch in `environment.packages`",
                       "NCCL")
    return Finding(f"{job.job}: {nccl_of(job)}", about="NCCL")


def _of_any(home: Home, name: str, *, wanted: bool) -> Iterator[Finding]:
    if plugin_of(name).traits.machines is Machines.EXISTING:
        level = "blocker" if wanted else "absent"
        yield Finding("machines that exist are named in a fleet file; none was given", level,
                      "spotfleet check FILE   (docs/machines.md: how to write one)", "machines")
        return
    spec = FleetSpec("", provider=name)
    yield from _load_findings(lambda: providers.load(name, provider_config(home, spec)), None, wanted=wanted)


def _load_findings(load: Callable[[], Provider], spec: FleetSpec | None, *, wanted: bool) -> Iterator[Finding]:
    """Yield the provider's findings. With `wanted`, "absent" becomes a blocker."""
    try:
        provider = load()
        for finding in _findings(provider, spec):
            yield replace(finding, level="blocker") if wanted and finding.level == "absent" else finding
    except SpotfleetError as error:
        yield Finding(str(error), "blocker", error.hint, "provider")


def _findings(provider: Provider, spec: FleetSpec | None) -> Iterator[Finding]:
    if isinstance(provider, ManagedResources):
        yield from provider.findings(spec)
    else:
        provider.check()
        yield Finding("machines can be launched", about="provider")
    if isinstance(provider, ExistingMachines):
        yield from _machines(provider)
    if plugin_of(provider.name).traits.machines is not Machines.HERE:
        yield _ssh_here()


def _machines(provider: ExistingMachines) -> Iterator[Finding]:
    names, problems = provider.machines(), provider.problems()
    yield Finding(f"{len(names)} named: {', '.join(names)}", about="machines")
    for problem in problems:
        yield Finding(problem, "warning", "see docs/machines.md, \"When something is wrong\"", "machines")


def _ssh_here() -> Finding:
    found = shutil.which("ssh")
    if found:
        return Finding(f"the command line reaches machines by {found}", about="ssh client")
    return Finding("there is no `ssh` on this machine, by which the command line reaches a dispatcher", "blocker",
                   "install OpenSSH's client: `apt-get install openssh-client`", "ssh client")


