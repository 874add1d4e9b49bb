"""One user data for several machines: bootstrap/gang.py, and gang_place.py run as a machine runs it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from spotfleet.bootstrap import HostPlan, cloud_init, gang
from spotfleet.errors import UsageError
from spotfleet.model import EnvironmentSpec, Role
from spotfleet.ssh.keys import derived_host_key
from spotfleet.transport import certs

STARTED = "#!/bin/sh\necho \"$@\" >>\"$(dirname \"$0\")/started\"\n"


def token(n: int) -> str:
    return f"f-{n}.{hashlib.sha256(str(n).encode()).hexdigest()}"


def plans(root: Path, count: int, url: str = "http://169.254.169.254", **more) -> list[HostPlan]:
    return [HostPlan(f"f-{n}", "f", Role.WORKER, "spotfleet.agent",
                     {"boot.json": json.dumps({"host": f"f-{n}", "token": token(n), "ca": "one-for-all"}),
                      "alike": "alike"}, "w.whl",
                     "0" * 64, root=str(root), metadata_url=url, power_off=True, **more) for n in range(count)]


def text_of(hosts: list[HostPlan], secret: str = "s", fetched: bool = False) -> str:
    tokens = [token(n) for n in range(len(hosts))] if fetched else ()
    return gang.user_data(hosts, user="ubuntu", authorized_keys=["ssh-ed25519 AAAA"], tokens=tokens, secret=secret,
                          host_keys=[derived_host_key(secret, p.request_id) for p in hosts])


@contextmanager
def metadata_server(index: int, *tags: str) -> Iterator[str]:
    """It wants a token, and fails at first. `tags`: the member tag at each query, "" for none; at last "index"."""
    failed: list[str] = []
    left = list(tags)

    class Server(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            if not failed:
                failed.append(self.path)
                return self.send_error(503)
            self.say(b"a-token")

        def do_GET(self) -> None:
            if self.path == "/computeMetadata/v1/instance/name":  # Google Cloud's
                known = self.headers.get("Metadata-Flavor") == "Google"
                return self.say(f"f-{index}-s3k9".encode()) if known else self.send_error(403)
            known = self.headers.get("X-aws-ec2-metadata-token") == "a-token"
            tag = self.path == "/latest/meta-data/tags/instance/spotfleet-member"
            said = (left.pop(0) if left else "index") if tag else str(index)
            if not known or not said or not (tag or self.path == "/latest/meta-data/ami-launch-index"):
                return self.send_error(401 if not known else 404)
            self.say(said.encode())

        def say(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Machine:
    """What cloud-init leaves of the user data on one."""

    def __init__(self, top: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = gang.parsed(text)
        self.root, self.ssh = top / "root", top / "ssh"
        for file in self.config["write_files"]:
            path = Path(file["path"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STARTED if path.name == "bootstrap.sh" else file["content"])
            path.chmod(int(file["permissions"], 8))
        self.ssh.mkdir()
        for kind in ("rsa", "ed25519"):
            (self.ssh / f"ssh_host_{kind}_key").write_text("made by the machine")
        monkeypatch.setenv("SPOTFLEET_SSHD", str(self.ssh))
        monkeypatch.setenv("SPOTFLEET_RUN", str(top))
        self.systemctl = top / "bin" / "systemctl"
        self.systemctl.parent.mkdir()
        self.systemctl.write_text(f"#!/bin/sh\necho \"$@\" >>{top}/asked\n")
        self.systemctl.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.systemctl.parent}:{os.environ['PATH']}")

    def run(self) -> subprocess.CompletedProcess:
        (command,) = self.config["runcmd"]
        return subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def each_boot(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(cloud_init, "EACH_BOOT", str(tmp_path / "per-boot"))
    return tmp_path / "per-boot"


def test_each_machine_becomes_the_host_of_its_launch_index(tmp_path, monkeypatch, each_boot):
    with metadata_server(1) as url:
        machine = Machine(tmp_path, text_of(plans(tmp_path / "root", 3, url)), monkeypatch)
        done = machine.run()
    assert done.returncode == 0, done.stderr
    host = tmp_path / "root" / "f-1"
    assert json.loads((host / "boot.json").read_text()) == {"host": "f-1", "token": token(1), "ca": "one-for-all"}
    assert "REQUEST_ID=f-1\n" in (host / "settings.sh").read_text()
    assert (host / "started").read_text() == "start\n"
    assert (tmp_path / "root" / "claim").read_text() == "f-1\n"
    assert f"{host}/bootstrap.sh start" in (each_boot / "spotfleet").read_text()
    assert {stat.S_IMODE(p.stat().st_mode) for p in host.iterdir() if p.name != "started"} == {0o600}


def test_a_machine_of_google_cloud_becomes_the_host_that_its_name_holds(tmp_path, monkeypatch, each_boot):
    with metadata_server(2) as url:
        hosts = plans(tmp_path / "root", 3, f"{url}/computeMetadata/v1")
        done = Machine(tmp_path, text_of(hosts), monkeypatch).run()
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "root" / "f-2" / "boot.json").read_text())["host"] == "f-2"


@pytest.mark.parametrize(("index", "tags", "wait_s", "zero_s", "host"), [
    (1, ["2"], "600", "600", "f-2"), (1, ["", "", "2"], "600", "600", "f-2"), (1, ["", "", ""], "0", "600", "f-1"),
    (0, ["", "", "", "2"], "0", "600", "f-2"), (0, ["index"], "0", "600", "f-0"), (0, ["", "", ""], "0", "0", "f-0")],
    ids=["tagged", "tagged late", "never tagged", "index 0, tagged late", "by index 0", "index 0, never tagged"])
def test_a_tag_decides_which_host_a_machine_becomes_and_the_launch_index_only_without_one(
        tmp_path, monkeypatch, each_boot, index, tags, wait_s, zero_s, host):
    monkeypatch.setenv("SPOTFLEET_TAG_S", wait_s)
    monkeypatch.setenv("SPOTFLEET_ZERO_S", zero_s)
    with metadata_server(index, *tags) as url:
        done = Machine(tmp_path, text_of(plans(tmp_path / "root", 3, url)), monkeypatch).run()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "root" / "claim").read_text() == f"{host}\n"


def test_nothing_of_the_others_stays_on_a_machines_disk(tmp_path, monkeypatch, each_boot):
    with metadata_server(0) as url:
        machine = Machine(tmp_path, text_of(plans(tmp_path / "root", 3, url)), monkeypatch)
        assert machine.run().returncode == 0
    assert sorted(p.name for p in (tmp_path / "root").iterdir()) == ["claim", "f-0"]
    assert not any("f-2" in p.read_text() for p in (tmp_path / "root").rglob("*") if p.is_file())


def test_a_machine_shows_the_host_key_of_its_host_alone(tmp_path, monkeypatch, each_boot):
    with metadata_server(2) as url:
        machine = Machine(tmp_path, text_of(plans(tmp_path / "root", 3, url)), monkeypatch)
        assert machine.run().returncode == 0
    key = derived_host_key("s", "f-2")
    private = (machine.ssh / "ssh_host_ed25519_key").read_bytes()
    public = load_ssh_private_key(private, None).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    assert key.public.startswith(public.decode())
    assert (machine.ssh / "ssh_host_ed25519_key.pub").read_text() == f"{key.public}\n"
    assert len(list(machine.ssh.iterdir())) == 2 and (tmp_path / "asked").read_text() == "try-restart ssh\n"
    assert stat.S_IMODE((machine.ssh / "ssh_host_ed25519_key").stat().st_mode) == 0o600


def test_an_sshd_without_systemd_is_told_to_read_its_key_again(tmp_path, monkeypatch, each_boot):
    with metadata_server(0) as url:
        machine = Machine(tmp_path, text_of(plans(tmp_path / "root", 2, url)), monkeypatch)
        machine.systemctl.write_text("#!/bin/sh\nexit 1\n")
        # A process that inherits an ignored SIGHUP, as all do under nohup, would not be ended by one.
        with subprocess.Popen(["sleep", "60"], preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)) as sshd:
            (tmp_path / "sshd.pid").write_text(f"{sshd.pid}\n")
            try:
                assert machine.run().returncode == 0
                assert sshd.wait(10) == -signal.SIGHUP
            finally:
                sshd.kill()


def test_the_choice_is_made_again_at_the_next_boot_if_the_first_was_cut_off(tmp_path, monkeypatch, each_boot):
    with metadata_server(1) as url:
        Machine(tmp_path, text_of(plans(tmp_path / "root", 2, url)), monkeypatch)
        again = each_boot / "spotfleet-gang"
        half = tmp_path / "root" / "f-1"
        half.mkdir()
        (half / "boot.json").write_text("{")
        assert subprocess.run([again], timeout=60, check=False).returncode == 0
        assert json.loads((half / "boot.json").read_text())["host"] == "f-1"
        assert (half / "started").exists() and not (tmp_path / "root" / "gang").exists()
        (half / "started").unlink()
        assert subprocess.run([again], timeout=60, check=False).returncode == 0
    assert not (half / "started").exists()  # placed already: the host's own script starts it


def test_a_host_that_could_not_be_started_is_started_at_the_next_boot(tmp_path, monkeypatch, each_boot):
    with metadata_server(1) as url:
        machine = Machine(tmp_path, text_of(plans(tmp_path / "root", 2, url)), monkeypatch)
        script = tmp_path / "root" / "gang" / "bootstrap.sh"
        script.write_text("exit 1\n")
        assert machine.run().returncode != 0
        script.write_text(STARTED)
        assert subprocess.run([each_boot / "spotfleet-gang"], timeout=60, check=False).returncode == 0
    assert (tmp_path / "root" / "f-1" / "started").read_text() == "start\n"
    assert not (tmp_path / "root" / "gang").exists()


def test_what_each_host_was_told_is_read_back():
    hosts = plans(Path("/root/.spotfleet-host"), 3)
    text = text_of(hosts)
    for plan in hosts:
        assert gang.files_of(text, plan.request_id)["boot.json"] == plan.files["boot.json"]
    assert gang.files_of(text, "f-2")["alike"] == "alike" and gang.files_of(text, "f-9") == {}
    alone = cloud_init.user_data(hosts[0], user="ubuntu", authorized_keys=[], host_key=None)
    assert json.loads(gang.files_of(alone, "f-0")["boot.json"])["host"] == "f-0"
    assert gang.files_of(alone, "f-1") == {}


def test_what_a_member_fetches_is_not_in_the_text_of_all():
    hosts = plans(Path("/root/.spotfleet-host"), 3)
    text = text_of(hosts, fetched=True)
    assert not any(token(n) in text or token(n).partition(".")[2] in text for n in range(3))
    assert json.loads(gang.parsed(text)["write_files"][-2]["content"])["keys"] == ["", "", ""]
    assert gang.gang_token("s", ["f-0", "f-1", "f-2"]) in text and "one-for-all" in text


def test_a_member_fetches_its_token_and_host_key_from_its_dispatcher(tmp_path, monkeypatch, each_boot):
    made = certs.make("f", time.time())
    key = gang.raw_key(derived_host_key("s", "f-1"))
    said = {"token": token(1), "host_key": key}
    with metadata_server(0, "1") as url, dispatcher(tmp_path, made, said) as (at, requests):
        hosts = plans(tmp_path / "root", 3, url)
        for number, plan in enumerate(hosts):
            plan.files["boot.json"] = json.dumps({"host": f"f-{number}", "token": token(number), "ca": made.ca,
                                                  "dispatcher": at})
        done = Machine(tmp_path, text_of(hosts, fetched=True), monkeypatch).run()
    assert done.returncode == 0, done.stderr
    boot = json.loads((tmp_path / "root" / "f-1" / "boot.json").read_text())
    assert (boot["host"], boot["token"]) == ("f-1", token(1))
    public = (tmp_path / "ssh" / "ssh_host_ed25519_key.pub").read_text().split()[1]
    assert public == derived_host_key("s", "f-1").public.split()[1]
    assert set(requests) == {("/v1/gangs/f-1", f"Bearer {gang.gang_token('s', ['f-0', 'f-1', 'f-2'])}",
                              '{"hosts": ["f-0", "f-1", "f-2"]}')}
    assert len(requests) == 2  # the first answer was no answer


def test_a_member_that_gets_no_token_powers_its_machine_off(tmp_path, monkeypatch, each_boot):
    monkeypatch.setenv("SPOTFLEET_FETCH_S", "0")
    made = certs.make("f", time.time())
    with metadata_server(0, "1") as url:
        hosts = plans(tmp_path / "root", 3, url)
        for number, plan in enumerate(hosts):
            plan.files["boot.json"] = json.dumps({"host": f"f-{number}", "token": token(number), "ca": made.ca,
                                                  "dispatcher": "https://127.0.0.1:9"})
        done = Machine(tmp_path, text_of(hosts, fetched=True), monkeypatch).run()
    assert done.returncode == 1 and "https://127.0.0.1:9 does not give this machine its token" in done.stderr
    assert (tmp_path / "asked").read_text() == "poweroff\n"
    assert not (tmp_path / "root" / "f-1" / "boot.json").exists()


@contextmanager
def dispatcher(top: Path, made: certs.FleetCertificates, said: dict[str, str],
               ) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """It fails at first. Yields its URL and the requests that it got."""
    cert, key = top / "cert", top / "key"
    cert.write_text(made.cert)
    key.write_text(made.key)
    requests: list[tuple[str, str, str]] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            requests.append((self.path, self.headers["Authorization"], body))
            if len(requests) == 1:
                return self.send_error(503)
            answer = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.socket = certs.server_context(cert, key).wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("text", ["#!/bin/sh\n", "#cloud-config\n: [", "#cloud-config\n{}"])
def test_user_data_of_somebody_else_is_refused(text):
    with pytest.raises(UsageError, match="its user data is none of ours"):
        gang.files_of(text, "f-1")


def test_as_many_hosts_as_fit_are_launched_together_and_more_are_refused_with_the_fix():
    environment = EnvironmentSpec(packages=("torch==2.13.0",))
    root = Path("/root/.spotfleet-host")
    fits = text_of(plans(root, 100, environment=environment), fetched=True)
    assert gang.packed(fits, 100) and fits.count("one-for-all") == 1
    with pytest.raises(UsageError, match=r"80 hosts at once are too many: user data has .* bytes packed") as caught:
        gang.packed(text_of(plans(root, 80, environment=environment)), 80)
    assert "all_or_nothing: false" in caught.value.hint
