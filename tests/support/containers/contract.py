"""Options of Docker's and Podman's command lines, as their references list them, for the commands that hosts use.

Docker: docs/reference/commandline in github.com/docker/cli. Podman: docs/source/markdown in
github.com/containers/podman. An option is a flag (False) or has a value (True).
"""

from __future__ import annotations

import re

_RUN = {
    "--name": True, "--pull": True, "--network": True, "--ipc": True, "--user": True, "--workdir": True,
    "--security-opt": True, "--log-driver": True, "--label": True, "--mount": True, "--device": True, "--ulimit": True,
    "--pids-limit": True, "--entrypoint": True, "--env": True, "--env-file": True, "--volume": True, "--rm": False,
    "--init": False, "--interactive": False, "--detach": False, "--privileged": False,
}
_EXEC = {"--interactive": False, "--tty": False, "--user": True, "--workdir": True, "--env": True, "--env-file": True}
_PS = {"--all": False, "--filter": True, "--format": True, "--quiet": False}
OPTIONS = {
    "docker": {
        "run": _RUN | {"--gpus": True}, "exec": _EXEC, "ps": _PS | {"--no-trunc": False}, "rm": {"--force": False},
        "pull": {"--quiet": False, "--platform": True}, "info": {"--format": True},
        "image inspect": {"--format": True},
    },
    "podman": {
        "run": _RUN | {"--userns": True}, "exec": _EXEC, "ps": _PS, "rm": {"--force": False},
        "pull": {"--quiet": False, "--authfile": True}, "info": {"--format": True}, "image exists": {},
    },
}
PULL = ("always", "missing", "never")
LOG_DRIVERS = {"docker": ("none", "local", "json-file", "journald", "syslog"),
               "podman": ("none", "k8s-file", "json-file", "journald", "passthrough", "passthrough-tty")}
MOUNT_KEYS = ("type", "source", "src", "target", "dst", "destination", "readonly", "ro")

# Errors as the engines print them.
NO_DAEMON = ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?")
NO_GPU = {
    "docker": "docker: Error response from daemon: could not select device driver \"\" with capabilities: [[gpu]].",
    "podman": "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all"}
NOT_FOUND = {
    "docker": "Error response from daemon: manifest for {image} not found: manifest unknown: manifest unknown",
    "podman": "Error: initializing source docker://{image}: reading manifest: manifest unknown"}
REFUSED = {
    "docker": "Error response from daemon: Head \"https://{image}\": unauthorized: authentication required",
    "podman": "Error: initializing source docker://{image}: unable to retrieve auth token: invalid username/password: "
              "unauthorized: authentication required"}


class OutOfContract(Exception):
    """A command line that the engine's reference does not allow."""


def parsed(engine: str, argv: list[str]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the command, its options and what follows them."""
    commands = OPTIONS[engine]
    command = next((name for name in commands if argv[:len(name.split())] == name.split()), None)
    if command is None:
        raise OutOfContract(f"unknown command: {engine} {' '.join(argv[:2])}")
    rest, options = argv[len(command.split()):], []
    while rest and rest[0].startswith("-"):
        name, value = rest.pop(0), ""
        if name not in commands[command]:
            raise OutOfContract(f"unknown flag: {name}")
        if commands[command][name]:
            if not rest:
                raise OutOfContract(f"flag needs an argument: {name}")
            value = rest.pop(0)
        options.append((name, value))
    return command, options, rest


def check_run(engine: str, options: list[tuple[str, str]]) -> None:
    """Check values of `run`."""
    for name, value in options:
        if name == "--pull" and value not in PULL:
            raise OutOfContract(f"invalid pull option: {value}")
        if name == "--log-driver" and value not in LOG_DRIVERS[engine]:
            raise OutOfContract(f"invalid log driver: {value}")
        if name == "--label" and "=" not in value:
            raise OutOfContract(f"invalid label: {value}")
        if name == "--ulimit" and not re.fullmatch(r"[a-z]+=-?\d+(:-?\d+)?", value):
            raise OutOfContract(f"invalid ulimit argument: {value}")
        if name == "--mount":
            mount_of(value)


def mount_of(text: str) -> dict[str, str]:
    """Return a mount's fields."""
    fields = {key: value for key, _, value in (part.partition("=") for part in text.split(","))}
    if unknown := fields.keys() - set(MOUNT_KEYS):
        raise OutOfContract(f"invalid field in a mount: {sorted(unknown)}")
    if fields.get("type") != "bind" or not fields.get("source") or not fields.get("target", "").startswith("/"):
        raise OutOfContract(f"invalid mount: {text}")
    return fields
