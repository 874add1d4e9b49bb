"""Files of Ray and dstack, and Horovod's lists of hosts, as fleet files: what is taken along, and what is left out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotfleet import catalog
from spotfleet.config import foreign, parse
from spotfleet.config.foreign import horovod
from spotfleet.config.gpus import MEMORY_GB
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need, Nodes

RAY = """
cluster_name: My_Cluster
max_workers: 4
upscaling_speed: 1.0
idle_timeout_minutes: 5
docker: {image: "own/image:latest-gpu", container_name: c}
provider: {type: aws, region: us-west-2, availability_zone: "us-west-2a,us-west-2b", cache_stopped_nodes: true}
auth: {ssh_user: ec2-user, ssh_private_key: ~/.ssh/key.pem}
head_node_type: head
available_node_types:
  head: {resources: {CPU: 2}, node_config: {InstanceType: m5.large, ImageId: ami-0a1b2c3d4e5f67890}}
  worker:
    min_workers: 1
    max_workers: 3
    resources: {GPU: 1}
    node_config:
      InstanceType: g5.xlarge
      ImageId: ami-0a1b2c3d4e5f67890
      InstanceMarketOptions: {MarketType: spot, SpotOptions: {MaxPrice: "0.9"}}
      BlockDeviceMappings: [{DeviceName: /dev/sda1, Ebs: {VolumeSize: 140}}]
      SubnetIds: [subnet-1]
      SecurityGroupIds: [sg-0a1b2c3d4e5f67890]
file_mounts: {/data: ../data}
rsync_exclude: ["**/.git"]
setup_commands: [pip install torch, pip install x]
worker_setup_commands: [nvidia-smi]
head_setup_commands: [pip install boto3]
head_start_ray_commands: [ray start --head]
worker_start_ray_commands: [ray start]
"""


def converted(text: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    found = foreign.convert(yaml.safe_load(text))
    assert found is not None
    return found.data, found.left_out


def spec(data: dict[str, Any]) -> FleetSpec:
    """The fleet file that a conversion has made, as `up` reads it."""
    return parse(yaml.safe_dump(data), Path("/work/fleet.yaml"), {"TOKEN": "x"}).spec


def test_a_cluster_file_of_ray_becomes_a_fleet_whose_head_is_the_dispatcher():
    data, left_out = converted(RAY)
    found = spec(data)
    place = {"instance_type": "g5.xlarge", "use_spot": True, "max_micros_h": 900_000}
    assert found.any_of == (Need("us-west-2", "us-west-2a", **place), Need("us-west-2", "us-west-2b", **place))
    assert (found.name, found.provider, found.nodes) == ("my-cluster", "aws", Nodes(1, 3, 3))
    assert found.dispatcher == Need(instance_type="m5.large", use_spot=False)
    assert (found.section["disk_gib"], found.section["image"], found.section["user"]) == (
        140, "ami-0a1b2c3d4e5f67890", "ec2-user")
    assert found.setup.endswith("\npip install torch\npip install x\nnvidia-smi\n") and found.autostop.idle_s == 300
    assert data["aws"]["networks"] == {"us-west-2": {"security_groups": ["sg-0a1b2c3d4e5f67890"]}}
    assert found.file_mounts == {"/data": "/data"} and found.container.image == "own/image:latest-gpu"
    assert {line.partition(":")[0] for line in left_out} == {
        "docker.container_name", "docker.image", "head",
        "upscaling_speed", "auth.ssh_private_key", "provider.cache_stopped_nodes",
        "rsync_exclude", "head_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
        "available_node_types.worker.node_config.SubnetIds"}


def test_each_setup_command_of_ray_has_a_shell_of_its_own_and_the_first_failure_ends_the_setup(tmp_path: Path):
    data, left_out = converted("cluster_name: a\nprovider: {type: aws, region: us-east-1}\nworker_nodes: {}\n"
                               "setup_commands: [cd /, pwd, true, false, echo not reached, echo x >> ~/.bashrc]\n")
    said = subprocess.run(["bash", "-c", data["setup"]], capture_output=True, text=True, check=False, cwd="/usr",
                          env={"PATH": os.defpath, "HOME": str(tmp_path)})
    assert (said.returncode, said.stdout) == (1, "/usr\n")
    assert not list(tmp_path.iterdir())
    assert any(line.startswith("setup_commands: `setup` and jobs read no ~/.bashrc") for line in left_out)


def test_workers_of_ray_have_the_image_the_commands_and_the_number_of_their_type():
    data, left_out = converted("""
