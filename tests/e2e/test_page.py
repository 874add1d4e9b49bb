"""`spotfleet page` and `spotfleet metrics` on a fleet of real processes, from the command to its end by Ctrl-C."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.e2e.e2e_stage import CLI, Stage, hosts_of, trains, wait_for

pytestmark = pytest.mark.processes


@contextmanager
def news(address: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """(name, value) of the server-sent events under the page's address."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=90)
    connection.request("GET", f"{parts.path}live")
    answer = connection.getresponse()

    def each() -> Iterator[tuple[str, Any]]:
        name = ""
        while line := answer.readline().decode().rstrip("\n") or "\n":
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    try:
        yield each()
    finally:
        answer.close()
        connection.close()


def test_a_page_shows_an_interruption_as_it_happens_and_ends_with_ctrl_c(stage: Stage):
    fleet = stage.fleet("paged", least=1, target=2)
    job = stage.counting(fleet, 100_000, (1, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=3))
    page = subprocess.Popen([CLI, "page", "--no-browser"], cwd=stage.work, text=True, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert page.stdout is not None and page.stderr is not None
        address = page.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:") and "#" not in address
        with news(address) as found:
            name, whole = next(found)
            assert name == "whole" and whole["jobs"][job.id]["world_size"] == 2 and len(whole["hosts"]) == 3
            fleet.interrupt(hosts_of(job)[1], None)
            marks: list[str] = []
            while "death" not in marks:
                name, changed = next(found)
                marks += [m["cause"] for m in changed["series"].get(job.id, {"marks": []})["marks"]]
            assert changed["series"][job.id]["points"]
        page.send_signal(signal.SIGINT)
        assert page.wait(60) == 0
        said = page.stderr.read()
        assert "changes nothing" in said and "the page is closed; fleet paged goes on" in said
        assert "Traceback" not in said
    finally:
        if page.poll() is None:
            page.kill()
        page.communicate()

    text = stage.cli("metrics").stdout
    assert f'spotfleet_job_changes_total{{fleet="{fleet.status().fleet}",job="{job.id}",cause="death"}} 1' in text
    lines = stage.cli("metrics", "--prometheus").stdout
    token = (stage.home / "fleets" / "paged" / "prometheus" / "token").read_text()
    assert str(stage.home / "fleets" / "paged" / "prometheus" / "token") in lines and "server_name:" in lines
    assert fleet.client.endpoint.token not in lines and token.startswith("metrics:")
    fleet.down(discard=True)
