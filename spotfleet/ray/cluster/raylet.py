"""Supervisor of one host's raylet: the process of a job of kind "ray". `python -m spotfleet.ray.cluster.raylet`

    waits for the head --its port answers--> ray start --block --ends--> waits for the head ...
    SIGTERM at any time: the raylet and all of its processes end, status 143

Nothing of a lost head's cluster outlives it: its raylets would wait for it for a minute. So once the kernel of the
head's machine refuses connections, the raylet is ended, and the next one joins the new head. A raylet that Ray has
drained ends by itself, and `ray start` goes on without it: then nothing is started any more, as this host leaves. All
Ray processes die with this one. It imports no Ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from spotfleet.agent.workers.versions import python_version, ray_version
from spotfleet.protocol.ray_cluster import (
    AUTH,
    CPUS,
    GPUS,
    HEAD_AT,
    HOST,
    STORE,
    TOKEN,
    VERSIONS,
    folder_of,
    mismatch,
)
from spotfleet.ray.cluster import processes, start

log = logging.getLogger("spotfleet.ray")
POLL_S = 0.2
LOOK_S = 1.0  # period of connecting to the head
REFUSED = 2  # refused connections in a row
AGAIN_S = 1.0  # before a raylet that has ended is started again
END_S = 2.0  # from SIGTERM to SIGKILL
ENDED = 143  # as a shell reports SIGTERM: 0 would be the end of the job


def node_of(env: Mapping[str, str]) -> start.Node:
    """Return the host's resources."""
    cpus = int(env.get(CPUS) or len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = min(float(env.get(STORE) or 0.1) * memory, 0.9 * shutil.disk_usage("/dev/shm").free)
    return start.Node(env[HOST], cpus, int(env.get(GPUS) or 0), int(store))


class RayletSupervisor:
    """The host's raylet, started again after each end."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._head, self._ip = env[HEAD_AT], env["SPOTFLEET_ADDRESS"]
        name = sha256(env["SPOTFLEET_WORKER"].encode()).hexdigest()[:8]
        self._folder = Path(folder_of(env[TOKEN])) / name
        self._command = start.raylet(self._head, start.resolved(self._ip), str(self._folder), node_of(env))
        self._env = processes.environment(env, self._folder) | AUTH
        self._over = threading.Event()

    def stop(self, *_: object) -> None:
        self._over.set()

    def run(self) -> int:
        """Run until `stop`."""
        processes.make(self._folder.parent)
        processes.make(self._folder)
        try:
            while not self._over.is_set():
                if processes.answers(self._head):
                    self._run_once()
                    self._over.wait(AGAIN_S)
                else:
                    self._over.wait(POLL_S)
        finally:
            processes.end_all(self._folder)
            try:
                self._folder.parent.rmdir()
            except OSError:
                pass  # other parts of the cluster are on this machine
        return ENDED

    def _run_once(self) -> None:
        process = subprocess.Popen(self._command, env=self._env, stdin=subprocess.DEVNULL,
                                   preexec_fn=processes.die_with_parent)
        log.warning("a raylet starts, and joins the head at %s", self._head)
        refused, looked = 0, time.monotonic()
        while process.poll() is None and not self._over.is_set() and refused < REFUSED:
            self._over.wait(POLL_S)
            if time.monotonic() - looked >= LOOK_S:
                refused, looked = refused + 1 if processes.answers(self._head) is False else 0, time.monotonic()
        if self._over.is_set():
            _end(process)
            return
        why = f"ended with status {process.returncode}" if refused < REFUSED else "is ended: the head was lost"
        log.warning("the raylet %s; another one joins once the head answers", why)
        processes.end_all(self._folder)
        process.wait()
        processes.make(self._folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    logging.basicConfig(format="%(asctime)s spotfleet: %(message)s", stream=sys.stdout)
    env = dict(os.environ)
    if why := mismatch(env.get(VERSIONS, ""), ray_version(), python_version(), env.get(HOST, "?")):
        log.error(why)
        return 1
    supervisor = RayletSupervisor(env)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
