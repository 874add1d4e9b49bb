"""`spotfleet up`: plan, progress, refusals, repetition."""

from __future__ import annotations

import json
import re

import pytest

from spotfleet.api.home import Home
from spotfleet.model import Nodes

SPOT = "local/local-a/cpu.small/spot"


def test_up_shows_plan_and_reasons_first_then_progress_then_the_next_command(user):
    said = user.ok("up fleet.yaml -y")
    lines = said.err.splitlines()
    assert lines[0] == "fleet digits on local: to be made; 2..3 hosts, target 3"
    (dispatcher,) = (line for line in lines if line.startswith("dispatcher "))
    assert dispatcher.split()[1:6] == ["cpu.small", "on-demand", "local-a", "1", "$0.0850"]
    assert "the cheapest of" in dispatcher and dispatcher.count("local-a") == 1  # the row does not repeat itself
    assert sum(int(line.split()[0]) for line in lines if re.match(r"\d hosts? ", line)) == 3
    assert any(line.startswith("about $") and "% less" in line for line in lines)
    assert lines.index("offers considered, cheapest first:") < lines.index(
        next(line for line in lines if line.startswith("  launching dispatcher digits-d-0")))
    assert any(line.startswith("fleet digits is up with") for line in lines)
    assert lines[-2:] == ["next: spotfleet train SCRIPT.py", "      spotfleet down digits"]
    assert said.out == ""
    assert len(user.workers()) == 3


def test_a_fleet_for_ray_is_followed_by_the_start_of_ray(user):
    user.write("fleet.yaml", (user.work / "fleet.yaml").read_text() + "ray: true\n")
    assert user.ok("up fleet.yaml -y").err.splitlines()[-3:] == [
        "next: spotfleet ray start", "      spotfleet train SCRIPT.py", "      spotfleet down digits"]


def test_the_plan_says_what_ends_the_machines_when_nobody_does(user):
    assert "hosts end themselves 1h00m after losing contact with the dispatcher" in user.ok("up fleet.yaml --plan").out
    more = (user.work / "fleet.yaml").read_text() + "orphan_after: 90s\nmax_lifetime: 12h\n"
    user.write("fleet.yaml", more)
    assert user.ok("up fleet.yaml --plan").out.splitlines()[-1] == (
        "hosts end themselves 1m30s after losing contact with the dispatcher; the fleet ends after 12h00m")
    user.write("fleet.yaml", more.replace("90s", "0s"))
    assert "hosts never end themselves (orphan_after: 0); the fleet ends" in user.ok("up fleet.yaml --plan").out


def test_the_plan_holds_the_hosts_that_a_growth_begins_with(user):
    file = "name: digits\nnodes: {min: 1, target: 3}\nresources: {instance_type: cpu.small}\n"
    found = []
    for more in ("", "resize: {growth: {0: 1, 5: 2, 9: 3}}\n"):
        user.write("fleet.yaml", file + more)
        out = user.ok("up fleet.yaml --plan").out
        found.append(sum(int(n) for n in re.findall(r"^(\d) hosts? ", out, re.MULTILINE)))
    assert found == [3, 1]


@pytest.mark.parametrize("flag", ["--dryrun", "--dry-run", "--plan"])
def test_a_dry_run_prints_the_plan_as_data_and_changes_nothing(user, flag):
    said = user.ok(f"up fleet.yaml {flag}")
    assert said.out.startswith("fleet digits on local: to be made")
    assert user.cloud.living() == [] and not (user.home / "fleets").exists()


def test_without_a_terminal_and_without_yes_nothing_is_done(user):
    said = user.fails("up fleet.yaml", code=2)
    assert "hint: add -y" in said.err
    assert user.cloud.living() == []


def test_up_of_a_running_fleet_changes_nothing(up):
    before = up.cloud.living()
    said = up.ok("up fleet.yaml")  # without -y: there is nothing to ask
    assert "nothing to change: fleet digits is up" in said.err
    assert up.cloud.living() == before


def test_a_changed_nodes_section_changes_the_target(up):
    up.write("fleet.yaml", "name: digits\nnodes: {min: 1, target: 4}\nresources: {instance_type: cpu.small}\n")
    said = up.ok("up fleet.yaml -y")
    assert "to be resized from 2..3 hosts, target 3 to 1..4 hosts, target 4" in said.err
    assert up.dispatcher.nodes == Nodes(1, 4, 4)
    up.ok("up fleet.yaml")
    assert len(up.workers()) == 4


