"""Commands that connect to machines: ssh, exec, rsync-up, rsync-down, port-forward."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import typer

from spotfleet.api.access import targets
from spotfleet.api.home import FleetDir, Home
from spotfleet.cli import habits
from spotfleet.cli.console import print_message, print_step
from spotfleet.codec import to_json
from spotfleet.config.values import duration_s
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.ssh import copy, fanout
from spotfleet.words import are, harmless

FORWARD = re.compile(r"(\d{1,5})(?::(?:(\[[0-9a-fA-F:.%]+\]|[^:\s]+):)?(\d{1,5}))?")
COPIES = 8  # at the same time


def ssh(target: str, words: Sequence[str]) -> None:
    """Replace this process by `ssh`, so that terminal, signals and exit code are its own."""
    folder, machine = targets.find_target(Home(), target, print_step)
    remote = targets.fanout_target(folder, machine)
    _replace_process(remote.command(remote.alias, *words))


def execute(name: str, words: Sequence[str], tail: Sequence[str] | None, *, everywhere: bool, host: str, timeout: str,
            as_json: bool) -> None:
    """Run a command on machines. `tail`: the words after `--`; None without `--`, and `words` is [FLEET] COMMAND."""
    folder, command = _folder_and_command(name, words, tail)
    if habits.is_task_file(command):
        raise UsageError(f"{command[0]} is a task file, not a command of a machine",
                         hint=f"spotfleet run -f {command[0]} -c {folder.name}")
    _refuse_both(everywhere, host)
    limit_s = _seconds(timeout)
    if not (everywhere or as_json or limit_s):
        remote = targets.fanout_target(folder, targets.fleet_target(folder, host, print_step))
        terminal = "-t" if sys.stdin.isatty() and sys.stdout.isatty() else "-T"
        _replace_process(remote.command(terminal, remote.alias, _command_line(command)))
    machines = targets.workers(folder, print_step) if everywhere else [targets.fleet_target(folder, host, print_step)]
    if everywhere:
        targets.open_shared_connection(folder)
    remotes = [targets.fanout_target(folder, machine, among_many=everywhere) for machine in machines]
    printer = _silent if as_json else _line_printer(len(remotes) > 1)
    found = fanout.run(remotes, _command_line(command), limit_s, printer)
    if as_json:
        print(json.dumps([to_json(outcome) for outcome in found], indent=1))
    for outcome in found:
        if outcome.trouble:
            print_message(f"{outcome.alias}: {outcome.trouble}")
        elif outcome.exit_code and everywhere:
            print_message(f"{outcome.alias}: ended with status {outcome.exit_code}")
    code = next((outcome.exit_code for outcome in found if outcome.exit_code), 0)
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)


def rsync(name: str, words: Sequence[str], tail: Sequence[str] | None, *, everywhere: bool, host: str, upwards: bool,
          ) -> None:
    folder, (source, target) = _copied(name, words, "rsync-up" if upwards else "rsync-down")
    _refuse_both(everywhere, host)
    if not everywhere:
        machine = targets.fleet_target(folder, host, print_step)
        go = copy.up if upwards else copy.down
        go(targets.fanout_target(folder, machine), source, target, tail or (), print_step)
        return
    machines = targets.workers(folder, print_step)
    targets.open_shared_connection(folder)

    def one(remote: fanout.FanoutTarget) -> SpotfleetError | None:
        try:
            if upwards:
                copy.up(remote, source, target, tail or (), lambda line: print_step(f"{remote.alias}: {line}"))
            else:
                near = Path(target, remote.alias)
                near.mkdir(parents=True, exist_ok=True)
                copy.down(remote, source, f"{near}/", tail or (), lambda line: print_step(f"{remote.alias}: {line}"))
        except UsageError:
            raise
        except SpotfleetError as error:
            return error
        print_step(f"{remote.alias}: done")
        return None

    remotes = [targets.fanout_target(folder, machine, among_many=True) for machine in machines]
    with ThreadPoolExecutor(COPIES) as pool:
        failed = {remote.alias: why for remote, why in zip(remotes, pool.map(one, remotes), strict=True) if why}
    if failed:
        message, hint = _failures(failed, len(remotes))
        raise SpotfleetError(message, hint=hint)


def _failures(failed: Mapping[str, SpotfleetError], of: int) -> tuple[str, str]:
    """Return (message, hint) for the machines where a copy failed; an error common to all is printed once."""
    same = len({str(error) for error in failed.values()}) == 1
    first = next(iter(failed.values()))
    if same and len(failed) > 1:
        return f"{first} (on {', '.join(failed)})", first.hint
    hints = [f"{are(of - len(failed), 'host')} done"] if of > len(failed) else []
    hints.append("the same command tries again")
    return "; ".join(f"{name}: {error}" + (f"; {error.hint}" if error.hint else "")
                     for name, error in failed.items()), "; ".join(hints)


def port_forward(name: str, words: Sequence[str], host: str) -> None:
    ports = list(words)
    if ports and not FORWARD.fullmatch(ports[0]) and not name:
        name = ports.pop(0)
    if not ports:
        raise UsageError("port-forward: which port?", hint="spotfleet port-forward FLEET 8888")
    forwards = [forward(text) for text in ports]
    folder = Home().find(name)
    remote = targets.fanout_target(folder, targets.fleet_target(folder, host, print_step))
    for near, far in forwards:
        print_message(f"127.0.0.1:{near} leads to {far} as {remote.alias} sees it, until Ctrl-C")
    asked = [word for near, far in forwards for word in ("-L", f"127.0.0.1:{near}:{far}")]
    _replace_process(remote.command("-N", "-T", "-o", "ExitOnForwardFailure=yes", *asked, remote.alias))


def forward(text: str) -> tuple[int, str]:
    """Parse 8888, 8888:80 or 8888:db:5432 into (our port, "host:port" there)."""
    found = FORWARD.fullmatch(text)
    ports = [int(port) for port in (found[1], found[3] or found[1])] if found else [0]
    if found is None or not all(0 < port < 65536 for port in ports):
        raise UsageError(f"{text}: expected PORT, PORT:PORT or PORT:HOST:PORT",
                         hint="8888 is port 8888 on both sides; 8080:80 is 8080 here and 80 there")
    return ports[0], f"{found[2] or 'localhost'}:{ports[1]}"


def _folder_and_command(name: str, words: Sequence[str], tail: Sequence[str] | None) -> tuple[FleetDir, list[str]]:
    before, command = (list(words), list(tail)) if tail is not None else (list(words[:-1]), list(words[-1:]))
    if not command:
        raise UsageError("exec: which command?", hint="spotfleet exec FLEET --all -- nvidia-smi")
    if before and not name:
        name = before.pop(0)
    if before:
        raise UsageError(f"exec: {shlex.join(before)!r} stands where only a fleet may",
                         hint="spotfleet exec FLEET --all -- COMMAND")
    return Home().find(name), command


def _copied(name: str, words: Sequence[str], called: str) -> tuple[FleetDir, tuple[str, str]]:
    given = list(words)
    if len(given) == 3 and not name:
        name = given.pop(0)
    if len(given) != 2:
        raise UsageError(f"{called}: expected SRC and DST", hint=f"spotfleet {called} FLEET SRC DST")
    return Home().find(name), (given[0], given[1])


def _command_line(command: Sequence[str]) -> str:
    """Join the command like ssh: one word is a line for the remote shell; several words are quoted."""
    return command[0] if len(command) == 1 else shlex.join(command)


def _refuse_both(everywhere: bool, host: str) -> None:
    if everywhere and host:
        raise UsageError("--all and --host exclude each other", hint="--host w0 is one host, --all every worker")


def _seconds(timeout: str) -> float:
    try:
        return duration_s(timeout) if timeout else 0.0
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", hint="such as 90s or 10m; leave it out for no limit") from None


def _line_printer(named: bool) -> Callable[[fanout.FanoutTarget, str, str], None]:
    """Return a printer of whole lines; with `named`, each starts with its machine's name."""
    lock = threading.Lock()

    def print_line(remote: fanout.FanoutTarget, stream: str, line: str) -> None:
        out = sys.stdout if stream == "stdout" else sys.stderr
        if named:  # on a terminal no machine can overwrite another's name
            line = f"{remote.alias}: {harmless(line) if out.isatty() else line}"
        with lock:
            print(line, file=out, flush=True)

    return print_line


def _silent(_place: fanout.FanoutTarget, _stream: str, _line: str) -> None:
    pass


def _replace_process(line: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the new program would inherit that
    os.execv(line[0], line)
