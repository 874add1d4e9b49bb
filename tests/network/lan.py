"""A network of machines to try things on by hand: a shell on its laptop, until it is left.

    python -m tests.network.lan [--hosts 3] [--delay MS] [--ipv6] [COMMAND...]

There, `spotfleet up` and all that follows is real: the dispatcher's machine `d` and hosts `w0`, `w1`, ... have sshds of
their own, `ssh w0` enters one. `counting.py` is a script to train. `cut w1`, `restore w1`, `slow w1 MS`, `off w1` and
`on w1` do to a machine what they say; `left` shows what differs from how all machines were. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable

from tests.support.network.machines import Machine, why_not
from tests.support.network.ssh_stage import LAPTOP, WORK, SshStage

ORDERS = "/run/lan"  # a fifo on the laptop
OVER = "over"
WORDS = "cut restore slow off on left"
SHELL = f"""
order() {{ echo "$@" >{ORDERS}; cat {ORDERS}.said; }}
for word in WORDS; do alias $word="order $word"; done
PS1='laptop:\\w# '
"""


def obey(stage: SshStage, order: str) -> str:
    what, *words = order.split()
    net = stage.lan.net
    match what, words:
        case "cut", [name]:
            net.cut(name)
        case "restore", [name]:
            net.restore(name)
        case "slow", [name, ms]:
            net.slow(name, float(ms) / 1000)
        case "off", [name]:
            stage.lan[name].power_off()
        case "on", [name]:
            stage.lan[name].power_on()
        case "left", []:
            return json.dumps({k: v for k, v in stage.left().items() if k != LAPTOP}, indent=1) + "\n"
        case _:
            return f"what is {order!r}?\n"
    return ""


def serve(laptop: Machine, obeyed: Callable[[str], str]) -> None:
    orders, said = laptop.path(ORDERS), laptop.path(f"{ORDERS}.said")
    while True:
        for order in orders.read_text().splitlines():
            if order == OVER:
                return
            try:
                answer = obeyed(order)
            except (AssertionError, KeyError, RuntimeError, ValueError) as error:
                answer = f"{type(error).__name__}: {error}\n"
            with contextlib.suppress(BrokenPipeError):  # nobody reads it to its end
                said.write_text(answer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="on each link, each way")
    parser.add_argument("--ipv6", action="store_true", help="no IPv4 at all")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    with SshStage.made(args.hosts, families=(6,) if args.ipv6 else (4, 6)) as stage:
        stage.fleet_file(args.hosts, args.hosts)
        for machine in stage.lan if args.delay else ():
            stage.lan.net.slow(machine.name, args.delay / 1000)
        print(*(f"{m.name} {m.address}" for m in stage.lan), sep=", ", flush=True)
        ended = shell(stage.laptop, WORDS, lambda order: obey(stage, order), args.command)
    sys.exit(ended)


def shell(laptop: Machine, words: str, obeyed: Callable[[str], str], command: list[str],
          env: dict[str, str] | None = None) -> int:
    """A shell there, or `command`, until it ends; `words` of it are orders to us."""
    for fifo in (ORDERS, f"{ORDERS}.said"):
        os.mkfifo(laptop.path(fifo))
    threading.Thread(target=serve, args=(laptop, obeyed), daemon=True).start()
    laptop.path("/run/lan.rc").write_text(SHELL.replace("WORDS", words))
    env = {"TERM": os.environ.get("TERM", "dumb"), **(env or {})}
    ended = laptop.start(*(command or ["bash", "--rcfile", "/run/lan.rc"]), cwd=WORK, env=env).wait()
    laptop.path(ORDERS).write_text(OVER)
    return ended


if __name__ == "__main__":
    main()