cluster_name: a
provider: {type: gcp, region: us-central1}
docker: {image: common, head_image: h}
setup_commands: [echo a]
worker_setup_commands: [echo all]
head_node_type: head
available_node_types:
  head: {max_workers: 0, node_config: {machineType: n2-standard-2}}
  w:
    max_workers: 3
    docker: {worker_image: own}
    worker_setup_commands: [echo own]
    node_config:
      machineType: g2-standard-4
      disks: [{boot: true, initializeParams: {diskSizeGb: 70, sourceImage: projects/p/global/images/family/f}}]
""")
    assert (data["container"], data["nodes"]) == ("own", {"min": 0, "max": 3})
    assert data["setup"].splitlines()[1:] == ["echo a", "echo own"]
    assert data["gcp"] == {"disk": 70, "image": "projects/p/global/images/family/f"}
    assert [line.partition(":")[0] for line in left_out] == ["docker.head_image", "docker.image", "head"]


def test_a_cluster_file_of_ray_asks_for_ray_unless_its_workers_have_an_image():
    text = "cluster_name: a\nprovider: {type: aws, region: us-east-1}\nworker_nodes: {InstanceType: c5.xlarge}\n"
    assert converted(text)[0]["ray"] is True and spec(converted(text)[0]).ray is not None
    assert "ray" not in converted(text + "docker: {image: own}\n")[0]


@pytest.mark.parametrize("image", ["rayproject/ray:2.9.0-gpu", "docker.io/rayproject/ray-ml:latest", "rayproject/ray"])
def test_rays_own_image_becomes_ray_on_the_hosts(image: str):
    data, left_out = converted("cluster_name: a\nprovider: {type: aws, region: us-east-1}\n"
                               f"docker: {{image: \"{image}\"}}\nworker_nodes: {{InstanceType: c5.xlarge}}\n")
    assert "container" not in data and spec(data).ray is not None
    assert left_out == (f"docker.image: {image} is Ray itself: hosts get Ray by `ray`; install its other packages by "
                        "`setup`",)


TYPES = """
cluster_name: several-types-of-workers-with-long-name
max_workers: 6
idle_timeout_minutes: 2
provider: {type: aws, region: us-west-2, availability_zone: "us-west-2a,us-west-2b"}
head_node_type: head
available_node_types:
  head: {max_workers: 1, node_config: {InstanceType: m5.large}}
  ray.worker.cpu: {min_workers: 1, resources: {CPU: 4, Disk: 1}, node_config: {InstanceType: m5.xlarge}}
  never: {max_workers: 0, node_config: {InstanceType: m5.8xlarge}}
  gpu_worker_of_8:
    max_workers: 2
    resources: {GPU: 8, "accelerator_type:V100": 1}
    node_config: {InstanceType: p3.16xlarge, InstanceMarketOptions: {MarketType: spot}}
