"""What scripts/smoke-aws calls instead of `spotfleet` in its test: a fleet of the AWS fake, without machines.

Each `status` is a look of a dispatcher: what is lost is launched anew, and a job makes some steps. `trouble` in the
working directory names what goes wrong: "check", "up", "train", "down"; for the parts "one by one", "plain disks",
"public", "one-time".
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import yaml

FLEET, STATE, TROUBLE = "spotfleet", Path("state.json"), Path("trouble")

def tags(kind: str, name: str, host: str, role: str) -> dict:
    found = {FLEET: name, "spotfleet-host": host, "spotfleet-role": role}
    return {"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in found.items()]}


def launch(ec2: Any, name: str, host: str, role: str, count: int = 1) -> None:
    spec, trouble = yaml.safe_load(Path("fleet.yaml").read_text()), TROUBLE.read_text() if TROUBLE.exists() else ""
    aws, stopped = spec["aws"], spec.get("interruption_behavior") == "stop" and "one-time" not in trouble
    lasting = {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}
    options = {"SpotOptions": lasting} if stopped else {}
    market = {"InstanceMarketOptions": {"MarketType": "spot", **options}} if role == "worker" else {}
    kinds = ["instance", "volume", *(["spot-instances-request"] if market else [])]
    disk = {"Encrypted": True, **({"KmsKeyId": aws["kms_key"]} if aws.get("kms_key") else {})}
    subnet = {"SubnetId": aws["networks"][aws["regions"][0]]["subnets"][0]} if "networks" in aws else {}
    interface = {"DeviceIndex": 0, "DeleteOnTermination": True, **subnet,
                 "AssociatePublicIpAddress": aws.get("public_addresses", True) or "public" in trouble}
    made = ec2.run_instances(
        ImageId="ami-0aaaaaaaaaaaa2404", InstanceType="m5.large", MinCount=count, MaxCount=count, **market,
        BlockDeviceMappings=[] if "plain disks" in trouble else [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        NetworkInterfaces=[interface], TagSpecifications=[tags(kind, name, host, role) for kind in kinds])
    for place, instance in enumerate(made["Instances"] if count > 1 else []):
        ec2.create_tags(Resources=[instance["InstanceId"]], Tags=[{"Key": "spotfleet-member", "Value": str(place)}])


def living(ec2: Any, name: str) -> list[dict]:
    found = ec2.describe_instances(Filters=[{"Name": f"tag:{FLEET}", "Values": [name]},
                                            {"Name": "instance-state-name", "Values": ["pending", "running"]}])
    return [i for r in found["Reservations"] for i in r["Instances"]]


def host(ec2: Any, instance: dict) -> dict:
    told = {t["Key"]: t["Value"] for t in instance["Tags"]}
    request = ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[instance["SpotInstanceRequestId"]])[
        "SpotInstanceRequests"][0] if "SpotInstanceRequestId" in instance else {"Status": {"Code": "fulfilled"}}
    going = request["Status"]["Code"] != "fulfilled"
    return {"host": told["spotfleet-host"], "role": told["spotfleet-role"], "state": "draining" if going else "up",
            "seconds_left": 100.0 if going else None}


def status(ec2: Any, name: str) -> dict:
    state = json.loads(STATE.read_text())
    hosts = [host(ec2, i) for i in living(ec2, name)]
    staying = [h for h in hosts if h["role"] == "worker" and h["state"] == "up"]
    if len(staying) < 2 and "interruption_behavior" not in Path("fleet.yaml").read_text():
        state["hosts"] += 1
        launch(ec2, name, f"{name}-{state['hosts']}", "worker")
    state["version"] += 15
    STATE.write_text(json.dumps(state))
    failed = "train" in state["trouble"]
    job = {"job": "digits-1", "state": "failed" if failed else "running", "why": "it broke" if failed else "trains",
           "error": "Traceback", "world_size": len(staying), "version": state["version"], "repeated": 0}
    return {"fleet": name, "why": "", "hosts": hosts, "jobs": [job] if state["job"] else []}


def main(words: list[str], ec2: Any) -> int:
    trouble = TROUBLE.read_text() if TROUBLE.exists() else ""
    name = next(line.split()[1] for line in Path("fleet.yaml").read_text().splitlines() if line.startswith("name:"))
    match words[0]:
        case "check":
            return 3 if "check" in trouble else 0
        case "up":
            STATE.write_text(json.dumps({"hosts": 2, "version": 0, "job": "", "trouble": trouble}))
            launch(ec2, name, f"{name}-d-1", "dispatcher")
            if "all_or_nothing" in Path("fleet.yaml").read_text() and "one by one" not in trouble:
                launch(ec2, name, f"{name}- 1 2", "worker", 2)
            else:
                for n in (1, 2):
                    launch(ec2, name, f"{name}-{n}", "worker")
            print("launching dispatcher", file=sys.stderr, flush=True)
            if "slow" in trouble:
                time.sleep(150)
            return 1 if "up" in trouble else 0
        case "train":
            state = json.loads(STATE.read_text())
            STATE.write_text(json.dumps(state | {"job": "digits-1"}))
        case "status":
            print(json.dumps(status(ec2, name)))
        case "chaos":
            lost = [i["InstanceId"] for i in living(ec2, name) if host(ec2, i)["host"] == words[2]]
            ec2.terminate_instances(InstanceIds=lost)
        case "down":
            if "down" in trouble:
                print("error: it is still there", file=sys.stderr)
                return 1
            asked = ec2.describe_spot_instance_requests(Filters=[
                {"Name": f"tag:{FLEET}", "Values": [name]}])["SpotInstanceRequests"]
            if requests := [r["SpotInstanceRequestId"] for r in asked if r["State"] in ("open", "active", "disabled")]:
                ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=requests)
            ec2.terminate_instances(InstanceIds=[i["InstanceId"] for i in living(ec2, name)])
        case "leaks":
            print("[]")
        case _:
            print(f"{words[0]} of 123456789012 at 203.0.113.9 by AKIAIOSFODNN7EXAMPLE")
    return 0


if __name__ == "__main__":
    import boto3

    sys.exit(main(sys.argv[1:], boto3.client("ec2", region_name="us-east-1")))
