"""Forks worker processes that have torch imported, as the agent does: 0.1 s instead of seconds each.

stdin: one JSON object a line, {"script", "env", "log"}; stdout: {"pid"} at the start and {"pid", "exit"} at the end.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys


def child(script: str, env: dict[str, str], log: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, at in ((null, 0), (out, 1), (out, 2)):
        os.dup2(fd, at)
    os.environ.update(env)
    sys.argv = [script]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException as error:  # noqa: BLE001 - what the interpreter itself does at the top
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say(**message: int) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    for name in ("torch", "torch._dynamo", "spotfleet.train.elastic", "spotfleet.train.checkpoint.writer"):
        importlib.import_module(name)
    gc.freeze()
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.signal(signal.SIGCHLD, lambda *a: None)
    signal.set_wakeup_fd(wake_w)
    pending = b""
    while True:
        readable, _, _ = select.select([0, wake_r], [], [])
        if wake_r in readable:
            os.read(wake_r, 4096)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                say(pid=pid, exit=os.waitstatus_to_exitcode(status))
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    child(**json.loads(line))
                say(pid=pid)


if __name__ == "__main__":
    main()
