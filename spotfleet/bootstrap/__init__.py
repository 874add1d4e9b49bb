"""Bootstrap of a machine to a host: one readable script, the same in cloud-init's user data and over SSH.

All our files lie in one folder of the machine, ROOT (default `~/.spotfleet-host`):

    ROOT/claim                  the REQUEST_ID that has this machine; never overwritten: one host per machine
    ROOT/REQUEST_ID/            a host; the home directory of its process (`--home`)
        listing.json            model.CloudHost as it was at its launch; the last file written before bootstrap.sh runs
        boot.json, ...          Boot.files, mode 0600
        bootstrap.sh            makes the environment, then supervises; settings.sh holds its variables
        remove.sh               ends every process of the host, removes all its files and unused environments
        state                   one line `STATE AT WHY`: installing, running, off or failed; AT in Unix seconds
        stages                  when this boot reached the set-up and its end, for the agent (`agent/stages.py`)
        bootstrap.log           log of the script; console.log: output of the process
        wheel/                  the wheel, if it was copied to the machine
    ROOT/envs/DIGEST/           an isolated environment; the file `complete` in it marks a whole one

The owner of a machine puts `script.files(plan)` there, each mode 0600, and runs `script.start(root, request_id)`. The
command returns at once, and `state` shows the progress. `bootstrap.sh look` prints the actual state: a host is
`failed` if all its processes were killed, or if its machine was restarted without systemd. `script.removal` returns
the text that removes a host. `sh -s` runs it from stdin, so it works whatever is left of the host's folder.

    installing --environment complete--> running --status 0--> off
        |  ^ run again                      '--other status--> running, after a back-off
        v  |
       failed: a step failed, or no process of the script runs any more

The script is idempotent: run again, it finishes unfinished steps and starts nothing twice. Status 0 of the process
means that the host wants to be off (`state` off). After any other status the process is restarted, with a back-off. A
step that fails ends in `failed`, with the script's line, the command and the end of its output. A full disk and a
missing Python are named. Each step writes its name to `state` and has a time limit.

A machine that a cloud lent (`power_off`) powers itself off when its host is off, and FAILED_S (bootstrap.sh) after its
host has failed. Until then a person may find the reason, fix it and run `start` again.

The process gets these variables: SPOTFLEET_HOST_ADDRESS (for a dispatcher, or where the user set one),
SPOTFLEET_HOST_PORT, SPOTFLEET_METADATA_URL (this folder, for provider ssh), SPOTFLEET_WHEEL (the wheel's path) and
SPOTFLEET_HOST_MARK=REQUEST_ID. All its children inherit the last one, by which remove.sh finds the host's processes.

`provision.sh` makes a machine a ready image: it sets up the system, and by `image.py` the environment of a host that
belongs to no fleet. On a host of a stock image the same script sets sshd, limits and time only (`--configure`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spotfleet.model import EnvironmentSpec, Role

CLAIM = "claim"
MARK = "SPOTFLEET_HOST_MARK"
WHEEL = "SPOTFLEET_WHEEL"


@dataclass(frozen=True)
class Wheel:
    """Wheel of the running code; the same code gives the same bytes."""

    name: str  # file name
    sha256: str
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class HostPlan:
    """Plan of the host on one machine."""

    request_id: str
    fleet: str
    role: Role
    module: str  # run as `python -m MODULE --home ROOT/REQUEST_ID`
    files: dict[str, str] = field(repr=False)  # Boot.files
    wheel_name: str
    wheel_sha256: str
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    root: str = "~/.spotfleet-host"
    # address to advertise; empty: a dispatcher uses the address at which SSH reached it, an agent uses none
    address: str = ""
    port: int = 0  # port where a dispatcher listens
    metadata_url: str = ""  # empty: ROOT/REQUEST_ID
    # The wheel is copied to `wheel/`, or fetched: from `wheel_url` (https: or file:), else by an agent from the
    # dispatcher in its boot.json (`dispatcher`, `ca`, `token`): GET /v1/bundles/SHA256. Its digest is always checked.
    wheel_url: str = ""
    gpus: int = 0  # number of GPUs that must work before the host joins; 0: none is looked for
    # power off the machine once its host is off or has failed for good; never set for a user's own machine
    power_off: bool = False
    # extras of our distribution, in addition to those of the role, and modules that must be importable besides our
    # own, for a dispatcher that calls a cloud: the extras bring them
    extras: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
