"""The parts of a fleet's story that are the same on every cloud: `tests/e2e/clouds` and `tests/e2e/gcp` call them.

Each takes the stage of one cloud (`aws_stage.AwsStage`, `gcp_stage.GcpStage`), or of two.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from tests.support.aws.aws_stage import AwsStage, timed

GOES_ON_S = 60.0  # on a machine with much else to do; what is promised is measured in bench/


def comes_up(stage: AwsStage, region: str) -> None:
    """`up` shows what it will cost, and machines come up from their user data alone."""
    shown = stage.cli("up", "fleet.yaml", "--dryrun").stdout
    print(shown)
    assert stage.cloud.everything() == []
    assert re.search(rf"{region}.*\$?0\.\d+", shown)
    print(f"up: {timed(lambda: stage.cli('up', 'fleet.yaml', '-y')):.1f} s")
    print(stage.said[-1])
    workers = stage.instances("worker")
    assert (len(workers), len(stage.instances("dispatcher"))) == (2, 1)
    assert {view.market for view in workers} == {"spot"}


def replaced_at_a_notice(stage: AwsStage, notice: Callable[[Any], None], is_there: Callable[[Any], bool],
                         limit_s: float) -> None:
    """A host that gets a notice is replaced from another pool before it is lost, and no sample with it.

    `is_there`: does the cloud still run it? It ends within `limit_s`.
    """
    job = stage.train((2, 2))
    victim, survivor = before = stage.instances("worker")
    stage.wait("two that train", lambda: stage.training(before))
    generation = stage.job(job).generation
    begun = time.monotonic()
    notice(victim)
    stage.wait("a replacement", lambda: len(stage.instances("worker")) == 3)
    launched_s = time.monotonic() - begun
    (new,) = [view for view in stage.instances("worker") if view.id not in (victim.id, survivor.id)]
    assert is_there(victim)  # not lost yet
    assert (new.zone, new.type) != (victim.zone, victim.type)  # where there is room
    stage.wait("both that go on", lambda: stage.training([survivor, new]))
    next_s = next(s.at for s in stage.steps(survivor) if s.generation > generation) - begun
    pauses = [b.at - a.at for a, b in zip(stage.steps(survivor), stage.steps(survivor)[1:], strict=False)]
    print(f"notice: replacement launched after {launched_s:.1f} s, warm and training after {next_s:.1f} s, "
          f"longest pause {max(pauses):.2f} s")
    assert max(pauses) < GOES_ON_S
    stage.wait("its end", lambda: not is_there(victim), limit_s)
    stage.enough()
    stage.wait("the job's end", lambda: stage.job(job).state == "succeeded")


def goes_down(stage: AwsStage) -> None:
    """`down` removes all of it, and proves that."""
    assert json.loads(stage.cli("status", "-o", "json").stdout)["state"] == "up"
    print(f"down: {timed(lambda: stage.cli('down', '-y')):.1f} s")
    print(stage.said[-1])
    proof = stage.said[-1]
    assert stage.cloud.everything() == [], stage.story()
    assert list(stage.machines) == []
    assert json.loads(stage.cli("leaks", "--all-regions", "-o", "json").stdout) == []
    stage.said.append(proof)


def no_way_past_the_dispatcher(stage: AwsStage) -> None:
    for view in stage.instances("worker"):
        past = stage.machines.laptop.run("ssh", "-oConnectTimeout=2", f"ubuntu@{view.public_ip}", ok=False)
        assert past.returncode == 255 and "Permission denied" not in past.stderr


def bill_agrees(stage: AwsStage, unlaunched: bool = False) -> set[str]:
    """Our bill is what the cloud's own books say. `unlaunched`: these name launches, too, that it refused, for nothing.
    Return the clouds."""
    lines = json.loads(stage.cli("cost", "-o", "json").stdout)["lines"]
    ours: dict[str, float] = {}
    for line in lines:  # a host that returned has one for each of its runs
        ours[line["host"]] = ours.get(line["host"], 0.0) + line["micros"] / 1e6
    books = stage.bills()
    print(stage.cli("cost").stdout)
    assert ours.keys() == books.keys() or (unlaunched and ours.keys() < books.keys())
    for host, usd in books.items():
        known = ours.get(host, 0.0)
        assert abs(known - usd) <= 3 * usd / 60, (host, known, usd)  # whole seconds; a host taken is free
    return {line["pool"].partition("/")[0] for line in lines}