"""


def test_types_of_ray_become_groups_so_that_a_task_gets_hosts_that_it_fits_on():
    data, left_out = converted(TYPES)
    found = spec(data)
    groups = {group.name: group for group in found.groups}
    assert {name: group.nodes for name, group in groups.items()} == {
        "workercpu": Nodes(1, 1, 6, 120.0), "gpuworkerof8": Nodes(0, 2, 2, 120.0), "head": Nodes(0, 1, 1, 120.0)}
    assert [(n.zone, n.instance_type, n.use_spot) for n in groups["gpuworkerof8"].any_of] == [
        ("us-west-2a", "p3.16xlarge", True), ("us-west-2b", "p3.16xlarge", True)]
    assert found.name == "several-types-of-workers-wi" and found.dispatcher.instance_type == "m5.large"
    assert {line.partition(":")[0]: line for line in left_out} == {
        "available_node_types.ray.worker.cpu.resources":
            "available_node_types.ray.worker.cpu.resources: hosts offer what their machines have, and none of Disk: "
            "tasks that ask for it would wait for ever",
        "max_workers": "max_workers: a group has its own: `spotfleet ray start --hosts 1:6` gives Ray at most 6 hosts "
                       "of all groups",
        "head": "head: m5.large becomes the dispatcher's machine, on which Ray runs no task: for a small one leave "
                "`dispatcher` out"}


def test_a_head_of_ray_without_workers_is_the_host_that_does_the_work():
    data, left_out = converted("cluster_name: a\nmax_workers: 0\nprovider: {type: aws, region: us-east-1}\n"
                               "head_node_type: h\navailable_node_types:\n"
                               "  h: {node_config: {InstanceType: p3.2xlarge, EbsOptimized: true}}\n")
    found = spec(data)
    assert (found.nodes, found.any_of) == (
        Nodes(1, 1, 1), (Need("us-east-1", instance_type="p3.2xlarge", use_spot=False),))
    assert "dispatcher" not in data and [line.partition(":")[0] for line in left_out] == [
        "head_node_type", "available_node_types.h.node_config.EbsOptimized"]


def test_a_fleet_for_ray_begins_with_the_workers_that_ray_would_begin_with():
    text = "cluster_name: a\nmin_workers: 1\nmax_workers: 4\nprovider: {type: aws, region: us-east-1}\n"
    assert spec(converted(text)[0]).nodes == Nodes(1, 1, 4)
    assert converted("cluster_name: a\nprovider: {type: aws, region: us-east-1}\n")[0]["nodes"] == {"min": 0, "max": 2}
    assert spec(converted(text + "docker: {image: own}\n")[0]).nodes == Nodes(1, 4, 4)


def test_types_of_ray_with_an_image_are_alternatives_for_jobs():
    data, _ = converted(TYPES + "docker: {image: own}\n")
    assert "groups" not in data and "ray" not in data
    assert {one["instance_type"] for one in data["resources"]["any_of"]} >= {"m5.xlarge", "p3.16xlarge"}


def test_groups_of_types_with_similar_names_have_different_names():
    types = "".join(f"  {kind}: {{node_config: {{InstanceType: m5.large}}}}\n"
                    for kind in ("ray.worker.default", "worker_default_2", "4cpus", "d", "worker.defaults"))
    data, _ = converted("cluster_name: a\nprovider: {type: aws, region: us-east-1}\navailable_node_types:\n" + types)
    assert {group.name for group in spec(data).groups} == {
        "workerdefaul", "workerdefau2", "g4cpus", "d2", "workerdefau3"}


def test_an_older_cluster_file_and_one_of_machines_that_exist():
    old, _ = converted("cluster_name: a\nmin_workers: 0\nmax_workers: 2\nprovider: {type: aws, region: us-east-1}\n"
                       "head_node: {InstanceType: m5.large}\nworker_nodes: {InstanceType: c5.xlarge}\n")
    assert spec(old).any_of == (Need("us-east-1", instance_type="c5.xlarge", use_spot=False),)
    assert spec(old).nodes == Nodes(0, 2, 2)
    idle, _ = converted("cluster_name: a\nidle_timeout_minutes: 2\nmax_workers: 2\n"
                        "provider: {type: aws, region: us-east-1}\nworker_nodes: {InstanceType: c5.xlarge}\n")
    assert spec(idle).nodes == Nodes(0, 2, 2, 120.0) and not spec(idle).autostop.idle_s
    own, _ = converted("cluster_name: a\nprovider: {type: local, head_ip: h, worker_ips: [a, b]}\n"
                       "auth: {ssh_user: me}\n")
    found = spec(own)
    assert (found.provider, found.nodes, found.section["user"]) == ("ssh", Nodes(1, 2, 2), "me")
    assert [m["host"] for m in found.section["hosts"]] == ["a", "b"]


def test_a_fleet_of_dstack():
    data, left_out = converted("""
