"""Command lines of the engines, held against their references, and the meaning of their errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from spotfleet.agent.containers.container import host_pid
from spotfleet.agent.containers.engines import (
    DOCKER_HUB,
    LOGIN,
    ContainerOrder,
    Docker,
    Mount,
    Podman,
    RegistryLogin,
    Runc,
    auth_file,
    candidates,
    login_of,
    mount_of,
)
from spotfleet.agent.containers.host_containers import gpu_nodes
from spotfleet.agent.containers.refusals import meaning
from spotfleet.agent.processes.entered import start_script
from tests.support.containers.contract import NO_DAEMON, NO_GPU, NOT_FOUND, REFUSED, check_run, parsed

ORDER = ContainerOrder("c", "repo/image:1", "/f", ("sh", "-c", "true"), (Mount("/a", "/b"), Mount("/c", "/d", True)),
                       {"spotfleet.fleet": "x"}, gpus=True, devices=("/dev/infiniband",),
                       gpu_nodes=("/dev/nvidia0", "/dev/nvidiactl"))
GPU_OPTION = {"docker": ("--gpus", "all"), "podman": ("--device", "nvidia.com/gpu=all")}


@pytest.mark.parametrize("engine", [Docker(), Podman()], ids=["docker", "podman"])
def test_every_command_line_is_one_that_the_engines_reference_allows(engine):
    lines = [engine.about(), engine.has("i"), engine.pull("i"), engine.start(ORDER), [*engine.enter("c"), "sh"],
             engine.list({"a": "b"}), engine.remove("c")]
    for line in lines:
        command, options, rest = parsed(engine.name, line[1:])
        if command == "run":
            check_run(engine.name, options)
            assert GPU_OPTION[engine.name] in options and ("--device", "/dev/infiniband") in options
            assert {("--rm", ""), ("--network", "host"), ("--ipc", "host"), ("--pull", "never"), ("--entrypoint", "sh"),
                    ("--label", "spotfleet.fleet=x"), ("--mount", "type=bind,source=/a,target=/b"),
                    ("--mount", "type=bind,source=/c,target=/d,readonly")} <= set(options)
            assert rest == ["repo/image:1", "-c", "true"]


def test_gpus_of_docker_outlast_a_reload_of_systemd():
    command = Docker().start(ORDER)
    named = {command[i + 1] for i, word in enumerate(command) if word == "--device"}
    assert named == {"/dev/infiniband", "/dev/nvidia0", "/dev/nvidiactl"}


def test_the_device_files_of_gpus_are_found_and_nothing_else(tmp_path: Path):
    for name in ("nvidia0", "nvidia10", "nvidiactl", "nvidia-uvm", "nvme0", "nvidia-caps-imex-channels"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia-caps").mkdir()
    assert [Path(node).name for node in gpu_nodes(tmp_path)] == ["nvidia-uvm", "nvidia0", "nvidia10", "nvidiactl"]


def test_a_command_in_a_container_may_open_as_many_files_as_the_container(tmp_path: Path):
    log = tmp_path / "log"
    script = start_script("ulimit -S -n", {}, str(tmp_path), str(log))
    subprocess.run(["sh", "-c", f"ulimit -S -n 64; ulimit -H -n 256\n{script}"], check=True, timeout=60)
    assert log.read_text() == "256\n"


def test_a_container_without_gpus_on_its_host_asks_for_none():
    plain = ContainerOrder("c", "i", "/f", ("sh",), gpu_nodes=("/dev/nvidiactl",))
    assert not {"--gpus", "--device"} & {*Docker().start(plain), *Podman().start(plain)}


def test_files_in_a_container_belong_to_the_agents_user_outside():
    rootless = '["name=seccomp,profile=builtin","name=rootless"]'
    assert Docker().user_of('["name=seccomp"]', 1000, 100) == "1000:100"
    assert Docker().user_of(rootless, 1000, 100) == Podman().user_of("true", 1000, 100) == "0:0"


def test_a_bundle_of_runc_has_its_own_processes_and_mounts_and_neither_limits_nor_cgroups():
    bundle = json.loads(Runc("/s").files(ORDER)["config.json"])
    assert bundle["linux"] == {"namespaces": [{"type": "pid"}, {"type": "mount"}]}
    assert not any(m["type"].startswith("cgroup") for m in bundle["mounts"])
    bound = {m["destination"]: m["options"] for m in bundle["mounts"] if m["type"] == "bind"}
    assert bound["/b"] == ["rbind", "rw"] and bound["/d"] == ["rbind", "ro"]


@pytest.mark.parametrize(("wanted", "image", "names"), [
    ("auto", "image", ["docker", "podman"]), ("podman", "image", ["podman"]), ("docker", "image", ["docker"]),
    ("auto", "/srv/root", ["runc"]), ("runc", "/srv/root", ["runc"])])
def test_the_engine_follows_the_image_and_the_users_choice(wanted, image, names):
    assert [engine.name for engine in candidates(wanted, image, "/s")] == names


@pytest.mark.parametrize(("text", "mount"), [
    ("/a", Mount("/a", "/a")), ("/a:ro", Mount("/a", "/a", True)), ("/a:/b", Mount("/a", "/b")),
    ("/a:/b:ro", Mount("/a", "/b", True))])
def test_a_folder_of_the_host_is_mounted_at_the_same_path_unless_another_is_given(text, mount):
    assert mount_of(text) == mount


def test_credentials_are_those_of_skypilots_variables_and_go_before_the_users_helpers():
    login = login_of(dict(zip(LOGIN, ("r.io", "u", "p"), strict=True)))
    assert LOGIN == ("SKYPILOT_DOCKER_SERVER", "SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD")
    assert login is not None and login == RegistryLogin("r.io", "u", "p") and "p'" not in repr(login)
    assert (login.image("a/b"), login.image("r.io/a/b")) == ("r.io/a/b", "r.io/a/b")
    assert login_of({"SKYPILOT_DOCKER_USERNAME": "u"}) is None
    held = '{"credsStore": "x", "credHelpers": {"r.io": "x"}, "auths": {"q.io": {}}, "currentContext": "rootless"}'
    assert json.loads(auth_file(login, held, "dTpw")) == {
        "currentContext": "rootless", "auths": {"q.io": {}, "r.io": {"auth": "dTpw"}}}
    assert DOCKER_HUB in json.loads(auth_file(RegistryLogin("docker.io", "u", "p"), "", "x"))["auths"]


@pytest.mark.parametrize(("engine", "output", "text", "sure"), [
    ("docker", NO_GPU["docker"], "install nvidia-container-toolkit on the host, then run `nvidia-ctk runtime", False),
    ("podman", NO_GPU["podman"], "install nvidia-container-toolkit on the host, then run `nvidia-ctk cdi", False),
    ("docker", NO_DAEMON, "the Docker daemon of this host does not run", False),
    ("docker", "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock",
     "add it to group docker", False),
    ("docker", NOT_FOUND["docker"], "there is no image i: check its name and tag", True),
    ("podman", NOT_FOUND["podman"], "there is no image i: check its name and tag", True),
    ("docker", REFUSED["docker"], "needs other credentials (secrets SKYPILOT_DOCKER_USERNAME", True),
    ("podman", REFUSED["podman"], "needs other credentials (secrets SKYPILOT_DOCKER_USERNAME", True),
    ("docker", "pull access denied for i, repository does not exist or may require 'docker login': denied: requested "
     "access to the resource is denied", "it does not exist, or needs other credentials", True),
    ("docker", "toomanyrequests: You have reached your pull rate limit", "how often this address may fetch i", False),
    ("docker", "failed to register layer: write /x: no space left on device", "this host's disk is full", False),
    ("docker", 'exec: "sh": executable file not found in $PATH: unknown', "the image i has no shell", True),
    ("docker", "no matching manifest for linux/arm64/v8 in the manifest list", "not made for this host's processor",
     True),
    ("docker", "dial tcp: lookup r.io: no such host", "the registry of i cannot be reached", False),
    ("docker", "something new", "docker cannot run i", False),
])
def test_an_engines_error_becomes_a_reason_with_its_next_step(engine, output, text, sure):
    found = meaning(engine, "i", output)
    assert text in found.text and found.sure is sure and found.text.endswith(output[-600:])


def test_a_pid_of_a_container_is_found_among_the_children_of_its_zygote(tmp_path: Path):
    for pid, parent, inner in ((100, 50, "100\t7"), (101, 60, "101\t7"), (102, 50, "102\t8"), (103, 60, "103\t9")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nPPid:\t{parent}\nNSpid:\t{inner}\n")
    assert [host_pid(50, inner, tmp_path) for inner in (7, 8, 9)] == [100, 102, 0]


def test_variables_go_into_a_container_as_they_are_and_a_shells_own_do_not():
    script = start_script("run me", {"A": "it's\nred", "BASH_FUNC_f%%": "x", "UID": "1", "PWD": "/"}, "/w", "/l")
    assert "export A='it'\"'\"'s\nred'" in script
    assert not any(name in script for name in ("BASH_FUNC", "export UID", "export PWD"))
