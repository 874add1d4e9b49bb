"""The story that scripts/demo tells, and the promises that it checks. Exits with 1 when one of them is broken.

Everything happens in a temporary SPOTFLEET_HOME, which is gone afterwards with all that ran in it, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from spotfleet.api import Fleet, Job
from spotfleet.protocol.messages import HostStatus
from spotfleet.providers.local import LocalCloud

EXAMPLES = Path(__file__).parent.parent / "examples"
MARK = "DEMO_OF_SPOTFLEET"  # in the environment of all that the demo starts
CLI = (str(Path(sys.executable).with_name("spotfleet")),)
LIMIT_S = 180.0  # for any one thing to happen
REPORT_S = 5.0  # a longer wait is reported
INTERRUPTED = 130  # as in shells
WIDTH = 80
COLOURS = ["\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m"]
BOLD, DIM, GREEN, RED, PLAIN = COLOURS if sys.stdout.isatty() else [""] * len(COLOURS)


class Broken(Exception):
    """The story cannot go on."""


@dataclass(frozen=True)
class Pace:
    epochs: int
    step_delay_s: float
    notice_s: float
    first_trouble: int  # step at which the notice comes


FULL = Pace(epochs=40, step_delay_s=0.04, notice_s=15.0, first_trouble=60)
SHORT = Pace(epochs=24, step_delay_s=0.04, notice_s=8.0, first_trouble=30)


@dataclass
class Stage:
    """One telling: its home, and the promises kept and broken so far."""

    home: Path
    pace: Pace
    began: float = field(default_factory=time.monotonic)
    kept: list[tuple[bool, str]] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"\n{BOLD}[{time.monotonic() - self.began:3.0f} s] {text}{PLAIN}", flush=True)

    def run(self, *command: str) -> None:
        """Show and run `spotfleet COMMAND`."""
        self._show("spotfleet", *command)
        code = subprocess.run([*CLI, *command], cwd=EXAMPLES, stdin=subprocess.DEVNULL,
                              start_new_session=True).returncode  # Ctrl-C ends the story, and the story this
        if code:
            raise Broken(f"`spotfleet {' '.join(command)}` ended with exit status {code}")

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Show and start `spotfleet COMMAND`; its output appears indented as it comes."""
        self._show("spotfleet", *command)
        process = subprocess.Popen([*CLI, *command], cwd=EXAMPLES, text=True, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        threading.Thread(target=_relay, args=(process,), daemon=True).start()
        return process

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        end = time.monotonic() + LIMIT_S
        with self.waiting_for(what):
            while not condition():
                if time.monotonic() > end:
                    raise Broken(f"{what}: not within {LIMIT_S:.0f} s")
                time.sleep(0.25)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Print every few seconds what the body waits for."""
        began, over = time.monotonic(), threading.Event()

        def report() -> None:
            while not over.wait(REPORT_S):
                print(f"    {DIM}{time.monotonic() - began:.0f} s: waiting for {what}{PLAIN}", flush=True)

        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        try:
            yield
        finally:
            over.set()
            reporter.join()

    def promise(self, kept: bool, text: str) -> None:
        self.kept.append((kept, text))

    def _show(self, *command: str) -> None:
        print(f"{DIM}${PLAIN} {' '.join(command)}", flush=True)


def _relay(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    for line in process.stdout:
        print(f"    {line.rstrip()}", flush=True)


# --- the story


def tell(stage: Stage) -> None:
    pace = stage.pace
    stage.say("A fleet: one dispatcher, three spot hosts. Here they are processes; on a cloud they would be machines.")
    stage.run("up", "digits.yaml", "-y")
    fleet = Fleet("demo")
    delay_s = max(pace.step_delay_s, warm(stage, fleet) / 150)
    stage.run("hosts")
    stage.say("Train a small CNN on handwritten digits, on all three.")
    training = stage.start("train", "digits.py", "--np", "2:3", "--epochs", str(pace.epochs),
                           "--step-delay", f"{delay_s:.2f}")
    stage.wait_for("the job", lambda: fleet.jobs() or training.poll() is not None)
    if training.poll() is not None:
        raise Broken("`spotfleet train` has ended before its job began")
    job = fleet.jobs()[0]
    interrupt(stage, fleet, job)
    stage.say("Training goes on to its end.")
    stage.promise(training.wait(LIMIT_S) == 0, "training ended well through a notice and a kill")
    changes(stage, fleet, job)
    stage.say("What it cost so far, at the prices of each moment, against the same hours on demand.")
    stage.run("cost")
    stage.say("Take it all down. The results are copied here first.")
    stage.run("down", "-y")
    bill(stage, fleet)
    weights(stage, next(fleet.home.folder(fleet.name).archive.glob("jobs/*/outputs/*/metrics.json"), None))
    nothing_left(stage, fleet)


def warm(stage: Stage, fleet: Fleet) -> float:
    """Seconds until three hosts have torch in memory. A slow machine replaces hosts slowly: it gets longer steps."""
    began = time.monotonic()
    stage.wait_for("three hosts with torch in memory",
                   lambda: sum(h.state == "up" and not h.why for h in workers(fleet)) == 3)
    return time.monotonic() - began


def workers(fleet: Fleet) -> list[HostStatus]:
    return [h for h in fleet.hosts() if h.role == "worker"]


def up(fleet: Fleet) -> list[str]:
    return [h.host for h in workers(fleet) if h.state == "up"]


def host_of(job: Job, rank: int) -> str:
    return next(w.host for w in job.status().workers if w.rank == rank)


def interrupt(stage: Stage, fleet: Fleet, job: Job) -> None:
    """A notice for one host, then a kill of another, each followed by its replacement."""
    stage.wait_for("the first steps", lambda: past(job, stage.pace.first_trouble))
    first = set(hosts_of(job))
    noticed = host_of(job, 1)
    stage.say(f"The cloud announces that it takes {noticed} in {stage.pace.notice_s:.0f} s.")
    stage.run("chaos", "preempt", noticed, "--notice", f"{stage.pace.notice_s:.0f}")
    stage.wait_for("a replacement", lambda: whole_without(job, noticed))
    print(f"    {', '.join(set(hosts_of(job)) - first)} trains in place of {noticed}", flush=True)
    stage.wait_for(f"the end of {noticed}", lambda: noticed not in [h.host for h in fleet.hosts()])
    killed = host_of(job, 0)
    stage.say(f"Now {killed} dies without a word: the host of rank 0.")
    stage.run("chaos", "kill", killed)
    stage.wait_for("a replacement", lambda: whole_without(job, killed))
    stage.promise({noticed, killed}.isdisjoint(up(fleet)), "both hosts were replaced while training went on")


def hosts_of(job: Job) -> list[str]:
    """The hosts that train now."""
    return [w.host for w in job.status().workers if w.rank >= 0]


def past(job: Job, step: int) -> bool:
    """Has the job trained so far? Raises Broken if it has ended."""
    status = job.status()
    if job.state.ended:
        raise Broken(f"the job has ended too early: {status.state}, {status.why} {status.error}")
    return status.version >= step


def whole_without(job: Job, host: str) -> bool:
    """Do three workers train, none of them on `host`?"""
    past(job, 0)
    status = job.status()
    return status.state == "running" and status.world_size == 3 and host not in hosts_of(job)


def changes(stage: Stage, fleet: Fleet, job: Job) -> None:
    """Print what each change of the membership cost, and check it."""
    stage.say("What each interruption cost:")
    events = [e for e in fleet.events() if e.get("job") == job.id]
    resumed = {e["generation"]: e for e in events if e["kind"] == "JobResumed"}
    repeated: dict[str, int] = {}
    print(f"    {'workers':>7}  {'at step':>7}  {'repeated':>8}  {'pause':>8}  cause")
    for event in (e for e in events if e["kind"] == "GenerationFormed"):
        after: dict[str, Any] = resumed.get(event["generation"], {"repeated": 0, "pause_s": 0.0})
        repeated[event["cause"]] = repeated.get(event["cause"], 0) + after["repeated"]
        row = (f"    {len(event['members']):>7}  {event['version']:>7}  {after['repeated']:>8}  "
               f"{after['pause_s'] * 1000:>5.0f} ms  ")
        print("\n".join(textwrap.wrap(f"{event['cause']}: {event['why']}", WIDTH, initial_indent=row,
                                      subsequent_indent=" " * len(row), break_on_hyphens=False)))
    stage.promise(repeated.get("notice", -1) == 0, "the notice repeated no step")
    lost = repeated.get("death", -1)
    stage.promise(0 <= lost <= 1, f"the kill repeated {lost} steps that had been made")
    stage.promise(sum(repeated.values()) == max(lost, 0), "nothing else repeated a step")


# --- the promises


def bill(stage: Stage, fleet: Fleet) -> None:
    """Our report, from the ledger alone, against the emulated cloud's own invoice."""
    cost, cloud = fleet.cost(), LocalCloud(stage.home)
    invoice = cloud.invoice(fleet.name)
    ours, theirs = f"${cost.micros / 1e6:.6f}", f"${invoice.micros / 1e6:.6f}"
    stage.promise(ours == theirs, f"our final bill, {ours} (hosts cost money until `down` had ended them), is the "
                                  f"cloud's invoice, {theirs}")
    stage.promise(cost.micros < cost.on_demand_micros, f"spot saved {cost.savings_percent:.0f} % against on demand")
    stage.promise(not cloud.truth(), "the cloud has no machine of ours")


def weights(stage: Stage, found: Path | None) -> None:
    """The model that came home against a run in plain torch.distributed that nobody interrupted."""
    if found is None:
        stage.promise(False, "the job's output came home with `down`")
        return
    metrics = json.loads(found.read_text())
    stage.say("Replay the same samples at the same world sizes in plain torch.distributed, without any trouble.")
    print(f"{DIM}${PLAIN} python reference_digits.py metrics.json", flush=True)
    with stage.waiting_for(f"the {metrics['steps']} steps of the replay"):
        done = subprocess.run([sys.executable, "reference_digits.py", str(found)], cwd=EXAMPLES, capture_output=True,
                              text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, start_new_session=True)
    if done.returncode:
        raise Broken(f"the reference run failed: {done.stderr.strip()}")
    reference = json.loads(done.stdout)
    print(f"    world sizes {metrics['worlds']} over {metrics['steps']} steps")
    for name, run in (("spotfleet", metrics), ("reference", reference)):
        print(f"    {name}  accuracy {run['accuracy']:.4f}  sha256 {run['sha256'][:32]} ...")
    sizes = [size for _, size in metrics["worlds"]]
    stage.promise(sizes[0] == sizes[-1] == 3 and 2 in sizes, "two workers went on while the killed host was replaced")
    stage.promise(metrics["accuracy"] >= 0.97, f"test accuracy {metrics['accuracy']:.2%}, at least 97 %")
    stage.promise(metrics["sha256"] == reference["sha256"], "the weights equal the reference run's, bit for bit")


def nothing_left(stage: Stage, fleet: Fleet) -> None:
    stage.promise(not fleet.hosts(), "`spotfleet status` lists nothing of the fleet")
    _, alive = psutil.wait_procs(processes(), timeout=20)
    stage.promise(not alive, "no process is left" + (f": {[p.cmdline() for p in alive]}" if alive else ""))


def processes() -> list[psutil.Process]:
    """Everything the demo has started, at any remove, that still runs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]:
                found.append(process)
        except psutil.Error:
            continue  # ended meanwhile, or not ours to look into
    return found


@contextmanager
def stage(pace: Pace) -> Iterator[Stage]:
    """A home of its own, and nothing of it left afterwards, however the story ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell in the background ignores it
    with tempfile.TemporaryDirectory(prefix="spotfleet-demo-", ignore_cleanup_errors=True) as name:
        os.environ |= {"SPOTFLEET_HOME": name, "SPOTFLEET_LOCAL_OWNER_PID": str(os.getpid()), "OMP_NUM_THREADS": "1",
                       MARK: uuid.uuid4().hex}
        try:
            yield Stage(Path(name), pace)
        finally:
            LocalCloud(name).shutdown()
            _, alive = psutil.wait_procs(processes(), timeout=3)
            for process in alive:
                process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="less training, for CI")
    pace = SHORT if parser.parse_args(arguments).short else FULL
    with stage(pace) as told:
        try:
            tell(told)
        except Broken as problem:
            told.promise(False, str(problem))
        except KeyboardInterrupt:
            told.say("Interrupted: the demo, its fleet and its job are being taken down.")
            return INTERRUPTED
    told.say("The promises:")
    for kept, text in told.kept:
        word = f"{GREEN}kept  {PLAIN}" if kept else f"{RED}BROKEN{PLAIN}"
        print("\n".join(textwrap.wrap(text, WIDTH, initial_indent=f"    {word} ", subsequent_indent=" " * 11,
                                      break_on_hyphens=False)))
    print("\nAll of this ran in a temporary folder that is gone now, with its fleet and the results named above.")
    print('To train something of your own, go on with "Install" in README.md.')
    return 0 if all(kept for kept, _ in told.kept) else 1


if __name__ == "__main__":
    sys.exit(main())