type: fleet
name: my-fleet
nodes: 0..2
placement: cluster
backends: [aws]
regions: [us-east-1, us-west-2]
spot_policy: auto
max_price: 3.5
idle_duration: 1h
resources: {gpu: "A100:80GB:8", cpu: "8..", memory: 64GB.., disk: 500GB.., shm_size: 16GB}
reservation: cr-1
""")
    found = spec(data)
    need = {"accelerator": "A100-80GB", "accelerator_count": 8, "max_micros_h": 3_500_000, "min_vcpus": 8.0,
            "min_memory_gib": 64.0}
    assert found.any_of == (Need("us-east-1", **need), Need("us-west-2", **need))
    assert (found.nodes, found.placement, found.policy.spot_policy) == (Nodes(1, 2, 2), "cluster", "auto")
    assert (found.autostop.idle_s, found.section["disk_gib"]) == (3600.0, 500)
    assert left_out == ("resources.shm_size: a host's processes share its memory",
                        "reservation: has no counterpart in a fleet file")


def test_a_task_and_a_dev_environment_of_dstack():
    data, left_out = converted("""
type: task
name: train
nodes: 2
image: nvcr.io/nvidia/pytorch
env: [TOKEN, EPOCHS=3]
commands: [pip install -r r.txt, python train.py]
files: ["../data:data"]
max_duration: 2h
backends: [aws]
resources: {gpu: {name: [L4, A10G], count: 1..4}, cpu: 4}
""")
    found = spec(data)
    assert [(n.accelerator, n.accelerator_count) for n in found.any_of] == [("L4", 1), ("A10G", 1)]
    assert (found.nodes, found.envs) == (Nodes(2, 2, 2), {"TOKEN": "x", "EPOCHS": "3"})
    assert found.run.endswith("\npip install -r r.txt\npython train.py\n") and found.max_lifetime_s == 7200
    assert found.file_mounts == {"data": "/data"} and found.container.image == "nvcr.io/nvidia/pytorch"
    assert [line.partition(":")[0] for line in left_out] == ["resources.gpu", "spot_policy"]
    data, left_out = converted("type: dev-environment\nide: vscode\ninit: [pip install x]\nbackends: [aws]\n"
                               "spot_policy: spot\nresources: {gpu: 24GB}\n")
    assert spec(data).setup.endswith("\npip install x\n") and spec(data).run == ""
    assert [line.partition(":")[0] for line in left_out] == ["ide"]


def test_a_task_of_dstack_stops_at_its_first_failure_and_finds_its_variables():
    data, left_out = converted("""
