"""What a machine does to become a host: one readable script, the same in cloud-init's user data and over SSH.

Everything of ours lies in one folder of the machine, ROOT (default `~/.spotfleet-host`):

    ROOT/claim                  the REQUEST_ID that has this machine; made without clobbering: one host per machine
    ROOT/REQUEST_ID/            a host; the home of its process (`--home`)
        listing.json            model.CloudHost as it was at its launch; the last file written before bootstrap.sh runs
        boot.json, ...          Boot.files, mode 0600
        bootstrap.sh            puts the environment in place, then supervises; settings.sh holds its variables
        remove.sh               ends every process of the host, removes all of it and environments that nobody uses
        state                   one line `STATE AT WHY`: installing, running, off or failed; AT in Unix seconds
        bootstrap.log           what the script did; console.log: what the process said
        wheel/                  the wheel, where it was brought along
    ROOT/envs/DIGEST/           an isolated environment; `complete` in it marks one that is whole

Whoever has a machine puts `script.files(plan)` there, each mode 0600, and runs `script.start(root, request_id)`: it
returns at once, and the rest shows in `state`. `script.look` says the state as it truly is: a host whose processes were
all killed, or whose machine was restarted without systemd, has `failed`. `script.removal` gives the text that removes a
host, and is run by `sh -s` from stdin: it works whatever is left of the host's folder.

    installing --environment complete--> running --status 0--> off
        |  ^ run again                      '--other status--> running, after a back-off
        v  |
       failed: a step failed, or none has said a word for INSTALLING_S

The script is idempotent: run again, it finishes what is unfinished and starts nothing twice. The process's status 0
means that the host wants to be off (`state` off); after any other it is started again, with a back-off. A step that
fails ends in `failed`, with the script's line, the command and the end of its output; a full disk and a missing Python
by name. Each step says in `state` what it is at, and has a limit of time: one that is older than INSTALLING_S is dead.

A machine that a cloud lent (`power_off`) powers itself off when its host is off, and FAILED_S of bootstrap.sh after it
has failed: until then somebody may look why, mend it and run `start` again.

The process finds SPOTFLEET_HOST_ADDRESS (of a dispatcher, or where the user set one), SPOTFLEET_HOST_PORT,
SPOTFLEET_METADATA_URL (this folder, for provider ssh), SPOTFLEET_WHEEL (the wheel's path) and, on everything that it
starts, SPOTFLEET_HOST_MARK=REQUEST_ID, by which remove.sh knows the host's processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spotfleet.model import EnvironmentSpec, Role

CLAIM, LISTING, STATE = "claim", "listing.json", "state"
MARK = "SPOTFLEET_HOST_MARK"
WHEEL = "SPOTFLEET_WHEEL"
INSTALLING_S = 2400.0  # longer than the longest step of bootstrap.sh: since so long no word means that nobody is at it


@dataclass(frozen=True)
class Wheel:
    """The very code that runs here, as a wheel; the same code gives the same bytes."""

    name: str  # of the file
    sha256: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class HostPlan:
    """What one machine shall become."""

    request_id: str
    fleet: str
    role: Role
    module: str  # run as `python -m MODULE --home ROOT/REQUEST_ID`
    files: dict[str, str] = field(repr=False)  # Boot.files
    wheel_name: str
    wheel_sha256: str
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    root: str = "~/.spotfleet-host"
    address: str = ""  # to advertise; empty: for a dispatcher the address at which SSH reached it, for an agent none
    port: int = 0  # where a dispatcher listens
    metadata_url: str = ""  # empty: ROOT/REQUEST_ID
    # The wheel is brought along to `wheel/`, or fetched: from `wheel_url` (https: or file:), else by an agent from the
    # dispatcher in its boot.json (`dispatcher`, `ca`, `token`): GET /v1/bundles/SHA256. Its digest is checked anyway.
    wheel_url: str = ""
    power_off: bool = False  # the machine, once its host is off or has failed for good; never somebody's own
    extras: tuple[str, ...] = ()  # of our distribution, beside what the role needs: ("aws",) for a dispatcher on EC2
