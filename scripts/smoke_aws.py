"""What scripts/smoke-aws runs: a tiny fleet on AWS from check to leaks, with a real interruption notice in between.

    check --> plan and its price --> up --> train --> notice (AWS FIS) --> replacement, training goes on --> cost
         `---- whatever goes wrong, Ctrl-C, --max-usd reached ----------------------------------------> down --> leaks

Money: the machines' own prices since `up` began, disks and addresses at list prices, and what FIS takes; when that
estimate reaches --max-usd, the fleet goes down at once. It is an estimate: AWS's bill is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import boto3
import smoke_notice
from botocore.exceptions import BotoCoreError, ClientError
from smoke_file import prepared
from smoke_notice import Notices
from smoke_parts import PARTS, Part, table
from smoke_report import Report

from spotfleet import Fleet, __version__
from spotfleet.errors import SpotfleetError
from spotfleet.providers.aws.mapping import names

BESIDES_USD_H = 0.04  # 110 GiB of gp3, three public addresses
UP_S, TRAIN_S, NOTICE_S, REPLACED_S, DOWN_S, QUICK_S = 1800.0, 900.0, 300.0, 1500.0, 900.0, 120.0
POLL_S = 5.0
STEPS = 20  # that show that training goes on
VERIFY = """to be sure that nothing is left, and nothing billed:
  spotfleet down {name} -y                       (again, until it says that nothing is left)
  spotfleet leaks --all-regions --fix
  aws ec2 describe-instances --region {region} --filters "Name=tag:{tag},Values={lives}" \
