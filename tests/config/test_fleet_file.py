"""What a fleet file may say, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.config import load, parse
from spotfleet.errors import UsageError
from spotfleet.model import Autostop, CheckpointSpec, FleetSpec, Need, Nodes, ResizeSpec

FILE = Path("/work/fleet.yaml")


def spec(text: str, **environ: str) -> FleetSpec:
    return parse(text, FILE, environ).spec


SOURCE = ("the path of a local file or folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
          "az://CONTAINER/PREFIX")


def problems(text: str, **environ: str) -> list[str]:
    """What is said about a wrong file, one line per problem, without the file's name."""
    with pytest.raises(UsageError) as caught:
        parse(text, FILE, environ)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    if len(lines) > 1:
        assert lines.pop(0) == f"{FILE} has {len(lines)} problems"
    return [line.removeprefix(f"{FILE}:") for line in lines]


def test_a_full_file_becomes_a_spec():
    assert spec("""
name: digits
provider: local
workdir: code
nodes: {min: 2, target: 3, max: 4}
resources:
  accelerators: V100:8
  region: us-east-1
  max_hourly_cost: 1.25
  any_of:
    - {zone: us-east-1a}
    - {use_spot: false, max_hourly_cost: 3}
interruption_behavior: stop
dispatcher: {instance_type: t3.small}
checkpoint: {interval: 90s, keep: 3}
resize: {policy: scale-lr, warmup_steps: 100, growth: {0: 2, 30: 4}, max_join: 1, max_leave: 2, every: 1m}
autostop: {idle_minutes: 10, down: false}
max_lifetime: 1h30m
envs: {EPOCHS: 3, HOME_DIR: /x}
file_mounts: {data/raw: ../raw, more: s3://bucket/more/}
setup_timeout: 2m
setup: pip install x
run: python train.py
tags: {team: vision}
""") == FleetSpec(
        name="digits", provider="local", workdir="/work/code", nodes=Nodes(2, 3, 4),
        any_of=(Need("us-east-1", "us-east-1a", "", "V100", 8, True, 1_250_000),
                Need("us-east-1", "", "", "V100", 8, False, 3_000_000)),
        interruption_behavior="stop", dispatcher=Need(instance_type="t3.small", use_spot=False),
        checkpoint=CheckpointSpec(90.0, 3), resize=ResizeSpec("scale-lr", 100, ((0, 2), (30, 4)), 1, 2, 60.0),
        autostop=Autostop(600.0, False), max_lifetime_s=5400.0,
        envs={"EPOCHS": "3", "HOME_DIR": "/x"}, file_mounts={"data/raw": "/raw", "more": "s3://bucket/more/"},
        setup="pip install x", setup_timeout_s=120.0,
        run="python train.py", tags={"team": "vision"},
    )


def test_a_file_that_says_almost_nothing_is_one_local_spot_host_named_after_the_file():
    assert spec("provider: local") == FleetSpec(name="fleet", workdir="/work")


@pytest.mark.parametrize(("text", "expected"), [
    ("num_nodes: 3", Nodes(3, 3, 3)),
    ("nodes: 3", Nodes(3, 3, 3)),
    ("nodes: 2..5", Nodes(2, 5, 5)),
    ("nodes: {min: 2, max: 4}", Nodes(2, 4, 4)),
    ("nodes: {target: 3}", Nodes(1, 3, 3)),
    ("nodes: {min: 2}", Nodes(2, 2, 2)),
])
def test_nodes_may_be_a_number_a_range_or_a_mapping(text, expected):
    assert spec(text).nodes == expected


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400), ("0s", 0),
                                               ("0.5h", 1800), ("1h 30m", 5400)])
def test_durations_are_numbers_with_units(text, seconds):
    assert spec(f"max_lifetime: {text}").max_lifetime_s == seconds


@pytest.mark.parametrize("text", ["accelerators: [V100, A100:8]", "accelerators: {V100: 1, A100: 8}"])
def test_several_accelerators_are_alternatives(text):
    assert spec(f"provider: local\nresources: {{{text}}}").any_of == (Need(accelerator="V100", accelerator_count=1),
                                                                      Need(accelerator="A100", accelerator_count=8))


def test_infra_names_provider_region_and_zone_as_in_skypilot():
    assert spec("resources: {infra: local/us/us-a}").any_of == (Need("us", "us-a"),)
    assert spec("resources: {infra: '*/us'}").any_of == (Need("us"),)


def test_autostop_may_stand_under_resources_as_in_skypilot():
    assert spec("resources: {autostop: {idle_minutes: 5}}").autostop == Autostop(300.0, True)
    assert spec("autostop: 10m").autostop == Autostop(600.0, True)
    assert spec("autostop: false").autostop == Autostop()


