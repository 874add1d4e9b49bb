"""Life cycle of one worker on this host, from its order to the report of its end.

    preparing --launch, bundle, setup, slot free--> forking --pid--> running --waitpid--> delivering --> ended
        '--- unlisted ---> delivering                '-- unlisted: SIGTERM, later SIGKILL ---------'

SIGKILL follows after KILL_S; in a job that is started anew at each change, after its `grace_s`. In a gang (`gang.py`)
the worker also waits for its place before it forks.

`delivering` sends the rest of the log and the output folder (and, if the script is done, its checkpoint), so that a
reported end is complete. Its time with a reachable dispatcher is limited: see `_within`. After it the end is reported,
so that the job need not wait, and what is left is sent for as long as the host stays; its reports list it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spotfleet.agent import disk
from spotfleet.agent.containers.container import PACKAGES, ContainerFailed, JobContainer
from spotfleet.agent.containers.host_containers import Containers, without_login
from spotfleet.agent.files.bundles import Bundles, PreparedLaunch, folder_name
from spotfleet.agent.files.checkpoint_folder import CheckpointFolder
from spotfleet.agent.files.outputs import OutputShipper
from spotfleet.agent.files.setup import SetupContext, SetupError, Setups
from spotfleet.agent.files.uploads import CheckpointShipper, LogShipper
from spotfleet.agent.processes.child import ChildSpec, WorkerResult, needs_fresh_interpreter, read_result
from spotfleet.agent.processes.env import WorkerPaths, container_env, gang_env, host_env, user_env, worker_env
from spotfleet.agent.processes.zygote_client import ForkedProcess, Processes
from spotfleet.agent.transfer import Transfers
from spotfleet.agent.workers.gang import ReservedPort, command_of, place_in
from spotfleet.agent.workers.liveness import DUMP_S, HANGS_S, Liveness, state_of
from spotfleet.agent.workers.versions import python_version, ray_version
from spotfleet.errors import SpotfleetError, is_full
from spotfleet.model import RAY_KIND
from spotfleet.protocol.messages import (
    Exit,
    SlotOrder,
    Stage,
    StepCost,
    Unsent,
    WorkerReport,
    WorkerState,
)
from spotfleet.protocol.ray_cluster import VERSIONS, mismatch

log = logging.getLogger("spotfleet.agent")

KILL_S = 3.0
_LAST_REPORT_S = 2.0  # its last reports may still be in the socket when waitpid returns
SIGNALLED = 128  # a shell adds it to the number of the signal that ended a command
_DONE_S, _FAILED_S, _KILLED_S = 60.0, 10.0, 1.0


@dataclass(frozen=True)
class HostContext:
    """Objects and callbacks that all workers of this host share."""

    home: Path
    transfers: Transfers
    zygote: Processes
    bundles: Bundles
    setups: Setups
    checkpoints: CheckpointShipper
    changed: Callable[[], None]
    connected: Callable[[], bool]
    socket: Callable[[], str]
    address: Callable[[], str]
    noticed: Callable[[], bool] = lambda: False  # the cloud is about to take this host
    slots: int = 1
    containers: Containers | None = None  # None: jobs with an image cannot run


class AgentWorker:
    """One worker: its order, process, last report and exit."""

    def __init__(self, host: HostContext, order: SlotOrder, slot_free: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._order, self._reordered = order, asyncio.Event()
        self.report = WorkerReport(order.worker, order.job)
        self.process: ForkedProcess | None = None
        self.exit: Exit | None = None
        self.why = ""
        self.left_slot = asyncio.Event()  # its process has ended, or will never start
        self._host = host
        self._processes = host.zygote  # or the job's container, once it is up
        self._slot_free = slot_free
        self._folder = host.bundles.folder(order.job) / "workers" / folder_name(order.worker)
        self._preparing: asyncio.Task[ForkedProcess] | None = None
        self._liveness = Liveness()
        self._ending = False
        self._grace_s = KILL_S  # from SIGTERM to SIGKILL
        self._gang = False
        self._port: ReservedPort | None = None
        self._checkpoints: CheckpointFolder | None = None
        self._following: asyncio.Task[None] | None = None
        self._led = 0  # generation in which it is rank 0
        self._shell = False  # its process runs a shell command
        self._disk_problem = ""  # why this host's full disk ends it
        self._silent = asyncio.Event()  # no connection of its process is open
        self._silent.set()
        self.outputs = OutputShipper(host.transfers, order.job, order.worker, self.place.output, host.noticed,
                                     lambda text: self._append_log(f"spotfleet: {text}\n"))
        self.stored = False  # a copy of its output and log is in the checkpoint target
        self._log: LogShipper | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._live(), name=f"worker {order.worker}")

    @property
    def order(self) -> SlotOrder:
        return self._order

    @order.setter
    def order(self, order: SlotOrder) -> None:
        self._order = order
        self._reordered.set()
        self._follow_checkpoints()

    @property
    def state(self) -> WorkerState:
        pid = self.process.pid if self.process else 0
        state = state_of(pid) if pid else ""
        pid = 0 if state == "Z" else pid  # ended; the zygote reports the status, unless it is stopped, too
        return WorkerState(self._liveness.corrected(self.report), self.order.slot, pid, self.exit,
                           stopped=state in ("T", "t"), quiet_s=self._liveness.quiet_s if pid else 0.0)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do for this worker."""
        return self._task.done()

    @property
    def folder(self) -> Path:
        return self._folder

    def unsent(self) -> list[Unsent]:
        """Return what has not arrived at the dispatcher, once the process has ended."""
        if not self.left_slot.is_set() or self._task.done():
            return []
        job, worker, left = self.order.job, self.order.worker, []
        if self._collecting is not None and not self._collecting.done():
            left.append(Unsent(job, "output", self.outputs.left, self.outputs.sent, worker, self.stored))
        if self._log is not None and self._log.left:
            left.append(Unsent(job, "log", self._log.left, self._log.sent, worker, self.stored))
        return left

    @property
    def place(self) -> WorkerPaths:
        return WorkerPaths(self.order.worker, self.order.job, self.order.local_rank, self._host.address(),
                     self._host.socket(), self._folder)

    def receive(self, report: WorkerReport) -> None:
        """Take a report of the process."""
        self._liveness.record(report)
        if self.left_slot.is_set():  # sent before its end and read after it: the result's errors stay
            report = replace(report, error=self.report.error, blame_peer=self.report.blame_peer,
                             blame_host=self.report.blame_host)
        if self.exit is not None or report == self.report or self._gang:  # a gang's state is the agent's to report
            return
        urgent = _news(report) != _news(self.report)
        self.report = report
        self.offer_checkpoint()
        if urgent:  # progress alone can wait for the next period
            self._host.changed()

    async def session(self) -> int:
        """Return the session id, which is the pid, of its process; 0 without a process.

        A process that has just been forked may connect before the zygote's message with its pid is read, so this
        waits for a process that is prepared.
        """
        if self._preparing is not None:
            await asyncio.wait([self._preparing])
        return self.process.pid if self.process else 0

    def offer_checkpoint(self) -> None:
        """Offer the newest checkpoint that it has written for upload, unless that is done."""
        if self.report.checkpoint is not None:
            uploads = self._folder.parent.parent / "uploads"
            self._host.checkpoints.offer(self.order.job, self.report.checkpoint, uploads, self.order.mounted)

    def attached(self, *, yes: bool) -> None:
        """Record whether a connection of its process is open."""
        (self._silent.clear if yes else self._silent.set)()

    def end(self, kill_s: float | None = None) -> None:
        """Ask the process to end, and kill it after `kill_s`; by default after the job's own time."""
        if self._ending:
            return
        self._ending = True
        if self._preparing is not None and not self._preparing.done():
            self._preparing.cancel()
        if self.process is not None:
            self._ask_to_end()
        kill_s = self._grace_s if kill_s is None else kill_s
        asyncio.get_running_loop().call_later(kill_s, self._kill, signal.SIGKILL)

    def _ask_to_end(self) -> None:
        """Send SIGTERM; a process that hangs first dumps its stacks into its log (see child.py)."""
        if self._liveness.quiet_s < HANGS_S:
            self._kill(signal.SIGTERM)
            return
        self._append_log(f"spotfleet: no step for {self._liveness.quiet_s:.0f} s; its stacks:\n")
        self._kill(signal.SIGUSR2)
        asyncio.get_running_loop().call_later(DUMP_S, self._kill, signal.SIGTERM)

    def _kill(self, signum: int) -> None:
        self._processes.kill(self.order.worker, signum)

    def blame_host(self, why: str) -> None:
        """End the process and report this host as the reason."""
        self._disk_problem = self._disk_problem or why
        self.end()

    async def ended(self) -> None:
        """Wait until its end is delivered; never raises."""
        await asyncio.wait([self._task])

    def discard(self) -> None:
        """Cancel all transfers and remove its folder."""
        self._task.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _live(self) -> None:
        shipper = self._log = LogShipper(self._host.transfers, self.order.job, self.order.worker, self.place.log)
        shipping = asyncio.create_task(shipper.run())
        collecting = self._collecting = asyncio.create_task(self.outputs.run())
        try:
            code, result = await self._run()
            self._last_report(result)
            if _is_reported(result):
                collecting.add_done_callback(lambda _: shipper.complete())  # its last lines are about the output
            else:
                shipper.complete()
            self.outputs.complete()
            await self._deliver(code, result, shipping, collecting)
        except Exception as error:  # our own bug must not leave a slot without a reported end
            log.exception("worker %s", self.order.worker)
            self.exit = Exit(1)
            self._last_report(WorkerResult(error=f"spotfleet agent: {error!r}"))
        finally:
            shipping.cancel()
            collecting.cancel()
            if self._following is not None:
                self._following.cancel()

    async def _run(self) -> tuple[int, WorkerResult]:
        """Run the worker; return its exit status, or minus the signal, and the script's result."""
        self._preparing = asyncio.create_task(self._prepare())
        try:
            self.process = await self._preparing
            self.why = ""
            self._follow_checkpoints()
            if self._ending:
                self._kill(signal.SIGTERM)
            self._host.changed()
            code = await self.process.ended
            await asyncio.wait([asyncio.ensure_future(self._silent.wait())], timeout=_LAST_REPORT_S)
            return code, self._with_disk_blame(code, read_result(self.place.exit_file))
        except (SpotfleetError, OSError, ValueError) as error:
            if isinstance(error, SetupError):
                self.report = replace(self.report, setup_tries=error.tries, setup_sure=error.sure)
            if isinstance(error, ContainerFailed) and self._host.containers is not None:
                tries = self._host.containers.count_failure(self.order.job, error)
                self.report = replace(self.report, setup_tries=tries, setup_sure=error.sure)
            self._append_log(f"spotfleet: {error}\n")
            return 1, self._with_disk_blame(1, WorkerResult(error=str(error), blame_host=is_full(error)))
        except asyncio.CancelledError:
            if not self._preparing.cancelled() or not self._ending:
                raise
            return -signal.SIGTERM, WorkerResult()
        finally:
            self.why = ""
            self.process = None
            if self._port is not None:
                self._port.close()
            self.left_slot.set()

    def _with_disk_blame(self, code: int, result: WorkerResult) -> WorkerResult:
        """Blame the host for a failure with a full disk, on which a script cannot even print."""
        if self._disk_problem and not result.done:
            return replace(result, error=self._disk_problem, blame_host=True)
        full = "" if result.done or code <= 0 else disk.why(self._host.home)
        if not (full or result.blame_host):
            return result
        return replace(result, error="\n".join(filter(None, [result.error, full])), blame_host=True)

    async def _prepare(self) -> ForkedProcess:
        job = self.order.job
        for folder in (self._folder, self.place.work, self.place.output):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._set_why("fetching the job's files")
        prepared = await self._host.bundles.prepare(job, self._set_why)
        container = await self._enter(prepared)
        source, spec = str(prepared.source), prepared.launch.spec
        env = await self._set_up(prepared, container)
        self._set_why("waiting for the slot's last process to end")
        await self._slot_free()
        generation = 0
        if spec.restarts:
            self._grace_s, self._gang = spec.grace_s, spec.gang
            generation = await self._join(prepared, env)
        elif spec.kind == RAY_KIND:
            self._grace_s = spec.grace_s  # to remove what its raylet has left
        self._set_why("starting")
        self._shell = not spec.argv
        argv, run = command_of(spec, self.order.gang.saved if self.order.gang is not None else "")
        process = await self._processes.spawn(ChildSpec(
            self.order.worker, source, str(self.place.log), env, argv=argv, run=run,
            exit_file=str(self.place.exit_file), fresh=needs_fresh_interpreter(user_env(prepared.launch))))
        self.report = replace(self.report, generation=max(generation, self.report.generation))
        return process

    async def _enter(self, prepared: PreparedLaunch) -> JobContainer | None:
        """Return the job's container, in which its processes are started from now on; None for a job without one."""
        if not prepared.launch.spec.container.image:
            return None
        assert self._host.containers is not None
        folder = self._host.bundles.folder(self.order.job)
        self._processes = container = await self._host.containers.enter(prepared, folder, self._set_why)
        return container

    async def _set_up(self, prepared: PreparedLaunch, container: JobContainer | None) -> dict[str, str]:
        """Run the job's setup, unless it is done here; return the environment of its processes."""
        job, launch, own = self.order.job, prepared.launch, dict(os.environ)
        host, folder = self.order.worker.split("/")[0], self._host.bundles.folder(job)
        outside = worker_env(host_env(own), launch, self.place)
        if container is None:
            context = SetupContext(host, job, folder, prepared.source, outside, self._processes)
            await self._host.setups.done(context, launch.spec, self._set_why)
            if launch.spec.kind == RAY_KIND and (
                    why := mismatch(outside.get(VERSIONS, ""), ray_version(), python_version(), host)):
                raise self._host.setups.unfit(job, why)
            return outside
        env = without_login(worker_env(container_env(container.environ, own), launch, self.place, PACKAGES))
        context = SetupContext(host, job, folder, prepared.source, env, self._processes, outside, container.name,
                               container.bash)
        await self._host.setups.done(context, launch.spec, self._set_why)
        await container.require(script=False, torch=bool(launch.spec.argv) and launch.spec.kind_of == "elastic")
        return env

    async def _join(self, prepared: PreparedLaunch, env: dict[str, str]) -> int:
        """Wait until the process may start, and fetch the job's checkpoint folder; add to `env`. Return the generation
        in which a gang's process starts; 0 in a job whose processes enter one by themselves."""
        if self._gang:
            self._port = ReservedPort(self._host.address())
            self.report = replace(self.report, stage=Stage.READY, store=self._port.store)
            self._set_why("ready; waits for the job's other workers")
        while (place := place_in(self.order, self._host.slots)) is None and (self._gang or self.order.gang is None):
            self._reordered.clear()
            await self._reordered.wait()
        gang = self.order.gang
        assert gang is not None
        self._checkpoints = self._host.bundles.checkpoints(self.order.job, prepared)
        await self._checkpoints.fetch(gang.restarts, gang.saved, self._set_why)
        env.update(SPOTFLEET_CHECKPOINT_DIR=str(self._checkpoints.folder), RESTART_COUNT=str(gang.restarts))
        if not self._gang or place is None:
            return 0
        env.update(gang_env(prepared.launch, place))
        return place.assignment.generation

    def _follow_checkpoints(self) -> None:
        """Send the checkpoint folder from the host of rank 0, while its process runs."""
        assignment = self.order.orders.assignment
        if self._checkpoints is None or self._following is not None or assignment is None or assignment.rank != 0 \
                or self.process is None:
            return
        self._led = assignment.generation
        self._following = asyncio.create_task(
            self._checkpoints.follow(self.order.worker, assignment.generation, self._remark))

    async def _finish_checkpoints(self, code: int, result: WorkerResult) -> None:
        """Send the rest of the checkpoint folder, before the process's end is reported."""
        if self._following is None or self._checkpoints is None:
            return
        self._following.cancel()
        await asyncio.wait([self._following])
        killed = code < 0 or (self._shell and code >= SIGNALLED)
        self._set_why("sending its checkpoints")
        finishing = asyncio.ensure_future(
            self._checkpoints.finish(self.order.worker, self._led, self._remark, killed=killed))
        try:
            await self._within(_DONE_S, finishing, longer=True)
        finally:
            finishing.cancel()

    def _remark(self, text: str) -> None:
        self._append_log(f"spotfleet: {text}\n")

    def _last_report(self, result: WorkerResult) -> None:
        self.report = replace(self.report, error=result.error or self.report.error,
                              blame_peer=result.blame_peer or self.report.blame_peer,
                              blame_host=result.blame_host or self.report.blame_host)
        self._host.changed()

    async def _deliver(self, code: int, result: WorkerResult, shipping: asyncio.Task[None],
                       collecting: asyncio.Task[None]) -> None:
        """Send the rest, then report the end; for a killed worker only the log is waited for."""
        await self._finish_checkpoints(code, result)
        settled = [self._host.checkpoints.settled(self.order.job)] if result.done else []
        rest = asyncio.gather(shipping, collecting, *settled)
        if _is_reported(result):
            self._set_why("sending what it left")
            await self._within(_DONE_S if result.done else _FAILED_S, rest, longer=True)
            self.why = ""
        else:
            await self._within(_KILLED_S, shipping)
        asked_to_leave = (self._ending or self.order.orders.stop) and self.report.stage is not Stage.FINISHED
        self.exit = Exit(code, result.done and not asked_to_leave)
        log.info("worker %s ended: %s", self.order.worker, self.exit)
        self._host.changed()
        try:
            await asyncio.wait([rest])
            if not rest.cancelled() and (error := rest.exception()):
                log.error("worker %s: what it left could not be delivered: %s", self.order.worker, error)
        finally:
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)

    async def _within(self, bound_s: float, work: asyncio.Future[Any], *, longer: bool = False) -> None:
        """Wait for `work`, at most `bound_s`; only time in which the dispatcher can be reached counts.

        With `longer` the limit starts again whenever some output has arrived: the output may be large.
        """
        left_s, step_s, sent = bound_s, 0.1, self._sent
        while left_s > 0:
            if longer and sent != self._sent:
                left_s, sent = bound_s, self._sent
            done, _ = await asyncio.wait([work], timeout=step_s)
            if done:
                if not work.cancelled() and (error := work.exception()):
                    log.error("worker %s: what it left could not be delivered: %s", self.order.worker, error)
                return
            left_s -= step_s if self._host.connected() else 0.0
        log.error("worker %s: not all it left was delivered within %.0f s", self.order.worker, bound_s)

    @property
    def _sent(self) -> int:
        """A number that grows as output and checkpoints arrive."""
        return self.outputs.sent + (self._checkpoints.sent if self._checkpoints is not None else 0)

    def _set_why(self, why: str) -> None:
        self.why = why
        self._host.changed()

    def _append_log(self, text: str) -> None:
        try:
            with self.place.log.open("a") as file:
                file.write(text)
        except OSError as error:  # the end is reported anyway
            log.warning("log of %s: %s", self.order.worker, error)


def _is_reported(result: WorkerResult) -> bool:
    """Return whether the script itself has reported how it ended."""
    return result.done or bool(result.error)


def _news(report: WorkerReport) -> WorkerReport:
    """Return the report without the fields that can wait for the next period."""
    return replace(report, version=0, step_s=0.0, waits=False, fetched=0, cost=StepCost(),
                   outside=min(report.outside, 1))
