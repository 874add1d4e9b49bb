"""Shell code that runs a command in a container, and sends it signals, for a client that enters the container.

    engine's client --stdin--> sh --setsid--> the command, in a session of its own

The command is a child of the container's first process, so a signal for the client does not reach it: PID_FILE holds
its process group. The variables come through stdin, as they may be secrets. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

NEEDS = ("sh", "setsid")  # programs in the container
PID_FILE = ".pid"  # behind the name of the log
MORE_FILES = 'ulimit -S -n "$(ulimit -H -n)" 2>/dev/null'  # data loaders open more than the 1024 of newer engines
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "UID", "EUID", "PPID", "_"}
_PID_TRIES = 50  # for a signal that comes before the command has started


def start_script(command: str, env: Mapping[str, str], cwd: str, log: str) -> str:
    """Return a script that runs `command` by bash, or else sh, with its output in `log`, and ends with its status."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()
             if NAME.fullmatch(name) and name not in _SHELLS_OWN]
    file, output = shlex.quote(log + PID_FILE), shlex.quote(log)
    return "\n".join([
        f"exec >>{output} 2>&1",
        f"cd {shlex.quote(cwd)} || exit 1",
        MORE_FILES,
        *lines,
        "shell=bash; command -v bash >/dev/null || shell=sh",
        f'setsid "$shell" -c {shlex.quote(command)} </dev/null &',
        "process=$!",
        f'echo "$process" >{file}',
        'wait "$process"',
        "status=$?",
        'kill -KILL -"$process" 2>/dev/null',  # what it has left
        f"rm -f {file}",
        'exit "$status"', ""])


def signal_script(log: str, signum: int) -> str:
    """Return a script that sends a signal to the process group of the command with this log."""
    file = shlex.quote(log + PID_FILE)
    return (f"tries=0; while [ ! -s {file} ] && [ $tries -lt {_PID_TRIES} ]; do sleep 0.1; tries=$((tries + 1)); done; "
            f"process=$(cat {file}) || exit 0; kill -{signum:d} -\"$process\" 2>/dev/null || kill -{signum:d} "
            '"$process" 2>/dev/null; exit 0')
