"""The texts that a machine is given: settings, the unit of systemd, user data for cloud-init."""

from __future__ import annotations

import ast
import gzip
import json
import random
import shutil
import string
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from spotfleet.bootstrap import HostPlan, Wheel, cloud_init, script
from spotfleet.errors import UsageError
from spotfleet.model import EnvironmentSpec, Role
from spotfleet.ssh import keys
from spotfleet.transport import certs
from tests.support.bootstrap.existing_machine import ExistingMachine, plan

HOSTILE = "it's $(touch /tmp/x) `id` \"quoted\" \\ *; &"
NO_RESTART, NO_UPGRADES = "/etc/needrestart/conf.d/spotfleet.conf", "/etc/apt/apt.conf.d/99spotfleet"
EACH_BOOT = "/var/lib/cloud/scripts/per-boot/spotfleet"
WHEEL = Wheel("spotfleet-0.1.0-py3-none-any.whl", "ab" * 32, b"")


def test_no_value_of_a_plan_is_ever_run_by_the_shell(tmp_path: Path):
    wanted = HostPlan("f-1", "f", Role.WORKER, "spotfleet.agent", {}, WHEEL.name, WHEEL.sha256,
                      EnvironmentSpec(python=HOSTILE, packages=(HOSTILE,), index_url=HOSTILE), metadata_url=HOSTILE)
    (tmp_path / "settings.sh").write_text(script.files(wanted)["settings.sh"])
    said = subprocess.run(["bash", "-c", '. ./settings.sh; printf "%s\\n" "$PYTHON" "$INDEX_URL" "$METADATA_URL"'],
                          cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert (said.stdout.splitlines(), said.stderr) == ([HOSTILE] * 3, "")
    assert script.files(wanted)["packages.txt"] == f"{HOSTILE}\n"


@pytest.mark.parametrize(("changed", "why"), [
    ({"request_id": "../up"}, "request_id: '../up' is no name for a folder"),
    ({"files": {"bootstrap.sh": ""}}, "files: 'bootstrap.sh' cannot lie in the host's folder"),
    ({"files": {"../boot.json": ""}}, "files: '../boot.json' cannot lie in the host's folder"),
    ({"module": "a\nb"}, r"module: 'a\nb' holds a control character"),
    ({"environment": EnvironmentSpec(packages=("torch\n--index-url=x",))},
     r"environment.packages: 'torch\n--index-url=x' is not one line"),
])
def test_a_plan_that_no_machine_can_follow_is_refused(changed, why: str):
    with pytest.raises(UsageError) as error:
        script.files(plan(WHEEL, **changed))
    assert str(error.value) == why


def test_hosts_share_an_environment_when_all_of_it_is_the_same():
    one = plan(WHEEL, "f-1")
    same = plan(WHEEL, "g-7", address="10.0.0.1", files={"boot.json": "other"})
    digests = [script.environment_digest(p) for p in (
        one, same, replace(one, wheel_sha256="cd" * 32), replace(one, environment=EnvironmentSpec()),
        replace(one, environment=EnvironmentSpec(), role=Role.WORKER),
        replace(one, environment=EnvironmentSpec(packages=("torch==2.13.0",))))]
    assert (digests[0] == digests[1], len(set(digests))) == (True, 5)


def test_a_worker_s_environment_can_train_and_a_dispatcher_s_need_not():
    roles = {(role, inherit): script.extras(plan(WHEEL, role=role, environment=EnvironmentSpec(inherit=inherit)))
             for role in Role for inherit in (False, True)}
    assert roles == {(Role.WORKER, False): "[train]", (Role.WORKER, True): "",
                     (Role.DISPATCHER, False): "", (Role.DISPATCHER, True): ""}


def test_a_dispatcher_of_a_cloud_has_its_sdk_and_an_agent_has_none():
    sdk = {Role.DISPATCHER: {"extras": ("aws",), "modules": ("boto3",)}, Role.WORKER: {}}
    wanted = {role: plan(WHEEL, role=role, environment=EnvironmentSpec(), **sdk[role]) for role in Role}
    said = {role: [line for line in script.settings(p).splitlines() if line.startswith(("EXTRAS", "NEEDS"))]
            for role, p in wanted.items()}
    assert said == {Role.DISPATCHER: ["EXTRAS='[aws]'", "NEEDS=boto3"], Role.WORKER: ["EXTRAS='[train]'", "NEEDS=''"]}
    inherited = replace(wanted[Role.DISPATCHER], environment=EnvironmentSpec(inherit=True))
    assert (script.extras(inherited), script.needs(inherited)) == ("", "boto3")


def test_the_unit_is_one_that_systemd_takes_also_from_a_folder_with_an_awkward_name(tmp_path: Path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze here")
    machine = ExistingMachine(tmp_path / 'with 100% "odd" $HOME')
    wanted = plan(WHEEL)
    machine.bring(wanted, WHEEL)
    said = subprocess.run(["bash", str(machine.home(wanted.request_id) / "bootstrap.sh"), "unit"], capture_output=True,
                          text=True, timeout=20)
    unit = tmp_path / "spotfleet-test.service"
    unit.write_text(said.stdout)
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)],
                             capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "Restart=on-failure\nRestartPreventExitStatus=1\n" in said.stdout


