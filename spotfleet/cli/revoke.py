"""`revoke`: a host that may be in the wrong hands is trusted no more."""

from __future__ import annotations

import typer

from spotfleet.api import Fleet
from spotfleet.cli.change import worker_host
from spotfleet.cli.talk import confirm, next_command, say


def revoke(name: str, host: str, *, why: str, yes: bool) -> None:
    fleet = Fleet(name)
    host = worker_host(fleet, host)
    jobs = next((h.jobs for h in fleet.hosts() if h.host == host), ())
    say(f"fleet {fleet.name}: refuse the token of {host} from now on, for good; end the machine and replace it")
    for job in jobs:
        say(f"  job {job} loses its workers there, as if they had been killed; its secrets were on that host: change "
            "them if it was in the wrong hands")
    if not confirm("Go on?", yes):
        raise typer.Exit(1)
    fleet.revoke(host, why)
    say(f"{host} is trusted no more")
    next_command(f"spotfleet status {fleet.name}", f"spotfleet events {fleet.name}")
