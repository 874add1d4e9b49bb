"""What scripts/smoke-gcp runs: a tiny fleet on Google Cloud from check to leaks, with a real preemption in between.

    part       minutes  dollars   the question
    basic           10     0.10   does a host that gets a real preemption notice leave in time, and another come?
    stop            15     0.15   is a preempted host that is to be stopped started again, with its disk?

    check --> plan and its price --> up --> train --> preemption --> replacement, training goes on --> cost
         `---- whatever goes wrong, Ctrl-C, --max-usd reached ------------------------------> down --> leaks

A simulated maintenance event preempts a Spot VM, with the notice that it was launched with. The report has the
operations of the machine with their times: what the documentation leaves open is seen there.

Money: the machines' own prices since `up` began, disks and addresses at list prices; when that estimate reaches
--max-usd, the fleet goes down at once. It is an estimate: Google's bill is what counts.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from smoke_aws import Smoke, Stopped, run_parts
from smoke_file import prepared
from smoke_report import Report

from spotfleet import __version__
from spotfleet.codec import to_json
from spotfleet.providers.gcp.mapping import names
from spotfleet.providers.gcp.session import ENDPOINT, GcpAccount, account_of, project_of
from spotfleet.providers.gcp.spec import GcpSpec

BESIDES_USD_H = 0.03  # 80 GiB of pd-balanced, three external addresses
GONE_S, RETURN_S, REPLACED_S = 600.0, 700.0, 900.0
STOPPED = "last_stop_timestamp"
FILE = """\
name: {name}
provider: gcp
nodes: {{min: 2, target: 2, max: 2}}
resources: {{use_spot: true{wanted}}}
gcp: {{regions: [{region}], disk: {disk}, dispatcher_disk: 20}}
environment: {{packages: ["{torch}", scikit-learn]}}
checkpoint: {{interval: 30s}}
max_lifetime: 3h
autostop: {{idle_minutes: 30, down: true}}
tags: {{purpose: spotfleet-smoke}}
workdir: .
"""
VERIFY = """to be sure that nothing is left, and nothing billed:
  spotfleet down {name} -y                       (again, until it says that nothing is left)
  spotfleet leaks --all-regions --fix
  gcloud compute instances list --project {project} --filter 'labels.{tag}~^{name}(-|$)'
  gcloud compute disks list --project {project} --filter 'labels.{tag}~^{name}(-|$)'
  gcloud compute firewall-rules list --project {project} --filter 'name~^spotfleet-{name}(-|$)'"""


@dataclass(frozen=True)
class GcpPart:
    about: str
    minutes: int
    stops: bool = False  # a preempted host is stopped and returns
    proof: Callable[[Any], None] | None = None
    fis: bool = False  # nothing but the machines costs money


PARTS = {"basic": GcpPart("a preemption with its notice", 10), "stop": GcpPart("a host that returns", 15, stops=True)}


@dataclass
class GcpSmoke(Smoke):
    """One part. `session` is a GcpAccount."""

    cloud: str = "gcp"
    title: str = "Google Cloud"
    besides_usd_h: float = BESIDES_USD_H

    @property
    def account(self) -> GcpAccount:
        return self.session

    def _lose_one(self) -> None:
        """Have a host preempted, and see it leave and come back, or another come."""
        before = self.status()
        victim = next(h for h in before["hosts"] if h["role"] == "worker")["host"]
        machine = self._machine(victim)
        self.report.say(f"{machine['name']} in {names.last(machine['zone'])}: {_scheduled(machine)}")
        began = time.monotonic()
        if self.fis:
            self.account.change("instances", "simulate_maintenance_event", zone=names.last(machine["zone"]),
                                instance=machine["name"])
            self.report.say(f"a maintenance event preempts {machine['name']}, host {victim}")
        else:
            self.cli("chaos", "kill", victim, "-c", self.name)
        try:
            if self.part.stops:  # type: ignore[attr-defined]
                self._returned(victim, machine, before, began)
            else:
                self._replaced(victim, before, began)
        finally:
            self._facts(machine)

    def _returned(self, victim: str, machine: dict[str, Any], before: dict[str, Any], began: float) -> None:
        self.until("the machine has stopped", lambda _: self._seen(machine)[1] != machine.get(STOPPED), GONE_S)
        self.measure("until the machine had stopped", began)
        self.until("the machine runs again", lambda _: self._seen(machine)[0] in ("RUNNING", ""), RETURN_S)
        self.measure("until the machine ran again", began)
        steps = before["jobs"][-1]["version"]
        self.until("both train", lambda s: self.trains(s, 2, steps), REPLACED_S)
        self.measure("until both trained again", began)
        if self._machine(victim)["id"] != machine["id"]:
            raise Stopped(f"host {victim} is on another machine")

    # ---- what Google says

    def _machine(self, host: str) -> dict[str, Any]:
        found = [i for i in self._instances() if names.host_of(i["name"]) == host]
        if not found or (found[0].get("scheduling") or {}).get("provisioning_model") != "SPOT":
            raise Stopped(f"{host} is no Spot VM: {[i['name'] for i in found]}")
        return found[0]

    def _instances(self) -> list[dict[str, Any]]:
        """Of this fleet, in whatever state."""
        everywhere = self.account.everywhere("instances", "instances", filter=f"labels.{names.FLEET}:*")
        return [i for i in everywhere if _ours(self.name, i["labels"].get(names.FLEET, ""))]

    def _seen(self, machine: dict[str, Any]) -> tuple[str, str | None]:
        """Its status and when it has stopped last; empty once it is gone."""
        return next(((i["status"], i.get(STOPPED)) for i in self._instances() if i["id"] == machine["id"]), ("", ""))

    def _facts(self, machine: dict[str, Any]) -> None:
        """The operations of a machine in their order, for the report."""
        for found in sorted(self.account.everywhere("global_operations", "operations",
                                                    filter=f"targetLink eq .*/instances/{machine['name']}"),
                            key=lambda o: datetime.fromisoformat(o["insert_time"])):
            codes = [e.get("code", "") for e in (found.get("error") or {}).get("errors", ())]
            self.report.say(f"  {found.get('operation_type')} by {found.get('user')}: {found.get('insert_time')} to "
                            f"{found.get('end_time', 'now')}, {found.get('status')} {' '.join(codes)}".rstrip())

    def verify(self) -> str:
        return VERIFY.format(name=self.name, project=self.account.project, tag=names.FLEET)

    def _left(self) -> list[str]:
        """By Google's own lists, not by ours."""
        left = [f"instance {i['name']}" for i in self._instances()]
        disks = self.account.everywhere("disks", "disks", filter=f"labels.{names.FLEET}:*")
        left += [f"disk {d['name']}" for d in disks if _ours(self.name, d["labels"].get(names.FLEET, ""))]
        left += [f"firewall rule {r['name']}" for page in self.account.pages("firewalls", "list")
                 for r in page.get("items") or () if _ours(f"spotfleet-{self.name}", r["name"])]
        return left


