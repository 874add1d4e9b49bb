"""fetch.py against a dispatcher's side that is real down to TLS: what comes must be the very code that was named."""

from __future__ import annotations

import hashlib
import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spotfleet.bootstrap import Wheel, fetch, script
from spotfleet.model import Role
from spotfleet.transport import certs
from tests.support.bootstrap.existing_machine import F1, ExistingMachine, plan

TOKEN = "f-1.0123456789abcdef"
DATA = b"the code " * 5000
DIGEST = hashlib.sha256(DATA).hexdigest()
Answer = Callable[[BaseHTTPRequestHandler], None]


def gives(data: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(DATA)))
    handler.end_headers()
    handler.wfile.write(DATA[:1000])


def refuses(status: int) -> Answer:
    return lambda handler: handler.send_error(status)


@dataclass
class Dispatcher:
    """Answers in this order, the last answer for ever; 401 to whoever does not know the token."""

    certificates: certs.FleetCertificates
    folder: Path
    answers: list[Answer] = field(default_factory=lambda: [gives(DATA)])
    asked: list[str] = field(default_factory=list)
    told: list[tuple[str, dict[str, object]]] = field(default_factory=list)  # paths and bodies

    def __post_init__(self) -> None:
        for name in ("cert", "key"):
            (self.folder / name).write_text(getattr(self.certificates, name))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        context = certs.server_context(self.folder / "cert", self.folder / "key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"https://127.0.0.1:{self.server.server_address[1]}"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.send_error(401)
                    return
                (outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0])(self)

            def do_POST(self) -> None:
                outer.told.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.do_GET()

            def log_message(self, *args: object) -> None:
                return

            def handle(self) -> None:
                try:
                    super().handle()
                except (ssl.SSLError, ConnectionError):
                    return  # a client that does not trust us

        return Handler

    def boot(self, **changed: str) -> str:
        return json.dumps({"dispatcher": self.url, "ca": self.certificates.ca, "token": TOKEN, **changed})


@pytest.fixture(scope="module")
def certificates() -> certs.FleetCertificates:
    return certs.make("f", time.time())


@pytest.fixture
def dispatcher(certificates, tmp_path: Path) -> Iterator[Dispatcher]:
    made = Dispatcher(certificates, tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def fetched(home: Path, boot: str, limit_s: float = 20.0, url: str = "") -> tuple[str, bytes | None]:
    """What it says, and what lies there then."""
    home.mkdir(exist_ok=True)
    (home / "boot.json").write_text(boot)
    done = subprocess.run([sys.executable, fetch.__file__, str(home), "x.whl", DIGEST], capture_output=True, text=True,
                          timeout=60, env={"SPOTFLEET_FETCH_S": str(limit_s), "SPOTFLEET_WHEEL_URL": url})
    path = home / "wheel" / "x.whl"
    assert done.returncode == (0 if path.exists() else 1)
    assert [p.name for p in home.glob("wheel/*")] in ([], ["x.whl"])
    return done.stderr, path.read_bytes() if path.exists() else None


def test_the_wheel_is_asked_for_by_digest_until_it_comes_whole(dispatcher: Dispatcher, tmp_path: Path):
    dispatcher.answers = [refuses(503), refuses(404), cut_off, gives(DATA)]
    assert fetched(tmp_path / "home", dispatcher.boot()) == ("", DATA)
    assert dispatcher.asked == [f"/v1/bundles/{DIGEST}"] * 4


def test_other_code_is_refused_at_once(dispatcher: Dispatcher, tmp_path: Path):
    dispatcher.answers = [gives(b"evil")]
    why, data = fetched(tmp_path / "home", dispatcher.boot())
    assert data is None
    assert why == (f"cannot fetch the code from {dispatcher.url}/v1/bundles/{DIGEST}: what came has digest "
                   f"{hashlib.sha256(b'evil').hexdigest()}, not {DIGEST}\n")
    assert len(dispatcher.asked) == 1


def test_a_dispatcher_of_another_authority_hears_no_token(dispatcher: Dispatcher, tmp_path: Path):
    why, data = fetched(tmp_path / "home", dispatcher.boot(ca=certs.make("g", time.time()).ca))
    assert (data, dispatcher.asked) == (None, [])
    assert "CERTIFICATE_VERIFY_FAILED" in why


@pytest.mark.parametrize(("boot", "answers", "why"), [
    ({"token": "wrong"}, [gives(DATA)], "it answers 401 Unauthorized"),
    ({}, [refuses(403)], "it answers 403 Forbidden"),
    ({"dispatcher": "https://127.0.0.1:1"}, [], "[Errno 111] Connection refused"),
])
def test_what_may_pass_is_tried_again_for_so_long_and_then_told(dispatcher, tmp_path: Path, boot, answers, why: str):
    dispatcher.answers = answers
    began = time.monotonic()
    told, data = fetched(tmp_path / "home", dispatcher.boot(**boot), limit_s=3.0)
    assert (data, told.partition(f"/v1/bundles/{DIGEST}: ")[2]) == (None, f"{why}\n")
    assert time.monotonic() - began < 45
    assert not answers or len(dispatcher.asked) > 1


def test_a_url_may_be_a_file_and_its_signature_is_not_told(tmp_path: Path):
    (tmp_path / "code").write_bytes(DATA)
    assert fetched(tmp_path / "home", "{}", url=(tmp_path / "code").as_uri()) == ("", DATA)
    told, data = fetched(tmp_path / "other", "{}", limit_s=0.2, url="https://127.0.0.1:1/x.whl?signature=hidden")
    assert (told, data) == ("cannot fetch the code from https://127.0.0.1:1/x.whl: [Errno 111] Connection refused\n",
                            None)


def test_an_agent_fetches_its_code_from_its_dispatcher(dispatcher: Dispatcher, machine: ExistingMachine,
                                                       idle_wheel: Wheel):
    dispatcher.answers = [gives(idle_wheel.data)]
    machine.bring(plan(idle_wheel, role=Role.WORKER, files={"boot.json": dispatcher.boot()}), None)
    machine.start()
    assert machine.life()["env"]["SPOTFLEET_HOST_MARK"] == F1
    assert TOKEN not in machine.log()
    assert dispatcher.asked == [f"/v1/bundles/{idle_wheel.sha256}"]


def test_a_machine_reports_to_its_dispatcher_why_it_cannot_become_a_host(dispatcher: Dispatcher, tmp_path: Path):
    """`report_failure` of bootstrap.sh, by whatever Python the machine has."""
    home = tmp_path / "root" / F1
    home.mkdir(parents=True)
    wanted = plan(Wheel("x.whl", DIGEST, b""), role=Role.WORKER, files={"boot.json": dispatcher.boot()})
    for name, text in script.files(wanted).items():
        text = text.partition("\ncase ${1:-} in\n")[0] if name == "bootstrap.sh" else text
        (home / name).write_text(text)
    with (home / "bootstrap.sh").open("a") as file:
        file.write('\nFAIL_S=60\nreport_failure "a GPU is broken: slot 1 \\"x\\""\nunset FAIL_S\n'
                   'report_failure "no pip"\n')
    done = subprocess.run(["bash", str(home / "bootstrap.sh")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    path = f"/v1/hosts/{F1}/failed"
    assert dispatcher.told == [(path, {"why": 'a GPU is broken: slot 1 "x"', "broken": True}),
                               (path, {"why": "no pip", "broken": False})]
