"""A cloud like AWS to try things on by hand: a shell on the laptop of a user who has an account, until it is left.

    python -m tests.e2e.clouds.aws_by_hand [COMMAND...]

`fleet.yaml` there is examples/aws-g5.yaml for machines as they are here, `counting.py` a script to train; all of
`spotfleet` is real but the cloud. There, `instances` lists what runs, `interrupt ID [SECONDS]`, `take ID`, `rebalance
ID` and `room ZONE TYPE COUNT` do to it what they say, `everything` lists what is in the account, `denied` which calls
were refused. Needs root.
"""

from __future__ import annotations

import sys

from tests.network.lan import shell
from tests.support.aws.aws_stage import AwsStage, why_not

WORDS = "instances interrupt take rebalance room everything denied"


def obey(stage: AwsStage, order: str) -> str:
    cloud = stage.cloud
    match order.split():
        case ["instances"]:
            return "".join(f"{v.id} {v.state} {v.type} {v.zone} {v.market} {v.private_ip} {v.public_ip} {v.tags}\n"
                           for v in cloud.instances())
        case ["interrupt", instance]:
            cloud.interrupt(instance)
        case ["interrupt", instance, seconds]:
            cloud.interrupt(instance, notice_s=float(seconds))
        case ["take", instance]:
            cloud.take(instance)
        case ["rebalance", instance]:
            cloud.rebalance(instance)
        case ["room", zone, kind, count]:
            cloud.set_room(zone, kind, int(count))
        case ["everything"]:
            return "".join(f"{thing}\n" for thing in cloud.everything())
        case ["denied"]:
            return "".join(f"{c.principal} {c.action} {c.code}\n" for c in cloud.calls if c.code)
        case _:
            return f"what is {order!r}?\n"
    return ""


def main() -> None:
    if why_not():
        sys.exit(why_not())
    with AwsStage.made() as stage:
        stage.fleet_file()
        ended = shell(stage.machines.laptop, WORDS, lambda order: obey(stage, order), sys.argv[1:], stage.env)
    sys.exit(ended)


if __name__ == "__main__":
    main()