def test_sections_left_empty_take_their_defaults():
    assert spec("name: a\nenvs:\nresources:\nsetup:\n") == FleetSpec(name="a", workdir="/work")


TARGET = ("the absolute path of a folder that outlives the dispatcher, such as a mounted file system, or "
          "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX")


@pytest.mark.parametrize(("given", "target", "folder", "url"), [
    ("/mnt/kept/", "/mnt/kept", "/mnt/kept", ""),
    ("s3://bucket", "s3://bucket", "", "s3://bucket"),
    ("gs://my-bucket.eu/runs/a/", "gs://my-bucket.eu/runs/a", "", "gs://my-bucket.eu/runs/a"),
    ("az://container/runs", "az://container/runs", "", "az://container/runs"),
])
def test_checkpoints_go_to_a_mounted_folder_or_to_an_object_store(given, target, folder, url):
    found = spec(f"checkpoint: {{target: {given}}}").checkpoint
    assert (found.target, found.folder, found.url) == (target, folder, url)
    assert ("not copied there" in found.leaves_out) is bool(url)


def test_a_variable_may_have_a_name_that_yaml_reads_as_a_truth_value():
    assert spec("envs: {ON: 1, No: x, yes: true}").envs == {"ON": "1", "No": "x", "yes": "true"}


@pytest.mark.parametrize("word", ["task", "stop", "auth"])
def test_a_key_that_only_looks_alike_is_no_suggestion(word):
    with pytest.raises(UsageError, match=f"1: {word}: unknown key; expected one of name, "):
        spec(f"{word}: 1")


