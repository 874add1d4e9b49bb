"""`horovodrun` and `convert`: what their arguments mean, and which are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from spotfleet.cli import habits
from spotfleet.cli.app import app
from spotfleet.cli.launchers.horovodrun import HorovodRun, fleet_file, hosts_of, notes, own_address, program, timeline
from spotfleet.cli.launchers.launch import of_file
from spotfleet.config.foreign.horovod import HorovodHosts
from spotfleet.errors import UsageError
from tests.support.cli.cli_user import User

# --- horovodrun


@pytest.mark.parametrize(("words", "found"), [
    ("python train.py --lr 3", ("train.py", ("--lr", "3"), "")), ("python3.11 -u a/b.py", ("a/b.py", (), "")),
    ("./train.py", ("./train.py", (), "")), ("bash run.sh 'a b'", ("", (), "bash run.sh ''\"'\"'a' 'b'\"'\"''")),
    ("python -m x", ("", (), "python -m x")),
])
def test_the_command_is_a_script_with_arguments_or_any_other(words, found):
    assert program(words.split()) == found


def test_of_a_list_the_first_hosts_that_hold_all_workers_are_used():
    for workers in (3, 4):
        assert hosts_of(HorovodRun(workers, hosts="a:2,b:2,c:2")).hosts == (("a", 2), ("b", 2))
    assert hosts_of(HorovodRun(3, 2, 6, hosts="a:2,b:2,c:2")).hosts == (("a", 2), ("b", 2), ("c", 2))
    assert hosts_of(HorovodRun(2)).here
    with pytest.raises(UsageError, match="-np 7: the hosts have 6 slots"):
        hosts_of(HorovodRun(7, hosts="a:2,b:2,c:2"))


def test_the_command_of_the_article_is_a_fleet_that_finds_its_hosts_by_the_script(tmp_path: Path):
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho node1\n")
    given = HorovodRun(8, 4, 12, slots=4, script=script, dispatcher="d", ssh_port=2222, identity_file="/k")
    with pytest.raises(UsageError, match="is not there, or is not executable"):
        hosts_of(given)
    script.chmod(0o755)
    data = fleet_file(given, hosts_of(given), "train.py")
    assert data.pop("name").startswith("train-")
    assert data == {
        "provider": "ssh", "nodes": {"min": 2, "max": 3}, "environment": {"inherit": True},
        "ssh": {"dispatcher": "d", "port": 2222, "identity_file": "/k", "discovery_script": str(script), "slots": 4}}


def test_this_machine_runs_the_dispatcher_at_its_address_on_the_way_to_the_hosts():
    assert own_address(HorovodHosts((("127.0.0.2", 1),))).startswith("127.")


@pytest.mark.parametrize(("line", "said"), [
    ("-np 4", "there is no command"), ("-np 4 --min-np 5 python x.py", "expected --min-np <= -np <= --max-np"),
    ("-np 4 --max-np 2 python x.py", "expected --min-np <= -np <= --max-np"),
    ("-np 1 -H a:1 --hostfile h python x.py", "name the same thing; keep one of them"),
    ("-np 1 -H a:b python x.py", "expected HOST:SLOTS, got 'a:b'"),
    ("-np 1 --hostfile nowhere python x.py", "--hostfile nowhere: "),
    ("-np 1 --config-file c.yaml python x.py", "No such option: --config-file"), ("--check-build", "No such option"),
    ("--log-level DEBUG --mpi --network-interface eth0 -np 4 -H a:2 python x.py", "-np 4: the hosts have 2 slots"),
])
def test_flags_that_do_not_fit_are_refused_before_anything_is_made(user: User, line, said):
    assert said in user.fails(f"horovodrun {line}", code=2).err
    assert user.cloud.living() == []


def test_flags_that_change_nothing_here_are_noted():
    here = HorovodHosts((("a", 1),))
    assert notes(HorovodRun(1), here) == []
    found = notes(HorovodRun(1, engine=True, nics=True, reset_limit=3), here)
    assert [line.split()[0] for line in found] == ["flags", "--network-interface", "--reset-limit"]


def test_a_timeline_counts_microseconds_from_the_first_event():
    found = timeline([{"kind": "A", "at": 5.0, "host": "h"}, {"kind": "B", "at": 6.5, "why": "x", "list": [1]}])
    assert [(e["name"], e["ts"], e["pid"]) for e in found] == [("A", 0, "h"), ("B", 1_500_000, "fleet")]
    assert found[1]["args"] == {"kind": "B", "at": 6.5, "why": "x"}


# --- other programs' commands


@pytest.mark.parametrize(("line", "instead"), [
    ("stop fleet", "`spotfleet down`"), ("show-gpus", "`spotfleet offers --gpus A100:8`"),
    ("jobs launch task.yaml", "`spotfleet launch FILE`"), ("torchrun train.py", "`spotfleet run --nodes N -- torchrun"),
    ("apply -f task.yaml", "`spotfleet convert FILE`"), ("nonsense", " --help"),
    ("run --nodes 2 torchrun a.py", "spotfleet run -- torchrun a.py"),
])
def test_a_command_of_another_program_is_answered_with_ours(user: User, line, instead):
    assert instead in user.fails(line, code=2).err.partition("hint: ")[2]


def test_a_task_file_is_no_command_of_a_machine(user: User):
    user.write("task.yaml", "run: x\n")
    assert habits.is_task_file(["task.yaml"])
    assert not any(map(habits.is_task_file, (["nowhere.yaml"], ["cat", "task.yaml"], [])))


def test_torchrun_alone_on_several_hosts_is_noted():
    assert "leave the flag out" in habits.note("cd a && torchrun --nproc_per_node=2 --standalone x.py", 2)
    assert habits.note("torchrun --standalone x.py", 1) == habits.note("torchrun x.py", 2) == ""


def test_each_named_command_exists_and_no_other_programs_word_is_one_of_ours():
    ours = {command.name or command.callback.__name__ for command in app.registered_commands}
    ours |= {group.name for group in app.registered_groups}
    named = {word for text in habits.OURS.values() for word in re.findall(r"`spotfleet ([a-z-]+)", text)}
    assert named <= ours and not set(habits.OURS) & ours


# --- launch


def test_launch_takes_the_sizes_and_the_file_of_variables_that_sky_launch_takes(user: User):
    user.write("task.yaml", "name: t\nresources: {infra: local, cpus: 9+}\nenvs: {A: , B: }\nrun: x\n")
    user.write(".env", "# mine\nexport A='1 2'\nB=3\n")
    said = user.ok("launch task.yaml --num-nodes 3 --cpus 1+ --no-use-spot -i 5 -r --env-file .env --dryrun")
    assert "3 hosts" in said.out and " spot " not in said.out
    assert of_file(Path(".env")) == {"A": "1 2", "B": "3"}
    user.write(".env", "A 1\n")
    assert ".env:1: expected NAME=VALUE" in user.fails("launch task.yaml --env-file .env --dryrun", code=2).err


# --- convert


def test_convert_prints_a_fleet_file_and_what_it_left_out(user: User):
    user.write("ray.yaml", "cluster_name: r\nmax_workers: 2\nprovider: {type: aws, region: us-east-1}\n"
                           "head_node: {InstanceType: m5.large}\nworker_nodes: {InstanceType: c5.xlarge}\n"
                           "upscaling_speed: 1.0\n")
    said = user.ok("convert ray.yaml")
    assert yaml.safe_load(said.out)["nodes"] == {"min": 0, "max": 2}
    assert "left out: upscaling_speed: the dispatcher decides when to launch" in said.err
    assert json.loads(user.ok("convert ray.yaml -o json").out) == yaml.safe_load(said.out)
    user.write("made.yaml", said.out)
    assert "fleet r on aws" in user.ok("up made.yaml --dryrun").out
    assert "`spotfleet convert ray.yaml > fleet.yaml` makes one" in user.fails("up ray.yaml", code=2).err


def test_convert_writes_commands_as_a_block(user: User):
    user.write("d.dstack.yml", "type: task\nname: t\ncommands: [pip install x, python train.py]\n")
    assert "\n  pip install x\n  python train.py\n" in user.ok("convert d.dstack.yml").out


def test_convert_takes_horovods_hosts_in_each_form(user: User):
    (user.work / "find.sh").write_text("#!/bin/sh\necho a:4\n")
    user.write("hostfile", "a slots=4\n")
    for words, key in (("-H a:4", "hosts"), ("hostfile", "hosts"), ("find.sh --slots 4", "discovery_script")):
        assert key in yaml.safe_load(user.ok(f"convert {words}").out)["ssh"]


@pytest.mark.parametrize(("words", "said"), [
    ("", "nothing to convert"), ("gone", "gone cannot be read"), ("fleet.yaml", "is no file of Ray or dstack"),
    ("bad", "bad is no hostfile: line 1: expected HOST:SLOTS, got 'a b c'"),
])
def test_convert_says_what_it_takes(user: User, words, said):
    user.write("bad", "a b c\n")
    assert said in user.fails(f"convert {words}", code=2).err
