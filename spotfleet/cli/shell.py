"""Commands that enter the machines: ssh, exec, rsync-up, rsync-down, port-forward."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import typer

from spotfleet.api import reach
from spotfleet.api.house import Folder, House
from spotfleet.cli.talk import say, step
from spotfleet.codec import to_json
from spotfleet.config.values import duration_s
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.ssh import copy, fanout

FORWARD = re.compile(r"(\d{1,5})(?::(?:(\[[0-9a-fA-F:.%]+\]|[^:\s]+):)?(\d{1,5}))?")
COPIES = 8  # at the same time


def ssh(target: str, words: Sequence[str]) -> None:
    """Become `ssh`: the terminal, signals and the exit code are its own."""
    folder, way = reach.one(House(), target, step)
    place = reach.place(folder, way)
    _become(place.command(place.alias, *words))


def execute(name: str, words: Sequence[str], tail: Sequence[str] | None, *, everywhere: bool, host: str, timeout: str,
            as_json: bool) -> None:
    """`tail`: what stands after `--`; None where there is none, and the fleet may stand before the command."""
    folder, command = _folder_and_command(name, words, tail)
    _either(everywhere, host)
    limit_s = _seconds(timeout)
    if not (everywhere or as_json or limit_s):
        place = reach.place(folder, reach.chosen(folder, host, step))
        terminal = "-t" if sys.stdin.isatty() and sys.stdout.isatty() else "-T"
        _become(place.command(terminal, place.alias, _joined(command)))
    ways = reach.workers(folder, step) if everywhere else [reach.chosen(folder, host, step)]
    if everywhere:
        reach.warm(folder)
    places = [reach.place(folder, way, among_many=everywhere) for way in ways]
    found = fanout.run(places, _joined(command), limit_s, _silent if as_json else _teller(len(places) > 1))
    if as_json:
        print(json.dumps([to_json(outcome) for outcome in found], indent=1))
    for outcome in found:
        if outcome.trouble:
            say(f"{outcome.alias}: {outcome.trouble}")
        elif outcome.exit_code and everywhere:
            say(f"{outcome.alias}: ended with status {outcome.exit_code}")
    code = next((outcome.exit_code for outcome in found if outcome.exit_code), 0)
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)


def rsync(name: str, words: Sequence[str], tail: Sequence[str] | None, *, everywhere: bool, host: str, upwards: bool,
          ) -> None:
    folder, (source, target) = _copied(name, words, "rsync-up" if upwards else "rsync-down")
    _either(everywhere, host)
    if not everywhere:
        way = reach.chosen(folder, host, step)
        go = copy.up if upwards else copy.down
        go(reach.place(folder, way), source, target, tail or (), step)
        return
    ways = reach.workers(folder, step)
    reach.warm(folder)

    def one(place: fanout.Place) -> str:
        try:
            if upwards:
                copy.up(place, source, target, tail or (), lambda line: step(f"{place.alias}: {line}"))
            else:
                near = Path(target, place.alias)
                near.mkdir(parents=True, exist_ok=True)
                copy.down(place, source, f"{near}/", tail or (), lambda line: step(f"{place.alias}: {line}"))
        except UsageError:
            raise
        except SpotfleetError as error:
            return f"{error}" + (f"; {error.hint}" if error.hint else "")
        step(f"{place.alias}: done")
        return ""

    places = [reach.place(folder, way, among_many=True) for way in ways]
    with ThreadPoolExecutor(COPIES) as pool:
        failed = [f"{place.alias}: {why}" for place, why in zip(places, pool.map(one, places), strict=True) if why]
    if failed:
        raise SpotfleetError("; ".join(failed), hint="the other hosts are done; the same command tries again")


def port_forward(name: str, words: Sequence[str], host: str) -> None:
    ports = list(words)
    if ports and not FORWARD.fullmatch(ports[0]) and not name:
        name = ports.pop(0)
    if not ports:
        raise UsageError("port-forward: which port?", hint="spotfleet port-forward FLEET 8888")
    forwards = [forward(text) for text in ports]
    folder = House().find(name)
    place = reach.place(folder, reach.chosen(folder, host, step))
    for near, far in forwards:
        say(f"127.0.0.1:{near} leads to {far} as {place.alias} sees it, until Ctrl-C")
    asked = [word for near, far in forwards for word in ("-L", f"127.0.0.1:{near}:{far}")]
    _become(place.command("-N", "-T", "-o", "ExitOnForwardFailure=yes", *asked, place.alias))


def forward(text: str) -> tuple[int, str]:
    """(our port, "host:port" there) of 8888, 8888:80 or 8888:db:5432."""
    found = FORWARD.fullmatch(text)
    ports = [int(port) for port in (found[1], found[3] or found[1])] if found else [0]
    if found is None or not all(0 < port < 65536 for port in ports):
        raise UsageError(f"{text}: expected PORT, PORT:PORT or PORT:HOST:PORT",
                         hint="8888 is port 8888 on both sides; 8080:80 is 8080 here and 80 there")
    return ports[0], f"{found[2] or 'localhost'}:{ports[1]}"


def _folder_and_command(name: str, words: Sequence[str], tail: Sequence[str] | None) -> tuple[Folder, list[str]]:
    before, command = (list(words), list(tail)) if tail is not None else (list(words[:-1]), list(words[-1:]))
    if not command:
        raise UsageError("exec: which command?", hint="spotfleet exec FLEET --all -- nvidia-smi")
    if before and not name:
        name = before.pop(0)
    if before:
        raise UsageError(f"exec: {shlex.join(before)!r} stands where only a fleet may",
                         hint="spotfleet exec FLEET --all -- COMMAND")
    return House().find(name), command


def _copied(name: str, words: Sequence[str], called: str) -> tuple[Folder, tuple[str, str]]:
    given = list(words)
    if len(given) == 3 and not name:
        name = given.pop(0)
    if len(given) != 2:
        raise UsageError(f"{called}: expected SRC and DST", hint=f"spotfleet {called} FLEET SRC DST")
    return House().find(name), (given[0], given[1])


def _joined(command: Sequence[str]) -> str:
    """As ssh does it: one word is a line for the far shell, several are the words that they are here."""
    return command[0] if len(command) == 1 else shlex.join(command)


def _either(everywhere: bool, host: str) -> None:
    if everywhere and host:
        raise UsageError("--all and --host exclude each other", hint="--host w0 is one host, --all every worker")


def _seconds(timeout: str) -> float:
    try:
        return duration_s(timeout) if timeout else 0.0
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", hint="such as 90s or 10m; leave it out for no limit") from None


def _teller(named: bool) -> Callable[[fanout.Place, str, str], None]:
    """Prints whole lines, of several machines with their names."""
    lock = threading.Lock()

    def hear(place: fanout.Place, stream: str, line: str) -> None:
        with lock:
            print(f"{place.alias}: {line}" if named else line, file=sys.stdout if stream == "stdout" else sys.stderr,
                  flush=True)

    return hear


def _silent(_place: fanout.Place, _stream: str, _line: str) -> None:
    pass


def _become(line: list[str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what it becomes would too
    os.execv(line[0], line)