def test_what_only_the_next_job_needs_may_change_while_the_fleet_is_up(up):
    up.write("fleet.yaml", (up.work / "fleet.yaml").read_text() + "envs: {A: later}\n")
    assert "changed for the next job: envs" in up.ok("up fleet.yaml").err
    assert up.ok("train hello.py").out == "hello later\n"


def test_another_change_is_refused_with_the_way_out(up):
    up.write("fleet.yaml", "name: digits\nnodes: {min: 2, target: 3}\nresources: {instance_type: gpu.small}\n")
    said = up.fails("up fleet.yaml -y", code=2)
    assert "resources cannot change" in said.err and "`spotfleet down digits` first" in said.err
    assert len(up.workers()) == 3


def test_an_up_that_cannot_reach_min_names_the_refusals_and_leaves_the_fleet_trying(user):
    user.cloud.market.refuse(SPOT, "type", user.cloud.clock())
    said = user.fails("up fleet.yaml -y --timeout 4s")  # in which the dispatcher, that is not refused, surely comes
    assert "0 of at least 2 hosts are up after 4 s: " in said.err
    assert "refuse" in said.err or "no room" in said.err
    assert "hint: it goes on trying" in said.err and "spotfleet down digits" in said.err
    user.cloud.market.allow(SPOT, user.cloud.clock())
    user.ok("down -y")
    assert user.cloud.living() == []


def test_a_refused_dispatcher_is_named_too(user):
    user.cloud.market.refuse("local/local-a/cpu.small/on-demand", "type", user.cloud.clock())
    said = user.fails("up fleet.yaml -y --timeout 1s")
    assert "no dispatcher within 1 s: " in said.err
    user.ok("down -y")
    assert user.cloud.living() == []


def test_what_only_a_person_can_solve_exits_with_3_before_anything_is_made(user):
    user.cloud.broken = "no quota for spot machines"
    assert "no quota" in user.fails("up fleet.yaml -y", code=3).err
    assert not (user.home / "fleets").exists()


def test_resources_that_nobody_sells_are_refused_before_anything_is_launched(user):
    user.write("fleet.yaml", "name: digits\nresources: {instance_type: x9.huge}\n")
    said = user.fails("up fleet.yaml -y", code=2)
    assert "x9.huge" in said.err and user.cloud.living() == []


@pytest.mark.parametrize(("resources", "said"), [
    ("{instance_type: cpu.smal}", "cpu.small, gpu.large, gpu.small; did you mean 'cpu.small'?"),
    ("{instance_type: cpu.small, zone: local-x}",
     "zone 'local-x' is unknown; there is local-a, local-b, local-c; did you"),
    ("{infra: local, accelerators: W100}", "accelerators 'W100' is unknown; there is "),
])
def test_a_word_that_the_provider_does_not_know_is_named_with_the_nearest_also_by_a_dry_run(user, resources, said):
    user.write("fleet.yaml", f"name: digits\nresources: {resources}\n")
    for flag in ("-y", "--dryrun"):
        error = user.fails(f"up fleet.yaml {flag}", code=2).err
        assert said in error and "as provider local only emulates a cloud on this machine, write `provider:" in error
    assert user.cloud.living() == []


def test_the_problems_of_a_fleet_file_are_shown_with_their_lines(user):
    user.write("fleet.yaml", "name: digits\nprovder: local\nnodes: {min: -1}\n")
    said = user.fails("up fleet.yaml -y", code=2)
    assert "fleet.yaml:2: provder: unknown key; did you mean 'provider'?" in said.err
    assert "fleet.yaml:3: nodes.min: expected a whole number" in said.err


def test_a_timeout_that_is_no_duration_is_refused(user):
    assert "--timeout: expected a duration" in user.fails("up fleet.yaml -y --timeout soon", code=2).err


def test_two_commands_never_change_one_fleet_at_once(user):
    folder = Home(user.home).folder("digits")
    with folder.locked():
        assert "is changing fleet 'digits'" in user.fails("up fleet.yaml -y").err
    user.ok("up fleet.yaml -y")  # the lock went with its holder


def test_a_name_may_be_used_again_and_the_old_bill_is_not_mixed_in(up):
    before = set(up.cloud.living())
    up.ok("down -y")
    up.ok("up fleet.yaml -y")
    billed = {line["host"] for line in json.loads(up.ok("cost -o json").out)["lines"]}
    assert len(billed) == 4 and billed.isdisjoint(before)
    up.ok("down -y")
    assert up.cloud.living() == []
