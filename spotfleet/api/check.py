"""`check`: may a fleet be made here? What each provider finds out, before anything is launched or paid for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet import config, providers
from spotfleet.api.house import Folder, House
from spotfleet.api.machine import load_provider, provider_config
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import FleetSpec
from spotfleet.providers import ExistingMachines, Finding, Furnished, Provider

OVER_SSH = ("aws", "ssh")  # providers whose machines the command line reaches by the system's ssh


@dataclass(frozen=True)
class Section:
    """What is found out about one provider. `findings` come one by one, and are asked for by going through them."""

    provider: str
    fleet: str  # that it is about; "": any
    findings: Iterable[Finding]


def sections(house: House, provider: str = "", file: Path | None = None) -> Iterator[Section]:
    """Of one provider, or of all that are installed; exactly for the fleet of `file`, or for the only one there is.

    Raises UsageError for a file that is wrong or names another provider.
    """
    if file is not None:
        spec = config.load(file).spec
        if provider not in ("", spec.provider):
            raise UsageError(f"{file} is of provider {spec.provider}, not {provider}",
                             hint=f"spotfleet check {spec.provider} {file}")
        yield Section(spec.provider, spec.name, _of_file(house, spec))
        return
    alone = _only(house)
    for name in [provider] if provider else providers.names():
        if alone is not None and alone.record.spec.provider == name:
            yield Section(name, alone.name, _of_fleet(alone))
        else:
            yield Section(name, "", _of_any(house, name, wanted=bool(provider)))


def needs_person(findings: Iterable[Finding]) -> bool:
    return any(f.level == "blocker" for f in findings)


def _only(house: House) -> Folder | None:
    living = [f for f in house.living() if f.readable]
    return living[0] if len(living) == 1 else None


def _of_file(house: House, spec: FleetSpec) -> Iterator[Finding]:
    """Of a fleet that is made already, as its folder says: a key of its own opens its machines."""
    folder = house.folder(spec.name)
    if folder.exists and folder.readable and not folder.is_down and folder.record.spec.provider == spec.provider:
        yield from _asked(lambda: load_provider(replace(folder.record, spec=spec), folder), spec, wanted=True)
    else:
        yield from _asked(lambda: providers.load(spec.provider, provider_config(house, spec)), spec, wanted=True)


def _of_fleet(folder: Folder) -> Iterator[Finding]:
    yield from _asked(lambda: load_provider(folder.record, folder), folder.record.spec, wanted=True)


def _of_any(house: House, name: str, *, wanted: bool) -> Iterator[Finding]:
    if name == "ssh":
        level = "blocker" if wanted else "absent"
        yield Finding("machines that exist are named in a fleet file; none was given", level,
                      "spotfleet check FILE   (docs/machines.md: how to write one)", "machines")
        return
    spec = FleetSpec("", provider=name)
    yield from _asked(lambda: providers.load(name, provider_config(house, spec)), None, wanted=wanted)


def _asked(load: Callable[[], Provider], spec: FleetSpec | None, *, wanted: bool) -> Iterator[Finding]:
    """What the provider finds; "absent" is a blocker to whoever wants it."""
    try:
        provider = load()
        for finding in _findings(provider, spec):
            yield replace(finding, level="blocker") if wanted and finding.level == "absent" else finding
    except SpotfleetError as error:
        yield Finding(str(error), "blocker", error.hint, "provider")


def _findings(provider: Provider, spec: FleetSpec | None) -> Iterator[Finding]:
    if isinstance(provider, Furnished):
        yield from provider.findings(spec)
    else:
        provider.check()
        yield Finding("machines can be launched", about="provider")
    if isinstance(provider, ExistingMachines):
        yield from _machines(provider)
    if provider.name in OVER_SSH:
        yield _ssh_here()


def _machines(provider: ExistingMachines) -> Iterator[Finding]:
    names, troubles = provider.machines(), provider.troubles()
    yield Finding(f"{len(names)} named: {', '.join(names)}", about="machines")
    for trouble in troubles:
        yield Finding(trouble, "warning", "see docs/machines.md, \"When something is wrong\"", "machines")


def _ssh_here() -> Finding:
    found = shutil.which("ssh")
    if found:
        return Finding(f"the command line reaches machines by {found}", about="ssh client")
    return Finding("there is no `ssh` on this machine, by which the command line reaches a dispatcher", "blocker",
                   "install OpenSSH's client: `apt-get install openssh-client`", "ssh client")