type: task
env: ["TOKEN=${{ secrets.token }}", A=1]
commands: [cd t, "python x.py ${{ run.args }}", 'echo $DSTACK_NODE_RANK,$DSTACK_GPUS_NUM,$DSTACK_MPI_HOSTFILE,$A']
""")
    script = data["run"].replace("cd t", "cd /").replace("python x.py", "true")
    env = {"SPOTFLEET_NODE_RANK": "1", "SPOTFLEET_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "4", "A": "1"}
    said = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("1,8,,1\n", "")
    assert data["secrets"] == {"TOKEN": None} and data["envs"] == {"A": "1"}
    assert [line.partition(":")[0] for line in left_out] == ["spot_policy", "env.TOKEN", "commands", "commands"]
    failing = subprocess.run(["bash", "-c", script.replace("cd /", "false")], env=env, capture_output=True, check=False)
    assert (failing.returncode, failing.stdout) == (1, b"")


@pytest.mark.parametrize(("gpu", "found"), [
    ("80GB:8", ["A100-80GB:8", "H100:8", "H100-MEGA:8"]), ("amd:1", "MI300X:1"),
    ("{memory: 16GB..24GB, count: 1..}", ["T4:1", "V100:1", "A10:1", "A10G:1", "L4:1"]), ("tpu", "tpu:1"),
    ("google:8", "google:8"), ("7GB", "7GB"),
])
def test_a_gpu_of_dstack_that_is_named_by_its_memory_is_any_with_so_much(gpu, found):
    data, _ = converted(f"type: task\ncommands: [x]\nresources: {{gpu: {gpu}}}\n")
    assert data["resources"]["accelerators"] == found


def test_folders_of_a_host_are_mounted_into_a_container_of_dstack_and_volumes_are_not():
    data, left_out = converted("type: task\nimage: i\ncommands: [x]\nspot_policy: spot\nvolumes: [/a:/b, v:/c, "
                               "{instance_path: /d, path: /e}]\n")
    assert data["container"] == {"image": "i", "mounts": ["/a:/b", "/d:/e"]}
    assert [line.split()[1] for line in left_out] == ["/a:/b", "v:/c", "/d:/e"]


def test_a_gpu_that_nothing_here_has_gives_no_fleet_without_gpus():
    data, left_out = converted("type: task\ncommands: [x]\nresources: {gpu: 7GB}\n")
    assert left_out[0] == "resources.gpu: 7GB: no GPU of that kind is known; name one under `accelerators`"
    with pytest.raises(UsageError, match=r"resources\.accelerators: no GPU with 7GB is known"):
        spec(data)


def test_the_memory_of_each_gpu_that_the_catalog_sells_is_known():
    folder = Path(catalog.__file__).parent / "data"
    sold = {fields[4] for file in folder.glob("*.csv") for line in file.read_text().splitlines()
            if (fields := line.split(","))[0] == "machine"}
    assert sold - {""} == set(MEMORY_GB)


def test_an_ssh_fleet_of_dstack_names_its_first_machine_as_the_dispatchers():
    data, left_out = converted("type: fleet\nname: lab\nssh_config: {user: me, identity_file: ~/.ssh/id, hosts: "
                               "[a, {hostname: b, blocks: 8}, c]}\n")
    assert data["ssh"]["dispatcher"] == "a" and data["ssh"]["hosts"] == [{"host": "b", "slots": 8}, "c"]
    assert "a runs the dispatcher and no workers" in left_out[0]


@pytest.mark.parametrize(("text", "program"), [(RAY, "Ray"), ("type: task\ncommands: [x]\n", "dstack")])
def test_up_of_such_a_file_points_to_its_conversion(text, program):
    with pytest.raises(UsageError, match=f"/work/a.yaml is a file of {program}, not a fleet file") as caught:
        parse(text, Path("/work/a.yaml"), {})
    assert "spotfleet convert /work/a.yaml > fleet.yaml" in caught.value.hint


def test_horovods_lists_of_hosts():
    assert horovod.from_list("a:4, b", 2) == (("a", 4), ("b", 2))
    assert horovod.from_file("a slots=4 max-slots=8\n# no\nb:2\nc\n[fd00::1]:3\n") == (
        ("a", 4), ("b", 2), ("c", 1), ("fd00::1", 3))
    for text in ("a:", "a:0", "a b"):
        with pytest.raises(ValueError, match="expected HOST:SLOTS"):
            horovod.from_list(text)


def test_a_list_of_hosts_is_a_fleet_over_ssh_and_this_machine_alone_needs_none():
    hosts = horovod.HorovodHosts(horovod.from_list("a:4,b:2"))
    found = spec(horovod.fleet_file("h", hosts, "d", (1, 2), user="me", port=2222))
    assert (found.provider, found.nodes, found.environment.inherit) == ("ssh", Nodes(1, 2, 2), True)
    assert [(m["host"], m["slots"]) for m in found.section["hosts"]] == [("a", 4), ("b", 2)]
    here = horovod.HorovodHosts(horovod.from_list("localhost:4"))
    assert spec(horovod.fleet_file("h", here, "", (2, 4))).provider == "local"


def test_a_discovery_script_gives_its_hosts_the_slots_of_the_command_line():
    hosts = horovod.HorovodHosts(script="/work/discover.sh", slots=4)
    found = spec(horovod.fleet_file("h", hosts, "d", (1, 3)))
    assert (found.section["discovery_script"], found.section["slots"]) == ("/work/discover.sh", 4)