def agent_plan() -> HostPlan:
    boot = {"fleet": "a-fleet-with-quite-a-name", "host": "a-fleet-with-quite-a-name-1234-17", "provider": "aws",
            "slots": 8, "dispatcher": "https://[2a05:d014:1234:5678:9abc:def0:1234:5678]:65000",
            "ca": certs.make("a-fleet-with-quite-a-name", time.time()).ca, "token": "a-fleet-17." + noise(64),
            "orphan_after_s": 900.0, "lifetime_s": 86400.0, "target": "s3://some-bucket-of-mine/checkpoints/run-17"}
    wanted = EnvironmentSpec(packages=("torch==2.13.0", "torchvision==0.28.0"), index_url="https://example.org/simple")
    return plan(WHEEL, boot["host"], role=Role.WORKER, module="spotfleet.agent", environment=wanted,
                files={"boot.json": json.dumps(boot)}, power_off=True)


def dispatcher_plan() -> HostPlan:
    """With as many secrets as a fleet may have, which no compression makes smaller."""
    made = certs.make("a-fleet-with-quite-a-name", time.time())
    boot = {"fleet": "f", "host": "f-1234-0", "spec": {"setup": "pip install -r requirements.txt\n" * 5},
            "provider_config": {"private_key": keys.make("f").private}, "fleet_secret": noise(64),
            "admin_token": noise(64), "ca": made.ca, "cert": made.cert, "key": made.key, "more": noise(1500)}
    return plan(WHEEL, role=Role.DISPATCHER, module="spotfleet.dispatcher", port=7443, environment=EnvironmentSpec(),
                files={"boot.json": json.dumps(boot)}, wheel_url="https://bucket.example.org/code.whl?" + noise(400))


def noise(length: int) -> str:
    return "".join(random.Random(length).choices(string.ascii_letters + string.digits, k=length))


def test_an_ec2_key_pair_opens_a_machine_only_where_it_was_asked_for():
    said = [yaml.safe_load(cloud_init.user_data(agent_plan(), user="ubuntu", authorized_keys=["ssh-ed25519 AAAA me"],
                                                host_key=None, key_pair=pair))["users"] for pair in (False, True)]
    assert said[1] == ["default", *said[0]] and said[0][0]["ssh_authorized_keys"] == ["ssh-ed25519 AAAA me"]


@pytest.mark.parametrize(("made", "user", "known"), [
    (agent_plan, "ubuntu", True), (agent_plan, "root", False), (dispatcher_plan, "root", True),
    (dispatcher_plan, "me", False)])