--query 'Reservations[].Instances[].[InstanceId,State.Name]'"""


class Stopped(Exception):
    """It goes no further, and why."""


# What may go wrong on the way; botocore's errors are Exceptions without a common base but these two.
FAILURES = (Stopped, SpotfleetError, ClientError, BotoCoreError, LookupError, ValueError, OSError,
            subprocess.SubprocessError)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass
class Smoke:
    name: str
    region: str
    max_usd: float
    folder: Path  # folder of fleet file and script
    report: Report
    session: Any  # boto3.Session
    role: str = ""  # role for FIS; empty: made
    fis: bool = True
    poll_s: float = POLL_S
    command: Sequence[str] = (sys.executable, "-m", "spotfleet.cli")
    part: Part = PARTS["basic"]
    price_usd_h: Callable[[Path], float] | None = None  # price of the machines; None: the plan's
    cloud: str = "aws"
    title: str = "AWS"
    notice_usd: float = smoke_notice.USD
    besides_usd_h: float = BESIDES_USD_H
    usd_h: float = 0.0
    begun: float | None = None  # `up`, on the monotonic clock
    extra_usd: float = 0.0
    closing: bool = False
    measured: dict[str, float] = field(default_factory=dict)

    # ---- money

    @property
    def spent_usd(self) -> float:
        hours = (time.monotonic() - self.begun) / 3600 if self.begun is not None else 0.0
        return hours * (self.usd_h + self.besides_usd_h) + self.extra_usd

    def afford(self) -> None:
        """Raises Stopped once the estimate has reached the limit."""
        if not self.closing and self.spent_usd >= self.max_usd:
            raise Stopped(f"the estimate has reached --max-usd {self.max_usd:g}: ${self.spent_usd:.2f}")

    # ---- the way

    def run(self) -> None:
        file = self.folder / "fleet.yaml"
        self.report.note(file.read_text())
        with self.report.step("check"):
            self.cli("check", self.cloud, str(file))
        with self.report.step("plan"):
            self._plan(file)
        self.begun = time.monotonic()
        with self.report.step("up"):
            self.cli("up", str(file), "-y", "--timeout", f"{UP_S:.0f}s", limit_s=UP_S + 60)
        with self.report.step("train"):
            self.cli("train", "digits.py", "--np", "1:2", "-d", "-c", self.name, "--", "--epochs", "100000",
                     "--step-delay", "0.2")
            self.until("two workers train", lambda s: self.trains(s, 2), TRAIN_S)
        if self.part.proof is not None:
            with self.report.step(self.part.about):
                self.part.proof(self)
        else:
            with self.report.step("interruption notice" if self.fis else "loss without a notice (--no-fis)"):
                self._lose_one()
        with self.report.step("cost"):
            self.cli("cost", self.name)
        with self.report.step("cancel"):
            self.cli("cancel", _job(self.status())["job"], "-c", self.name)

    def _plan(self, file: Path) -> None:
        self.usd_h = (self.price_usd_h or _planned)(file)
        hours = self.part.minutes / 60
        expected = hours * (self.usd_h + self.besides_usd_h) + (self.notice_usd if self.fis and self.part.fis else 0.0)
        self.report.say(f"machines ${self.usd_h:.4f}/h; all of it about {self.part.minutes} minutes and "
                        f"${expected:.2f}, stopped at ${self.max_usd:.2f}")
        if expected > self.max_usd:
            raise Stopped(f"about ${expected:.2f} are expected: give --max-usd {expected * 1.5:.1f}, or another --type")

    def _lose_one(self) -> None:
        """A host hears that it goes, another one comes, and training goes on with two."""
        before = self.status()
        victim = next(h for h in before["hosts"] if h["role"] == "worker")["host"]
        instance, fleet = self._instance(victim)
        began = time.monotonic()
        if self.fis:
            notices = Notices(self.session, self.region, fleet, self.report.say, self.role, self.poll_s)
            try:
                self.extra_usd += smoke_notice.USD
                self.report.say(f"FIS experiment {notices.send(instance)} interrupts {instance}, host {victim}")
                self._replaced(victim, before, began)
            finally:
                for trouble in notices.close():
                    self.report.failed.append(trouble)
                    self.report.say(trouble)
        else:
            self.cli("chaos", "kill", victim, "-c", self.name)
            self._replaced(victim, before, began)

    def _replaced(self, victim: str, before: dict[str, Any], began: float) -> None:
        if self.fis:
            self.until(f"{victim} hears the notice", lambda s: _noticed(s, victim), NOTICE_S)
            self.measure("until the notice was heard", began)
        self.until(f"{victim} is gone", lambda s: victim not in [h["host"] for h in s["hosts"]], REPLACED_S)
        self.measure("until the host was gone", began)
        steps = _job(self.status())["version"]
        self.report.say(f"step {_job(before)['version']} before, {steps} when it was gone")
        self.until("a replacement trains too", lambda s: self.trains(s, 2, steps), REPLACED_S)
        self.measure("until its replacement trained", began)
        self.report.say(f"{_job(self.status())['repeated']} steps were repeated")

    def measure(self, what: str, began: float) -> None:
        self.measured[what] = time.monotonic() - began
        self.report.say(f"{self.measured[what]:.0f} s {what}")

    def _instance(self, host: str) -> tuple[str, str]:
        """Its id, and its fleet as the cloud knows it."""
        found = self.session.client("ec2", region_name=self.region).describe_instances(Filters=[
            {"Name": f"tag:{names.HOST}", "Values": [host]}, {"Name": "instance-state-name", "Values": ["running"]}])
        instances = [i for r in found["Reservations"] for i in r["Instances"]]
        if not instances or instances[0].get("InstanceLifecycle") != "spot":
            raise Stopped(f"{host} is no running spot instance: {instances}")
        return instances[0]["InstanceId"], next(t["Value"] for t in instances[0]["Tags"] if t["Key"] == names.FLEET)

    # ---- the end

    def clean_up(self) -> bool:
        """Nothing is left: told, and true; or how to see to it."""
        self.closing = True
        if self.begun is None:
            self.report.say("nothing was launched")
            return True
        self._keep()
        try:
            with self.report.step("down"):
                self.cli("down", self.name, "-y", "--discard", limit_s=DOWN_S)
            with self.report.step("leaks"):
                self.cli("leaks", "-o", "json", ok=False)
                if left := self._left():
                    raise Stopped(f"{self.title} still lists {', '.join(left)}")
                self.report.say(f"{self.title} lists nothing of the fleet any more")
        except FAILURES as error:
            self.report.say(f"THE FLEET MAY NOT BE GONE: {error}")
            self.report.say(self.verify())
            return False
        return True

    def verify(self) -> str:
        """Return the commands that show whether anything is left."""
        return VERIFY.format(name=self.name, lives=f"{self.name},{names.any_life(self.name)}", region=self.region,
                             tag=names.FLEET)

    def _keep(self) -> None:
        """What happened, for the report."""
        for words in (["status", self.name], ["events", self.name], ["cost", self.name, "-o", "json"]):
            try:
                done = self.cli(*words, ok=False, shown=False)
                self.report.note(done.out + done.err)
            except FAILURES as error:
                self.report.note(str(error))

    def _left(self) -> list[str]:
        """By AWS's own word, not by ours."""
        ec2 = self.session.client("ec2", region_name=self.region)
        of_ours = [{"Name": f"tag:{names.FLEET}", "Values": [self.name, names.any_life(self.name)]}]
        left = [i["InstanceId"] for r in ec2.describe_instances(Filters=of_ours)["Reservations"]
                for i in r["Instances"] if i["State"]["Name"] != "terminated"]
        left += [r["SpotInstanceRequestId"] for r in ec2.describe_spot_instance_requests(Filters=of_ours)[
            "SpotInstanceRequests"] if r["State"] in ("open", "active", "disabled")]
        for ask, key, name in ((ec2.describe_security_groups, "SecurityGroups", "GroupId"),
                               (ec2.describe_volumes, "Volumes", "VolumeId"),
                               (ec2.describe_launch_templates, "LaunchTemplates", "LaunchTemplateId")):
            left += [thing[name] for thing in ask(Filters=of_ours)[key]]
        return left

    # ---- asking

    def status(self) -> dict[str, Any]:
        return json.loads(self.cli("status", self.name, "-o", "json", shown=False).out)

    def until(self, what: str, true: Callable[[dict[str, Any]], bool], limit_s: float) -> None:
        """Look at the fleet until `true`. Raises Stopped when that takes too long, or too much money."""
        deadline, shown = time.monotonic() + limit_s, ""
        while not true(status := self.status()):
            if (line := _short(status)) != shown:
                self.report.say(f"  {line}")
                shown = line
            if time.monotonic() > deadline:
                raise Stopped(f"not within {limit_s:.0f} s: {what}")
            self.afford()
            time.sleep(self.poll_s)
        self.report.say(f"  {what}: {_short(status)}")

    @staticmethod
    def trains(status: dict[str, Any], workers: int, since: int = 0) -> bool:
        jobs = status["jobs"]
        if jobs and jobs[-1]["state"] in ("failed", "cancelled"):
            raise Stopped(f"the job {jobs[-1]['state']}: {jobs[-1]['why']}: {jobs[-1]['error'][-2000:]}")
        return bool(jobs) and jobs[-1]["world_size"] == workers and jobs[-1]["version"] >= since + STEPS

    def cli(self, *words: str, ok: bool = True, shown: bool = True, limit_s: float = QUICK_S) -> Done:
        """One command of spotfleet, seen by the user and written down. It is ended when the money is."""
        if shown:
            self.report.say(f"$ spotfleet {' '.join(words)}")
        deadline = time.monotonic() + limit_s
        with subprocess.Popen([*self.command, *words], cwd=self.folder, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
            with _read(process.stdout, self.report, shown) as out, _read(process.stderr, self.report, shown) as err:
                try:
                    while (code := process.poll()) is None:
                        self.afford()
                        if time.monotonic() > deadline:
                            raise Stopped(f"`spotfleet {words[0]}` took longer than {limit_s:.0f} s")
                        time.sleep(0.05)
                except BaseException:
                    process.send_signal(signal.SIGINT)
                    process.wait(60)
                    raise
        done = Done(code, "".join(out), "".join(err))
        if ok and code:
            raise Stopped(f"`spotfleet {' '.join(words)}` ended with {code}: {done.err.strip() or done.out.strip()}")
        return done


@contextmanager
def _read(stream: Any, report: Report, shown: bool):
    """The lines of a stream, as they come; whole when the body has ended."""
    lines: list[str] = []

    def read() -> None:
        for line in stream:
            lines.append(line)
            if shown:
                report.say("  " + line.rstrip("\n"))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield lines
    thread.join(10)


def _job(status: dict[str, Any]) -> dict[str, Any]:
    return status["jobs"][-1]


def _noticed(status: dict[str, Any], host: str) -> bool:
    """Or it is gone already."""
    found = next((h for h in status["hosts"] if h["host"] == host), None)
    return found is None or found["seconds_left"] is not None or found["state"] == "draining"


def _short(status: dict[str, Any]) -> str:
    hosts = ", ".join(f"{h['host']} {h['state']}" for h in status["hosts"] if h["role"] == "worker") or "no host"
    jobs = "".join(f"; {j['state']}, {j['world_size']} workers" for j in status["jobs"][-1:])
    return f"{hosts}{jobs}" + (f"; {status['why']}" if status["why"] else "")


def _planned(file: Path) -> float:
    return Fleet(file).plan().micros_h / 1e6


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/smoke-aws", description=__doc__.splitlines()[0], epilog=table(),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--region", help="where; one in which you have a quota (`spotfleet check aws`)")
    parser.add_argument("--max-usd", type=float, default=2.0, help="stop when the running estimate of all is there")
    parser.add_argument("--part", action="append", choices=[*PARTS, "all"], default=[],
                        help="what to try, again and again; default: basic. all: each that has what it needs")
    parser.add_argument("--kms-key", default="", help="key: ARN or alias of a customer key of the region")
    parser.add_argument("--subnets", default="", help="private: ids of private subnets with a NAT, one per zone, "
                        "separated by commas")
    parser.add_argument("--ssh-from", default="10.0.0.0/8", help="private: network from which this laptop comes")
    parser.add_argument("--type", default="", help="of hosts: g5.xlarge; default: the cheapest small CPU spot type")
    parser.add_argument("--torch", default="", help="requirement; default: PyTorch's CPU wheel, or PyPI's with --type")
    parser.add_argument("--with", dest="more", default="", metavar="FILE",
                        help="YAML to lay over the fleet file: aws: {networks: ...}, environment: {...} and so on")
    parser.add_argument("--role", default="", help="ARN of a role for FIS that exists; default: made and removed")
    parser.add_argument("--no-fis", action="store_true", help="end a host without a notice, by our own means")
    parser.add_argument("--name", default="", help="of the fleet")
    parser.add_argument("--report", default="", help="file; default: smoke-aws-TIME.txt here")
    parser.add_argument("--policy", action="store_true",
                        help="print what IAM must allow for FIS, besides `spotfleet check aws --policy`")
    parsed = parser.parse_args(argv)
    if not parsed.policy and not parsed.region:
        parser.error("the following arguments are required: --region")
    lacking = [p for p in parsed.part if p != "all" and PARTS[p].needs and not _given(parsed, PARTS[p])]
    if lacking:
        parser.error(f"--part {lacking[0]} needs {PARTS[lacking[0]].needs}")
    everything = [p for p in PARTS if _given(parsed, PARTS[p])]
    parsed.part = everything if "all" in parsed.part else list(dict.fromkeys(parsed.part)) or ["basic"]
    return parsed


