"""What scripts/smoke-gcp calls instead of `spotfleet` in its test: a fleet of the fake, without machines.

Each `status` is a look of a dispatcher: what is lost is launched anew, a stopped machine is started, and a job makes
some steps. `trouble` in the working directory names what goes wrong: "check", "up", "train", "down", "another machine".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.gcp.gcp_asks import DELETED, SPOT, ZONE, instance

STATE, TROUBLE = Path("state.json"), Path("trouble")


class Cli:
    def __init__(self, account: Any) -> None:
        self.account = account
        self.trouble = TROUBLE.read_text() if TROUBLE.exists() else ""
        self.spec = yaml.safe_load(Path("fleet.yaml").read_text())
        self.name, self.stops = self.spec["name"], self.spec["interruption_behavior"] == "stop"

    def launch(self, host: str, role: str) -> None:
        body = instance(f"{host}-sxyz", kind="e2-small", scheduling=(SPOT if self.stops else DELETED)
                        if role == "worker" else {})
        body |= {"labels": {"spotfleet": self.name, "spotfleet-role": role}}
        self.account.wait(self.account.change("instances", "insert", zone=ZONE, instance_resource=body), "insert")

    def machines(self) -> list[dict[str, Any]]:
        return self.account.everywhere("instances", "instances", filter=f"labels.spotfleet = {self.name}")

    def end(self, machine: dict[str, Any]) -> None:
        self.account.change("instances", "delete", zone=ZONE, instance=machine["name"])

    def host(self, machine: dict[str, Any], cloud: Any) -> dict[str, Any]:
        going = cloud.machine(machine["name"]).preempted
        return {"host": machine["name"].rpartition("-")[0], "role": machine["labels"]["spotfleet-role"],
                "state": "draining" if going else "up", "seconds_left": 100.0 if going else None}

    def look(self, cloud: Any) -> dict[str, Any]:
        state = json.loads(STATE.read_text())
        for machine in self.machines():
            if machine["status"] == "TERMINATED":
                if "another machine" in self.trouble:
                    self.end(machine)
                    self.launch(machine["name"].rpartition("-")[0], "worker")
                else:
                    self.account.change("instances", "start", zone=ZONE, instance=machine["name"])
        hosts = [self.host(m, cloud) for m in self.machines() if m["status"] == "RUNNING"]
        staying = [h for h in hosts if h["role"] == "worker" and h["state"] == "up"]
        if len(staying) < 2 and not self.stops:
            state["hosts"] += 1
            self.launch(f"{self.name}-{state['hosts']}", "worker")
        state["version"] += 15
        STATE.write_text(json.dumps(state))
        failed = "train" in self.trouble
        job = {"job": "digits-1", "state": "failed" if failed else "running", "why": "it broke" if failed else "trains",
               "error": "Traceback", "world_size": len(staying), "version": state["version"], "repeated": 0}
        return {"fleet": self.name, "why": "", "hosts": hosts, "jobs": [job] if state["job"] else []}


def main(words: list[str], account: Any, cloud: Any) -> int:
    cli = Cli(account)
    match words[0]:
        case "check":
            return 3 if "check" in cli.trouble else 0
        case "up":
            STATE.write_text(json.dumps({"hosts": 2, "version": 0, "job": ""}))
            cli.launch(f"{cli.name}-d-1", "dispatcher")
            for n in (1, 2):
                cli.launch(f"{cli.name}-{n}", "worker")
            return 1 if "up" in cli.trouble else 0
        case "train":
            STATE.write_text(json.dumps(json.loads(STATE.read_text()) | {"job": "digits-1"}))
        case "status":
            print(json.dumps(cli.look(cloud)))
        case "chaos":
            for machine in cli.machines():
                if machine["name"].rpartition("-")[0] == words[2]:
                    cli.end(machine)
        case "down":
            if "down" in cli.trouble:
                print("error: it is still there", file=sys.stderr)
                return 1
            for machine in cli.machines():
                cli.end(machine)
        case "leaks":
            print("[]")
        case _:
            print(f"{words[0]} of {account.project} at 203.0.113.9 by somebody@example.com")
    return 0