def test_cloud_init_accepts_the_user_data_and_ec2_has_room_for_it(tmp_path: Path, made, user: str, known: bool):
    host_key = keys.derived_host_key("a secret", "f-1") if known else None
    text = cloud_init.user_data(made(), user=user, authorized_keys=[keys.make("f").public], host_key=host_key,
                                key_pair=known)
    data = cloud_init.packed(text)
    assert (len(data) <= 16_384, gzip.decompress(data).decode()) == (True, text)
    if not shutil.which("cloud-init"):
        pytest.skip("there is no cloud-init here to check it by its schema")
    (tmp_path / "user-data").write_text(text)
    checked = subprocess.run(["cloud-init", "schema", "--config-file", str(tmp_path / "user-data")], timeout=60,
                             capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_what_cloud_init_writes_and_runs_is_what_lies_on_a_machine_over_ssh():
    wanted, host_key = agent_plan(), keys.derived_host_key("a secret", "f-1")
    said = yaml.safe_load(cloud_init.user_data(wanted, user="me", authorized_keys=["ssh-ed25519 AAAA me"],
                                               host_key=host_key))
    home = f"/root/.spotfleet-host/{wanted.request_id}"
    files = {f["path"]: f["content"] for f in said["write_files"]}
    over_ssh = script.files(wanted) | {name: script.short(name) for name in ("bootstrap.sh", "fetch.py")}
    assert files == {"/root/.spotfleet-host/claim": f"{wanted.request_id}\n"} | {
        f"{home}/{name}": over_ssh[name]
        for name in ("boot.json", "bootstrap.sh", "fetch.py", "settings.sh", "packages.txt")} | {
        EACH_BOOT: "#!/bin/sh\n# At the first boot `runcmd` starts it.\n"
                   f"[ ! -e {home}/state ] || exec env HOME=/root bash {home}/bootstrap.sh start\n"} | {
        NO_RESTART: "$nrconf{override_rc}{qr(^spotfleet-)} = 0;\n", NO_UPGRADES: 'APT::Periodic::Enable "0";\n'}
    assert {f["permissions"] for f in said["write_files"] if f["path"].startswith("/root/")} == {"0600"}
    assert next(f for f in said["write_files"] if f["path"] == EACH_BOOT)["permissions"] == "0700"
    assert said["runcmd"][-1] == ["env", "HOME=/root", "bash", f"{home}/bootstrap.sh", "start"]
    assert (said["ssh_deletekeys"], said["ssh_keys"]["ed25519_public"]) == (True, host_key.public)
    assert (said["disable_root"], said["users"][0]["name"], said["users"][0]["ssh_authorized_keys"]) == (
        True, "me", ["ssh-ed25519 AAAA me"])


def test_no_host_upgrades_itself_and_nothing_that_upgrades_a_dispatcher_restarts_it():
    host, dispatcher = (yaml.safe_load(cloud_init.user_data(made(), user="me", authorized_keys=[], host_key=None))
                        for made in (agent_plan, dispatcher_plan))
    modes = [{f["path"]: f["permissions"] for f in said["write_files"] if f["path"].startswith("/etc/")}
             for said in (host, dispatcher)]
    assert modes == [{NO_RESTART: "0644", NO_UPGRADES: "0644"}, {NO_RESTART: "0644"}]
    assert "bootcmd" not in dispatcher


def test_each_unit_that_upgrades_is_disabled_where_the_image_lacks_another(tmp_path: Path):
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\nexit 1\n')
    systemctl.chmod(0o755)
    text = cloud_init.user_data(agent_plan(), user="me", authorized_keys=[], host_key=None)
    [command] = yaml.safe_load(text)["bootcmd"]
    done = subprocess.run(command, timeout=20, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert (done.returncode, (tmp_path / "asked").read_text().splitlines()) == (0, [
        f"--no-block disable --now {unit}"
        for unit in ("apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service")])


def test_user_data_that_does_not_fit_is_refused_with_what_to_do():
    text = cloud_init.user_data(replace(agent_plan(), files={"boot.json": noise(30_000)}), user="me",
                                authorized_keys=[], host_key=None)
    with pytest.raises(UsageError, match=r"user data has \d+ bytes packed, and a cloud takes 16384") as error:
        cloud_init.packed(text)
    assert "shorten the fleet file" in error.value.hint


def test_every_script_is_understood_by_the_shell_that_runs_it(tmp_path: Path):
    for name, shell in {"bootstrap.sh": "bash", "remove.sh": "sh"}.items():
        checked = subprocess.run([shell, "-n"], input=script.text(name), capture_output=True, text=True, timeout=20)
        assert (checked.returncode, checked.stderr) == (0, ""), name
    for name in ("fetch.py", "inherit.py"):
        tree = ast.parse(script.text(name))
        named = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in ast.walk(tree)
                 if isinstance(n, ast.Import | ast.ImportFrom)]
        assert {n.partition(".")[0] for n in named} <= {*sys.stdlib_module_names}, name


def test_a_script_without_its_comments_is_the_same_program():
    for name in ("fetch.py", "inherit.py"):
        short = ast.parse(script.short(name))
        whole = ast.parse(script.text(name))
        for node in ast.walk(whole):
            if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
                del node.body[0]
        assert ast.dump(short) == ast.dump(whole)

    def parsed(text: str) -> list[str]:
        """The program as bash has parsed it; comments in a text for systemd, and in Python, are left out."""
        done = subprocess.run(["bash", "--pretty-print", "/dev/stdin"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.partition("  # nothing is sent")[0] for line in done.stdout.splitlines()
                if line.strip() and not line.startswith("# A worker that")]

    assert parsed(script.short("bootstrap.sh")) == parsed(script.text("bootstrap.sh"))
    assert len(parsed(script.short("bootstrap.sh"))) > 400


def test_a_machine_of_a_ready_image_asks_no_package_server():
    ready = replace(agent_plan(), environment=EnvironmentSpec(python="/opt/spotfleet/bin/python", inherit=True))
    bare = agent_plan()
    said = [cloud_init.user_data(p, user="ubuntu", authorized_keys=[], host_key=None) for p in (ready, bare)]
    assert ["package_update" in text for text in said] == [False, True]
