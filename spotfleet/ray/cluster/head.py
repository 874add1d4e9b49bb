"""Supervisor of a fleet's Ray head, on the dispatcher's machine. `python -m spotfleet.ray.cluster.head`

    FOLDER/control  Unix socket for the dispatcher: lines of `RayWish` in, of `RayReport` out
    FOLDER/h/home   home folder of the head's processes, with Ray's temporary one; its output goes to this process's
    FOLDER/d/home   home folder of scripts; beside it their working directories, where they run as another user
                    (account.py)
    observer        its lines are the states; wishes are passed to it
    drivers         processes of `spotfleet ray submit` (drivers.py)

It outlives a restart of the dispatcher, and ends itself ORPHAN_S after the last one. A head that ends is started anew
on the same port: its raylets end, since Ray keeps no state of a lost head, and the next ones join. It imports no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spotfleet.agent.workers.versions import python_version, ray_version
from spotfleet.protocol.messages import dump, load
from spotfleet.protocol.ray_cluster import (
    AUTH,
    HEAD_AT,
    METADATA,
    TOKEN,
    RayReport,
    RayState,
    RayWish,
    folder_of,
)
from spotfleet.ray.cluster import account, processes, start
from spotfleet.ray.cluster.drivers import Drivers
from spotfleet.version import install

log = logging.getLogger("spotfleet.ray")
HOME = "home"
AGAIN_S = 0.5  # before a head or observer that has ended is started again
END_S = 2.0
ORPHAN_S = 600.0  # without a dispatcher
SILENT_S = 120.0  # without a line of the observer, whose calls have limits far below, also to import Ray and to connect
OBSERVER = sys.executable, "-m", "spotfleet.ray.cluster.observer"
MOST_LINE = 16 << 20
# What Ray reads at a driver's init: the working directory of the driver goes to every node that runs something of it.
JOB_CONFIG, SHIPPED = "RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "."}}'
OWN_FIRST = {"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}  # Ray refuses a script's own working_dir beside that one otherwise
PASSED = ("SPOTFLEET_LOCAL_HOST", "SPOTFLEET_HOST_MARK")  # by which a machine's processes are found


class HeadSupervisor:
    """The head, its observer and the drivers."""

    def __init__(self, env: dict[str, str]) -> None:
        self.address = env[HEAD_AT]
        host, _, port = self.address.rpartition(":")
        self._listen = f"{start.resolved(host)}:{port}"
        self.folder = processes.make(Path(folder_of(env[TOKEN])))
        (self.folder / "control").unlink(missing_ok=True)
        self._user, shared = account.find(self.folder, env) if ray_version() else (None, "")
        if self._user is not None:
            self.folder.chmod(0o711)  # its user enters `h` and `d`, and lists nothing here
            if env.get(METADATA) and (why := account.close_metadata(self._user)):
                shared = f"its connections to the cloud's metadata server cannot be refused: {why}"
        shared = shared if env.get(METADATA) else ""  # else hosts are processes of this machine's user anyway
        if shared:
            log.warning("programs in Ray can read the dispatcher's files or credentials: %s", shared)
        self._env = self._environment(env, "h")
        self._dashboard = start.DASHBOARD if start.has_dashboard() and not start.shares_machine(self._listen) else 0
        self.report = RayReport(RayState(False, problem="the head starts"), ray=ray_version(),
                                python=python_version(), dashboard=self._dashboard, shared=shared)
        self.wish = RayWish()
        self._clients: set[asyncio.StreamWriter] = set()
        self._observer: asyncio.subprocess.Process | None = None
        self._over = asyncio.Event()
        self._drivers = Drivers(self._driver_env(env), self._user, self.folder / "d")

    def _environment(self, env: dict[str, str], part: str) -> dict[str, str]:
        """Return the variables of the processes of a part, "h" or "d"."""
        own = {k: v for k, v in env.items() if not k.startswith("SPOTFLEET_") or k in PASSED}
        if self._user is not None:
            own = account.environment(own, self.folder / part / HOME)
        return processes.environment(own, self.folder / part) | AUTH

    def _driver_env(self, env: dict[str, str]) -> dict[str, str]:
        path = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
        return self._environment(env, "d") | {
            "RAY_ADDRESS": self.address, HEAD_AT: self.address, "PATH": path, "PYTHONUNBUFFERED": "1",
            JOB_CONFIG: SHIPPED} | OWN_FIRST

    def _make(self, part: str) -> Path:
        """Make the folder of a part; return the home folder in it, which its user owns."""
        folder = processes.make(self.folder / part)
        home = processes.make(folder / HOME)
        if self._user is not None:
            folder.chmod(0o711)
            self._user.give(home)
        return home

    def _begin(self) -> None:
        if self._user is not None:
            self._user.enter()
        processes.die_with_parent()

    def stop(self) -> None:
        self._over.set()

    async def run(self) -> None:
        """Run until `stop`, a wish to stop, or ORPHAN_S without a dispatcher."""
        await asyncio.to_thread(self._clear)  # what a supervisor that was killed has left
        self._make("d")
        control = self.folder / "control"
        mask = os.umask(0o077)  # no other user may connect: its lines name folders in which commands run
        server = await asyncio.start_unix_server(self._serve, control, limit=MOST_LINE)
        os.umask(mask)
        tasks = [asyncio.create_task(t) for t in (self._keep_head(), self._keep_observer(), self._watch_orphan())]
        over = asyncio.create_task(self._over.wait())
        try:
            done, _ = await asyncio.wait([*tasks, over], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, over):
                task.cancel()
            await asyncio.gather(*tasks, over, return_exceptions=True)
            server.close()
            await asyncio.to_thread(self._clear)
            if self._user is not None:
                await asyncio.to_thread(account.open_metadata, self._user)

    def _clear(self) -> None:
        if self._user is not None:
            self._user.end_all()
        for part in (self.folder / "h", self.folder / "d"):
            processes.end_all(part)
        (self.folder / "control").unlink(missing_ok=True)

    # ---- the dispatcher

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            self._send(writer)
            while line := await reader.readline():
                await self._follow(load(RayWish, line))
        except (ConnectionError, ValueError) as error:
            log.warning("dispatcher: %s", error)
        except asyncio.CancelledError:
            pass  # the server is closed; asyncio would report this as an error of its callback
        finally:
            self._clients.discard(writer)
            writer.close()

    async def _follow(self, wish: RayWish) -> None:
        self.wish = wish
        if wish.stop:
            self.stop()
            return
        self._drivers.match(wish.drivers)
        await self._pass_on()

    async def _pass_on(self) -> None:
        if self._observer is not None and self._observer.stdin is not None:
            with suppress(ConnectionError):
                self._observer.stdin.write(dump(replace(self.wish, drivers=())).encode() + b"\n")
                await self._observer.stdin.drain()

    def _send(self, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(dump(self.report).encode() + b"\n")

    def _note(self, report: RayReport) -> None:
        self.report = report
        for writer in self._clients:
            self._send(writer)

    async def _watch_orphan(self) -> None:
        alone_s = 0.0
        while alone_s < ORPHAN_S:
            await asyncio.sleep(5.0)
            alone_s = 0.0 if self._clients else alone_s + 5.0
        log.warning("no dispatcher for %g s: the Ray head ends", ORPHAN_S)

    # ---- the processes

    async def _keep_head(self) -> None:
        if not self.report.ray:
            self._note(replace(self.report, state=RayState(
                False, problem=f"Ray is not installed on the dispatcher's machine: {install('ray')}")))
            await asyncio.Event().wait()
        env, folder = self._env | start.head_settings(self._listen), self.folder / "h"
        while True:
            home = self._make("h")
            process = await asyncio.create_subprocess_exec(
                *start.head(self._listen, str(home / "r"), self._dashboard), env=env, cwd=home,
                stdin=asyncio.subprocess.DEVNULL, preexec_fn=self._begin)
            self._note(replace(self.report, starts=self.report.starts + 1))
            try:
                status = await process.wait()
            finally:
                await _end(process)
            ended = f"the head's processes ended with status {status} (its log: ray.log in the dispatcher's home)"
            log.warning("%s; it is started anew", ended)
            self._note(replace(self.report, ended=ended, state=RayState(False, problem=f"{ended}; it starts anew")))
            await asyncio.to_thread(processes.end_all, folder)
            await asyncio.sleep(AGAIN_S)

    async def _keep_observer(self) -> None:
        while self.report.ray:
            while not await asyncio.to_thread(processes.answers, self.address):
                await asyncio.sleep(0.2)
            process = self._observer = await asyncio.create_subprocess_exec(
                *OBSERVER, self.address, env=self._env,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MOST_LINE,
                preexec_fn=self._begin)
            assert process.stdout is not None
            try:
                await self._pass_on()
                while line := await asyncio.wait_for(process.stdout.readline(), SILENT_S):
                    try:
                        self._take(load(RayState, line))
                    except ValueError as error:  # a line that Ray printed
                        log.warning("observer: %s", error)
            except TimeoutError:  # its last state is not the cluster's any more
                problem = f"the cluster's observer has been silent for {SILENT_S:g} s, and is started anew"
                self._note(replace(self.report, state=RayState(False, problem=problem)))
            finally:
                await _end(process)
            await asyncio.sleep(AGAIN_S)
        await asyncio.Event().wait()

    def _take(self, state: RayState) -> None:
        head = [node for node in state.nodes if not node.host]
        if state.up and not head:
            state = RayState(False, problem="the head starts")  # its GCS answers, its own raylet has not joined yet
        self._note(replace(self.report, state=state))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def serve() -> None:
    supervisor = HeadSupervisor(dict(os.environ))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
    await supervisor.run()


def main() -> int:
    logging.basicConfig(format="%(asctime)s spotfleet: %(message)s", stream=sys.stdout)
    if "--clear" in sys.argv:  # the cluster has ended: nothing of it is left on this machine
        folder = Path(folder_of(os.environ[TOKEN]))
        account.forget(folder, clouds=bool(os.environ.get(METADATA)))
        processes.end_all(folder)
        return 0
    asyncio.run(serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