@pytest.mark.parametrize(("text", "said"), [
    ("provder: local", "1: provder: unknown key; did you mean 'provider'?"),
    ("name: a\nresources:\n  acelerators: V100",
     "3: resources.acelerators: unknown key; did you mean 'accelerators'?"),
    ("resources:\n  any_of:\n  - {zone: a}\n  - {use_sptt: true}",
     "4: resources.any_of[1].use_sptt: unknown key; did you mean 'use_spot'?"),
    ("instance_type: m5", "1: instance_type: unknown key; it belongs under `resources`"),
    ("resources: {setup: x}", "1: resources.setup: unknown key; it belongs to the top of the file"),
    ("max_workers: 4", "1: max_workers: unknown key; use `nodes: {max: ...}`"),
    ("idle_timeout_minutes: 5", "1: idle_timeout_minutes: unknown key; use `autostop: {idle_minutes: ...}`"),
    ("name: a\non: [preempted]", "2: on: unknown key; use `notify: {events: [...]}`"),
    ("notify: {on: [failed]}", "1: notify.on: unknown key; use `notify: {events: [...]}`"),
    ("notify: {off: [failed]}", "1: notify.off: unknown key; expected one of webhook, command, events"),
    ("on_demand: 1", "1: on_demand: unknown key; did you mean 'on_demand_base'?"),
    ("provider: local\nresources: {cpus: few}",
     "2: resources.cpus: expected a number such as 4, or \"4+\" for at least so many, got 'few'"),
    ("nodes: {min: 2, zzz: 3}", "1: nodes.zzz: unknown key; expected one of min, target, max, idle_after"),
    ("interruption_behavior: stpo",
     "1: interruption_behavior: expected terminate or stop, got 'stpo'; did you mean 'stop'?"),
    ("provider: locale",
     "1: provider: unknown provider 'locale'; expected one of aws, gcp, local, ssh; did you mean 'local'?"),
    ("resources: {infra: locale/us}",
     "1: resources.infra: no provider for locale is installed; there is aws, gcp, local, ssh; did you mean 'local'?"),
    ("nodes:\n  min: two", "2: nodes.min: expected a whole number of at least 0, got 'two'"),
    ("nodes:\n  max: 0", "2: nodes.max: expected a whole number of at least 1, got 0"),
    ("num_nodes: true", "1: num_nodes: expected a whole number of at least 1, got True"),
    ("max_workers: 4", "1: max_workers: unknown key; use `nodes: {max: ...}`"),
    ("idle_timeout_minutes: 5", "1: idle_timeout_minutes: unknown key; use `autostop: {idle_minutes: ...}`"),
    ("on_demand: 1", "1: on_demand: unknown key; did you mean 'on_demand_base'?"),
    ("nodes: few", "1: nodes: expected {min: 2, target: 3, max: 4}, or \"2..4\", or 3, got 'few'"),
    ("nodes:\n  min: 3\n  target: 2",
     "2: nodes.min: expected 0 <= min <= target <= max, but min 3 is above target 2"),
    ("nodes:\n  min: 1\n  target: 3\n  max: 2",
     "3: nodes.target: expected 0 <= min <= target <= max, but target 3 is above max 2"),
    ("nodes: 3..2", "1: nodes.min: expected 0 <= min <= target <= max, but min 3 is above max 2"),
    ("num_nodes: 2\nnodes: 2", "1: num_nodes: nodes means the same; keep one of them"),
    ("max_lifetime: 30",
     "1: max_lifetime: expected a duration such as \"90s\", \"10m\" or \"2h\", got 30; write \"30s\""),
    ("orphan_after: 19s",
     "1: orphan_after: expected at least \"20s\", or \"0s\" for never: a dispatcher that is restarted is away for up "
     "to 12 s, got '19s'"),
    ("checkpoint: {interval: 5 minutes}",
     "1: checkpoint.interval: expected a duration such as \"90s\", \"10m\" or \"2h\", got '5 minutes'"),
    ("resize: {policy: keep}", "1: resize.policy: expected none or keep-global-batch or scale-lr, got 'keep'"),
    ("resize: {warmup_steps: 9}",
     "1: resize.warmup_steps: is the way of policy scale-lr; write `policy: scale-lr`, or remove it"),
    ("resize: {growth: {5: 2}}",
     "1: resize.growth: expected epochs in order, 0 first, each with 1 or more workers, got {5: 2}"),
    ("resize: {growth: 3}", "1: resize.growth: expected EPOCH: WORKERS pairs such as {0: 2, 30: 4}, got 3"),
    ("resize: {max_join: -1}", "1: resize.max_join: expected a whole number of at least 0, got -1"),
    ("resize: {every: 5}", '1: resize.every: expected a duration such as "90s", "10m" or "2h", got 5; write "5s"'),
    ("checkpoint: {keep: 0}", "1: checkpoint.keep: expected a whole number of at least 1, got 0"),
    ("checkpoint: {target: ./kept}", f"1: checkpoint.target: expected {TARGET}, got './kept'"),
    ("checkpoint: {target: file:///mnt/kept}",
     f"1: checkpoint.target: expected {TARGET}, got 'file:///mnt/kept'; write /mnt/kept"),
    ("checkpoint: {target: memory://}",
     f"1: checkpoint.target: expected {TARGET}, got 'memory://'; memory ends with the process that wrote to it"),
    ("checkpoint: {target: s3a://bucket}",
     f"1: checkpoint.target: expected {TARGET}, got 's3a://bucket'; did you mean 's3'?"),
    ("checkpoint: {target: s3:///prefix}", "1: checkpoint.target: expected s3://BUCKET/PREFIX, got 's3:///prefix'; "
                                           "'' is no name of a bucket"),
    ("checkpoint: {target: az://}", "1: checkpoint.target: expected az://CONTAINER/PREFIX, got 'az://'; "
                                    "'' is no name of a container"),
    ("checkpoint: {target: gs://bucket/a/../b}",
     "1: checkpoint.target: expected gs://BUCKET/PREFIX, got 'gs://bucket/a/../b'; "
     "a prefix is of letters, digits and ._=+@-, with / between them"),
    ("autostop: {idle_minutes: -1}", "1: autostop.idle_minutes: expected a number of at least 0, got -1"),
    ("resources: {max_hourly_cost: 0}",
     "1: resources.max_hourly_cost: expected US dollars per hour, above 0, got 0"),
    ("provider: local\nresources: {accelerators: V100:x}",
     "2: resources.accelerators: expected NAME or NAME:COUNT such as A100:8, or a list of them, got 'V100:x'"),
    ("resources: {any_of: []}", "1: resources.any_of: expected at least one alternative"),
    ("resources: {any_of: {zone: a}}", "1: resources.any_of: expected a list"),
    ("resources: V100",
     "1: resources: expected `key: value` lines with infra, region, zone, instance_type, cpus, memory, "
     "max_hourly_cost, accelerators, use_spot, disk_size, image_id, network_tier, any_of, in_order, autostop"),
    ("setup: 3", "1: setup: expected text, got 3; put it in quotes"),
    ("name: big-d", "1: name: expected a name that does not end in '-d', got 'big-d'"),
    ("name: Big Fleet", "1: name: expected small letters, digits and '-', a letter first, at most 40, "
                        "got 'Big Fleet'; write big-fleet"),
    ("dispatcher: {use_spot: true}", "1: dispatcher.use_spot: the dispatcher is always on demand; remove this"),
    ("file_mounts: {../data: x}", "1: file_mounts: expected a name inside the working directory, or a path such as "
                                  "/data or ~/data, got '../data'"),
    ("file_mounts: {/: x}", "1: file_mounts: expected a name inside the working directory, or a path such as "
                            "/data or ~/data, got '/'; a whole folder such as that is never replaced"),
    ("file_mounts: {data: s3a://some/x}", f"1: file_mounts: expected {SOURCE}, got 's3a://some/x'; did you mean 's3'?"),
    ("file_mounts: {data: gs://x}", f"1: file_mounts: expected {SOURCE}, got 'gs://x'; 'x' is no name of a bucket"),
    ("file_mounts: {data: az://box/a//b}",
     f"1: file_mounts: expected {SOURCE}, got 'az://box/a//b'; a prefix is of names with / between them"),
    ("file_mounts: {.: s3://some/x}", "1: file_mounts: expected a name inside the working directory, got '.'; "
                                      "s3://some/x gets a folder of its own there"),
    ("envs: {SPOTFLEET_X: 1}",
     "1: envs: expected the name of an environment variable, got 'SPOTFLEET_X'; SPOTFLEET_ is reserved"),
    ("envs: {A: }", "1: envs.A: has no value here and none in your environment; `export A=...`"),
    ("envs: {A: 1}\nsecrets:\n  A: x", "3: secrets.A: is also under envs; keep it here only"),
    ("name: a\nname: b", "1: name: is here a second time, on line 2"),
    ("- a", "1: expected `key: value` lines, got a list"),
    ("", "1: expected `key: value` lines, got an empty file"),
    ("name: [a", "1: not YAML: expected ',' or ']', but got '<stream end>'"),
])
def test_a_wrong_file_names_line_key_expectation_and_nearest_word(text, said):
    assert problems(text) == [said]


