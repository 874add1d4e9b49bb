from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.agent.agent_dispatcher import FakeDispatcher
from tests.support.agent.agent_stage import Stage


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[FakeDispatcher]:
    fake = FakeDispatcher(tmp_path)
    fake.start()
    yield fake
    fake.close()


@pytest.fixture
def stage(tmp_path: Path, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """An agent without torch: its zygote is ready at once. See `warm_stage` for the other."""
    stage = Stage(tmp_path / "home", dispatcher)
    block = tmp_path / "without_torch"
    for name in ("torch", "numpy"):
        (block / name).mkdir(parents=True)
        (block / name / "__init__.py").write_text("raise ImportError('hidden by this test')\n")
    stage.env["PYTHONPATH"] = os.pathsep.join([str(block), os.environ.get("PYTHONPATH", "")])
    yield stage
    stage.end()


@pytest.fixture
def warm_stage(tmp_path: Path, dispatcher: FakeDispatcher) -> Iterator[Stage]:
    """An agent whose zygote imports torch."""
    stage = Stage(tmp_path / "home", dispatcher)
    yield stage
    stage.end()


@pytest.fixture
def metadata() -> Iterator[SimpleNamespace]:
    """A metadata server as EC2 has it; `answers` maps the end of a path to a body."""
    answers: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._answer(200, "a-token")

        def do_GET(self) -> None:
            body = next((b for end, b in answers.items() if self.path.endswith(end)), None)
            self._answer(404 if body is None else 200, body or "")

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_address[1]}", answers=answers)
    server.shutdown()
    thread.join()
    server.server_close()
