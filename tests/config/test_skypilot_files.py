"""What a SkyPilot task file means here: keys that are kept, renamed, noted and refused, and what `up` still needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spotfleet import plugins
from spotfleet.config import FleetFile, Given, no_provider, parse, plugin_sections
from spotfleet.errors import UsageError
from spotfleet.model import Autostop, Need

FILE = Path("/work/task.yaml")
THERE = ", ".join(plugins.names())


def draft(text: str, given: Given = Given(), **environ: str) -> FleetFile:
    return parse(text, FILE, environ, given=Given(given.infra, given.envs, given.secrets, draft=True))


def before_up(text: str) -> list[str]:
    """What must be done before `up`, without the file's name."""
    return [line.removeprefix(f"{FILE}:") for line in draft(text).before_up]


def refusals(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        draft(text)
    lines = [line.strip().removeprefix(f"{FILE}:") for line in str(caught.value).splitlines()]
    return lines if len(lines) == 1 else lines[1:]


def test_a_task_file_becomes_a_fleet_with_its_sizes_markets_and_variables():
    found = draft("""
name: Train_BERT
num_nodes: 2
resources:
  infra: AWS/us-east-1
  cpus: 8+
  memory: 32GB+
  disk_size: 512
  labels: {team: vision}
  any_of: [{use_spot: true}, {use_spot: false}]
  autostop: {idle_minutes: 10, wait_for: jobs, down: true}
envs: {DEBUG: true, N: 3}
setup: pip install torch
run: python train.py
""")
    spec = found.spec
    sizes = {"min_vcpus": 8.0, "min_memory_gib": 32.0}
    assert spec.any_of == (Need("us-east-1", **sizes), Need("us-east-1", use_spot=False, **sizes))
    assert (spec.name, spec.provider, spec.nodes.target) == ("train-bert", "aws", 2)
    assert (spec.tags, spec.autostop, spec.envs) == ({"team": "vision"}, Autostop(600.0), {"DEBUG": "true", "N": "3"})
    assert spec.section["disk_gib"] == 512 and not found.before_up
    assert found.notes == (
        "the fleet's name is 'train-bert': names have small letters, digits and '-'",
        "`autostop.wait_for` changes nothing here: a fleet is idle when it has no job")


@pytest.mark.parametrize(("text", "kinds"), [
    ("V100", [("V100", 1)]), ("a10g:4", [("a10g", 4)]), ("{A100: 8}", [("A100", 8)]),
    ("{'L4:1': null, T4: null}", [("L4", 1), ("T4", 1)]), ("[A100-40GB:8, H100:8]", [("A100", 8), ("H100", 8)]),
    ("80GB:8", [("A100-80GB", 8), ("H100", 8), ("H100-MEGA", 8)]), ("'amd:100GB+'", [("MI300X", 1)]),
    ("[T4, 141GB+:8]", [("T4", 1), ("H200", 8), ("B200", 8), ("GB200", 8), ("B300", 8)]),
])
def test_accelerators_have_all_their_forms(text, kinds):
    needs = draft(f"resources: {{infra: aws, accelerators: {text}}}").spec.any_of
    assert [(n.accelerator, n.accelerator_count) for n in needs] == kinds
    assert draft(f"resources: {{infra: aws, gpus: {text}}}").spec.any_of == needs


@pytest.mark.parametrize(("text", "sizes"), [
    ("cpus: 4", (4.0, 4.0, 0.0, 0.0)), ("cpus: 2.5+", (2.5, 0.0, 0.0, 0.0)), ("memory: 64", (0.0, 0.0, 64.0, 64.0)),
    ("memory: 1TB+", (0.0, 0.0, 1024.0, 0.0)),
])
def test_sizes_are_exact_without_a_plus(text, sizes):
    (need,) = draft(f"resources: {{infra: aws, {text}}}").spec.any_of
    assert (need.min_vcpus, need.max_vcpus, need.min_memory_gib, need.max_memory_gib) == sizes


def test_ordered_alternatives_keep_their_order():
    text = "provider: aws\nresources: {%s: [{accelerators: [A100, H100]}, {use_spot: false}]%s}"
    order = [(n.accelerator, n.use_spot, n.turn) for n in draft(text % ("ordered", "")).spec.any_of]
    assert order == [("A100", True, 0), ("H100", True, 0), ("", False, 1)]
    assert draft(text % ("any_of", ", in_order: true")).spec.any_of == draft(text % ("ordered", "")).spec.any_of
    assert {n.turn for n in draft(text % ("any_of", "")).spec.any_of} == {0}


@pytest.mark.parametrize(("text", "note"), [
    ("ports: [8265, 9090]", "`ports` stay closed to the internet: `spotfleet port-forward 8265` reaches one through "
                            "SSH"),
    ("disk_tier: best", "`disk_tier` changes nothing: disks are of the provider's usual kind"),
    ("job_recovery: {strategy: FAILOVER}", "`job_recovery` changes nothing: jobs always recover"),
    ("job_recovery: {max_restarts_on_errors: 3}",
     "`job_recovery` changes nothing: jobs always recover from lost hosts; after errors of their own with `train "
     "--max-restarts 3`"),
    ("priority: 5", "`priority` changes nothing here: `spotfleet train --priority 5` is for a job"),
    ("spot_recovery: FAILOVER", "`spot_recovery` changes nothing: jobs always recover"),
    ("image_id: 'skypilot:gpu-ubuntu-2004'", "`image_id`: an image of SkyPilot, or one for each region, is not used; "
                                             "hosts get the provider's usual image"),
    ("region: us-west-2, image_id: {us-east-1: ami-0a1b2c3d4e5f67890}", "`image_id`: an image of SkyPilot, or one for "
                                                                        "each region, is not used"),
    ("any_of: [{infra: aws}, {infra: lambda}]",
     f"1 alternative left out: no provider for lambda is installed; there is {THERE}"),
])
def test_a_key_that_changes_nothing_is_noted(text, note):
    assert any(found.startswith(note) for found in draft(f"provider: aws\nresources: {{{text}}}").notes)


@pytest.mark.parametrize("region", ["infra: aws/us-west-2", "cloud: aws, region: us-west-2", "region: us-west-2"])
def test_an_image_for_each_region_is_that_of_the_region(region):
    images = "{us-east-1: ami-0a1b2c3d4e5f67890, us-west-2: ami-0b1b2c3d4e5f67890}"
    found = draft(f"provider: aws\nresources: {{{region}, image_id: {images}}}")
    assert found.spec.section["image"] == "ami-0b1b2c3d4e5f67890" and found.notes == ()


def test_a_configuration_of_skypilot_is_noted_with_our_keys_for_its_network_and_its_mounts():
    (note,) = draft("provider: aws\nrun: x\nconfig: {aws: {vpc_name: x, use_internal_ips: true}, "
                    "docker: {run_options: [-v /a:/a]}}").notes
    assert note == ("`config` is for SkyPilot itself and changes nothing here; for use_internal_ips, vpc_name write "
                    "the network and `public_addresses` under `aws`; folders of `docker.run_options` are `container: "
                    "{image: ..., mounts: ...}`")


@pytest.mark.parametrize(("text", "said"), [
    ("resources: {infra: k8s/context}",
     "1: resources.infra: Kubernetes runs no fleet: a host is a machine of its own, in a cloud or reached over SSH"),
    ("resources:\n  cloud: lambda\n  region: us",
     f"1: resources.infra: no provider for lambda is installed; there is {THERE}"),
    ("resources:\n  any_of:\n  - infra: elsewhere\n",
     f"2: resources.any_of: no provider for elsewhere is installed; there is {THERE}"),
    ("run: x\nservice: {replicas: 2}", "2: service: replicas behind a load balancer are not run here; `spotfleet "
                                       "port-forward` reaches a port of one host"),
    ("run: x\nvolumes: {/mnt: v}",
     "2: volumes: the volumes of another program cannot be mounted; name data under `file_mounts`"),
    ("resources: {accelerators: 'v100:0.5'}",
     "1: resources.accelerators: v100:0.5 is a share of a GPU; a host has whole ones: v100:1"),
    ("resources: {accelerators: 7GB}",
     "1: resources.accelerators: no GPU with 7GB is known; name one, such as A100-80GB:8"),
    ("run: x\nfile_mounts:\n  /a: {source: 's3://data', mode: MOUNTED}",
     "3: file_mounts./a: expected mode COPY, MOUNT or MOUNT_CACHED, got 'MOUNTED'"),
    ("run: x\nfile_mounts:\n  /b: ./b\n  s3://data: /a",
     "4: file_mounts.s3://data: expected the target before the source, such as /data: s3://data"),
    ("resources: {accelerators: tpu-v2-8, accelerator_args: {tpu_vm: false}}",
     "1: resources.accelerators: tpu-v2-8 is a TPU; workers run on GPUs or CPUs"),
    ("provider: aws\nresources: {any_of: [{disk_size: 9}]}", "2: resources.any_of[0]: disk_size, image_id and "
     "network_tier are of the whole fleet; write them above `any_of`"),
    ("provider: aws\nresources: {image_id: my-image}",
     "2: resources.image_id: expected spotfleet, an image such as ami-0a1b2c3d4e5f67890, or an SSM parameter such as "
     "/aws/service/deeplearning/ami/.../ami-id, got 'my-image'"),
])
def test_a_key_without_a_meaning_here_is_refused_in_one_line(text, said):
    assert refusals(text) == [said]


@pytest.mark.parametrize(("text", "said"), [
    ("infra: aws}\nenvs: {TOKEN: null", "2: envs.TOKEN: has no value here and none in your environment; `export "
                                        "TOKEN=...`"),
])
def test_what_is_only_missing_before_up_stands_in_no_way_of_a_plan(text, said):
    task = f"resources: {{{text}}}"
    assert before_up(task) == [said]
    with pytest.raises(UsageError, match="has no value"):
        parse(task, FILE, {})


def test_a_variable_of_the_command_line_goes_over_the_file_and_gives_a_value_to_one_without():
    found = draft("resources: {infra: aws}\nenvs: {A: 1, B: null}", Given(envs={"A": "2", "B": "x", "C": "y"}))
    assert (found.spec.envs, found.before_up) == ({"A": "2", "B": "x", "C": "y"}, ())


@pytest.mark.parametrize("text", ["run: python train.py", "resources: {accelerators: V100}", "resources: {cpus: 2+}",
                                  "resources: {any_of: [{accelerators: T4}, {accelerators: L4}]}"])
def test_a_task_that_names_no_provider_is_for_no_emulation(text):
    assert draft(text).chosen and draft(text).spec.provider == "aws"
    assert refused_up(text) == f"{FILE}:1: {no_provider(plugin_sections.clouds())}"
    assert "write `infra: aws`" in refused_up(text)


def refused_up(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(text, FILE, {})
    return str(caught.value)


@pytest.mark.parametrize("text", ["name: a", "nodes: 2\nrun: python x.py", "resources: {instance_type: cpu.small}",
                                  "provider: local\nrun: x", "resources: {infra: local}\nrun: x"])
def test_a_file_of_ours_without_a_provider_stays_local(text):
    found = draft(text)
    assert (found.chosen, found.spec.provider) == (False, "local")


def test_the_command_line_names_the_provider_of_any_file():
    text = "resources: {infra: gcp/us-central1, accelerators: T4, any_of: [{infra: gcp}, {use_spot: false}]}"
    found = draft(text, Given(infra="aws/us-west-2"))
    assert [(n.region, n.use_spot) for n in found.spec.any_of] == [("us-west-2", True), ("us-west-2", False)]
    assert (found.spec.provider, found.notes) == ("aws", ())


def test_sizes_of_the_command_line_go_over_those_of_the_file_and_of_its_alternatives():
    text = ("provider: aws\nnodes: {min: 1, max: 2}\nresources: {gpus: T4, cpus: 4, any_of: [{accelerators: L4}, "
            "{accelerators: A10G, use_spot: true}]}\nrun: x")
    over = Given(resources={"accelerators": "A100:8", "use_spot": False}, num_nodes=3)
    spec = parse(text, FILE, {}, given=over).spec
    need = Need(accelerator="A100", accelerator_count=8, use_spot=False, min_vcpus=4.0, max_vcpus=4.0)
    assert (spec.any_of, spec.nodes.target) == ((need,), 3)


def test_hosts_with_the_best_network_are_placed_together():
    text = "resources: {infra: aws, accelerators: 'H100:8', network_tier: best}\nnum_nodes: "
    assert [draft(f"{text}{n}").spec.placement for n in (1, 2)] == ["spread", "cluster"]


def test_mounts_keep_their_targets_and_buckets_get_their_scheme():
    found = draft("""
resources: {infra: aws}
envs: {DATA: sky-data, STORE: gcs, MISSING: }
file_mounts:
  /data: {source: "s3://public/data", mode: COPY}
  ~/models: "gs://${DATA}/models"
  ~/sky_workdir/ckpt: ./ckpt
  /code: {name: code, source: ./code, mode: COPY}
  /checkpoints: {name: $DATA, store: $STORE, mode: MOUNT}
  /cache: {source: "s3://cache", mode: MOUNT_CACHED}
  /later: {name: $MISSING}
  /other: {name: x, store: nebius}
""")
    assert found.spec.file_mounts == {
        "/data": "s3://public/data", "~/models": "gs://sky-data/models", "~/sky_workdir/ckpt": "/work/ckpt",
        "/code": "/work/code"}
    assert found.spec.mounted == {"/checkpoints": "gs://sky-data", "/cache": "s3://cache"}
    assert [line.removeprefix(f"{FILE}:") for line in found.before_up] == [
        "3: envs.MISSING: has no value here and none in your environment; `export MISSING=...`",
        "11: file_mounts./later: names the variable MISSING, which has no value under `envs`; `--env MISSING=...`",
        "12: file_mounts./other: nebius is no object store that hosts can read; name a bucket of s3, gcs, azure"]


def test_a_folder_that_skypilot_would_put_into_a_bucket_is_no_place_for_results():
    found = draft("run: x\nfile_mounts: {/out: {name: results, source: ./out, mode: MOUNT}}")
    assert found.notes == ("file_mounts./out is shipped with the working directory; no bucket is made of it; what a "
                           "job writes there stays on its host",)


def test_the_working_directory_of_skypilot_is_that_of_the_job(tmp_path: Path):
    found = draft("run: 'cd / && echo ~/sky_workdir/a \"$HOME/sky_workdir\" ~/sky_workdir2'")
    said = subprocess.run(["bash", "-c", found.spec.run], cwd=tmp_path, env={"HOME": "/h"}, capture_output=True,
                          text=True, check=True)
    assert said.stdout == f"{tmp_path}/a {tmp_path} /h/sky_workdir2\n"
    assert found.notes == ("~/sky_workdir in `run` is $SKY_WORKDIR here, the working directory of the job",)


def test_a_secret_is_never_written_into_a_mount():
    found = draft("resources: {infra: aws}\nsecrets: {KEY: hidden}\nfile_mounts: {/data: 's3://$KEY/data'}")
    assert found.spec.file_mounts == {} and "hidden" not in str(found.spec)
    assert "names the variable KEY, which has no value under `envs`" in found.before_up[0]


def test_a_secret_that_the_command_line_gives_stays_one():
    text = "resources: {infra: aws}\nsecrets: {KEY: null}\nfile_mounts: {/data: 's3://b/$KEY'}"
    found = draft(text, Given(envs={"KEY": "hidden"}, secrets={"MORE": "m"}))
    assert found.secrets == {"KEY": "hidden", "MORE": "m"} and "hidden" not in str(found.spec)


def test_a_pipeline_is_told_from_a_broken_file():
    assert "2: holds several documents" in refused_up("run: a\n---\nrun: b\n")