def _ours(name: str, found: str) -> bool:
    """A fleet has its name, or its name with a few letters behind."""
    return found == name or found.startswith(f"{name}-")


def _scheduled(machine: dict[str, Any]) -> str:
    scheduling = machine.get("scheduling") or {}
    notice = (scheduling.get("preemption_notice_duration") or {}).get("seconds", 0)
    return (f"{scheduling.get('provisioning_model')}, {scheduling.get('instance_termination_action')} at a preemption, "
            f"{notice} s of notice")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/smoke-gcp", description=__doc__.partition("\n    check")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", default=project_of(os.environ), help="its id; default: GOOGLE_CLOUD_PROJECT")
    parser.add_argument("--region", required=True, help="where; one in which you have quotas (`spotfleet check gcp`)")
    parser.add_argument("--max-usd", type=float, default=1.0, help="stop when the running estimate of all is there")
    parser.add_argument("--part", action="append", choices=[*PARTS, "all"], default=[],
                        help="what to try, again and again; default: basic")
    parser.add_argument("--type", default="", help="of hosts: g2-standard-4; default: the cheapest small CPU Spot type")
    parser.add_argument("--torch", default="", help="requirement; default: PyTorch's CPU wheel, or PyPI's with --type")
    parser.add_argument("--with", dest="more", default="", metavar="FILE",
                        help="YAML to lay over the fleet file: gcp: {network: ...}, environment: {...} and so on")
    parser.add_argument("--no-preemption", action="store_true", help="end a host without a notice, by our own means")
    parser.add_argument("--name", default="", help="of the fleet")
    parser.add_argument("--report", default="", help="file; default: smoke-gcp-TIME.txt here")
    parsed = parser.parse_args(argv)
    if not parsed.project:
        parser.error("--project is missing, and GOOGLE_CLOUD_PROJECT too: `gcloud projects list` shows the ids")
    parsed.part = list(PARTS) if "all" in parsed.part else list(dict.fromkeys(parsed.part)) or ["basic"]
    return parsed


def main(argv: Sequence[str] | None = None, kind: type[GcpSmoke] = GcpSmoke, **options: Any) -> int:
    """0: all went as it should, and nothing is left. `kind` and its `options` are for tests."""
    args = parse(sys.argv[1:] if argv is None else argv)
    os.environ["GOOGLE_CLOUD_PROJECT"] = args.project
    report = Report(Path(args.report or f"smoke-gcp-{time.strftime('%Y%m%d-%H%M%S')}.txt").absolute(), args.project)
    report.say(f"spotfleet {__version__}, Python {platform.python_version()}, "
               f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {args.region}; {', '.join(args.part)}: about "
               f"{sum(PARTS[p].minutes for p in args.part)} minutes")
    spec = GcpSpec(project=args.project, regions=(args.region,))
    endpoint = os.environ.get(ENDPOINT, "")
    account = account_of({"section": to_json(spec), **({"endpoint_url": endpoint} if endpoint else {})})

    def made(part: str, folder: Path, left_usd: float) -> GcpSmoke:
        over = {"gcp": {"project": args.project},
                "interruption_behavior": "stop" if PARTS[part].stops else "terminate"}
        name = prepared(args, folder, part, over, FILE)
        return kind(name, args.region, left_usd, folder, report, account, fis=not args.no_preemption,
                    part=PARTS[part], **options)  # type: ignore[arg-type]

    return run_parts(args, report, made, "project, key, address or person")


if __name__ == "__main__":
    sys.exit(main())