def _given(parsed: argparse.Namespace, part: Part) -> bool:
    return not part.needs or bool(getattr(parsed, part.needs.removeprefix("--").replace("-", "_")))


def main(argv: Sequence[str] | None = None, kind: type[Smoke] = Smoke, **options: Any) -> int:
    """0: all went as it should, and nothing is left. `kind` and its `options` are for tests."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.policy:
        print(json.dumps(smoke_notice.EXTRA, indent=2))
        return 0
    report = Report(Path(args.report or f"smoke-aws-{time.strftime('%Y%m%d-%H%M%S')}.txt").absolute())
    report.say(f"spotfleet {__version__}, boto3 {boto3.__version__}, Python {platform.python_version()}, "
               f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {args.region}; {', '.join(args.part)}: about "
               f"{sum(PARTS[p].minutes for p in args.part)} minutes")

    def made(part: str, folder: Path, left_usd: float) -> Smoke:
        name = prepared(args, folder, part, PARTS[part].over(args))
        return kind(name, args.region, left_usd, folder, report, boto3.Session(), args.role, not args.no_fis,
                    part=PARTS[part], **options)

    return run_parts(args, report, made, "account number, key, user or public address")


def run_parts(args: argparse.Namespace, report: Report, made: Callable[[str, Path, float], Smoke], hidden: str) -> int:
    """Run each part. `made`: (part, folder, dollars left) -> its fleet; `hidden`: what the report does not have."""
    went, spent_usd = True, 0.0
    for part in args.part:
        with tempfile.TemporaryDirectory(prefix="spotfleet-smoke-") as folder:
            smoke = made(part, Path(folder), args.max_usd - spent_usd)
            well = _try(part, smoke, report)
        went, spent_usd = went and well is True, spent_usd + smoke.spent_usd
        if well is None:  # Ctrl-C
            break
    report.say(f"estimate ${spent_usd:.2f}")
    went = went and not report.failed
    report.say("ALL WENT WELL" if went else f"NOT ALL WENT WELL: {', '.join(report.failed) or 'see above'}")
    print(f"report: {report.path}   (no {hidden} in it; read it, then send it)", file=sys.stderr)
    return 0 if went else 1


def _try(part: str, smoke: Smoke, report: Report) -> bool | None:
    """Run one part. Return whether it went well and nothing is left, None after Ctrl-C."""
    went: bool | None = False
    report.say(f"=== part {part}: {smoke.part.about}; fleet {smoke.name}")
    try:
        smoke.run()
        went = True
    except FAILURES as error:
        report.say(f"stopped: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        went = None
        report.say("interrupted: the fleet is taken down first; a second Ctrl-C does not hurry that")
    finally:
        before = signal.signal(signal.SIGINT, lambda *_: print("taking the fleet down ...", file=sys.stderr))
        gone = smoke.clean_up()
        signal.signal(signal.SIGINT, before)
    report.say(f"part {part}: estimate ${smoke.spent_usd:.2f}; "
               + "; ".join(f"{s:.0f} s {w}" for w, s in smoke.measured.items()))
    return went and gone


if __name__ == "__main__":
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    sys.exit(main())