def test_all_problems_are_named_at_once_in_the_order_of_the_file():
    said = problems("provder: local\nnodes: {min: x}\nmax_lifetime: 3\nenvs: [a]\n")
    assert [line.split(":")[0] + line.split(":")[1] for line in said] == [
        "1 provder", "2 nodes.min", "3 max_lifetime", "4 envs"]


def test_the_list_of_keys_stands_in_one_problem_only():
    said = problems("qqq: 1\nzzz: 2\nnodes: {vvv: 3}\n")
    assert said[0].startswith("1: qqq: unknown key; expected one of name, ") and "resources" in said[0]
    assert said[1:] == ["2: zzz: unknown key",
                        "3: nodes.vvv: unknown key; expected one of min, target, max, idle_after"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"there is no file .*nothing\.yaml"):
        load(tmp_path / "nothing.yaml")


def test_an_anchor_that_holds_itself_is_refused():
    with pytest.raises(UsageError, match="holds itself"):
        spec("envs: &a {A: *a}")


def test_merged_lines_work_and_a_wrong_one_is_named_where_it_stands():
    assert spec("resources:\n  any_of:\n  - &x {zone: a}\n  - {<<: *x, region: r}").any_of == (
        Need(zone="a"), Need(region="r", zone="a"))


def test_variables_without_a_value_are_taken_from_the_environment():
    file = parse("envs: {A: }\nsecrets: {TOKEN: , OTHER: given}", FILE, {"A": "1", "TOKEN": "t0ken"})
    assert file.spec.envs == {"A": "1"}
    assert file.secrets == {"TOKEN": "t0ken", "OTHER": "given"}


def test_secrets_are_in_no_spec_and_in_no_text_made_of_the_file():
    file = parse("secrets: {TOKEN: hunter22}", FILE, {})
    assert "hunter22" not in repr(file) and "TOKEN" not in repr(file.spec)


@pytest.mark.parametrize("text", ["secrets: {TOKEN: [hunter22]}", "secrets: [hunter22]", "secrets: hunter22",
                                  "secrets: {TOKEN: hunter22}\nnodes: {min: x}",
                                  "secrets: {TOKEN: hunter22}\nname: [a"])
def test_an_error_never_shows_the_value_of_a_secret(text):
    assert "hunter22" not in "".join(problems(text))


def test_a_file_that_is_loaded_names_the_folders_and_files_that_do_not_exist(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text("name: a\nworkdir: code\nfile_mounts:\n  here: fleet.yaml\n  there: nowhere\n")
    with pytest.raises(UsageError) as raised:
        load(file, {})
    said = str(raised.value).splitlines()[1:]
    assert len(said) == 2
    assert said[0].endswith(f"fleet.yaml:2: workdir: expected a folder, but there is none at {tmp_path}/code")
    assert ":5: file_mounts.there: expected a file or folder" in said[1] and f"none at {tmp_path}/nowhere" in said[1]
    (tmp_path / "code").mkdir()
    (tmp_path / "nowhere").touch()
    assert load(file, {}).spec.workdir == str(tmp_path / "code")
