"""scripts/smoke-gcp against the fake of Google Cloud, with a stand-in for the command line (`gcp_smoke_cli.py`): the
preemption, money, failures on the way; and always the end."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from spotfleet.providers.gcp import session
from tests.support.fakes.gcp import GcpCloud
from tests.support.gcp import gcp_smoke_cli

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import smoke_aws
import smoke_gcp

STEPS = ["check", "plan", "up", "train", "interruption notice", "cost", "cancel", "down", "leaks"]


class InProcess(smoke_gcp.GcpSmoke):
    """The stand-in is called, not run."""

    fake: GcpCloud

    def cli(self, *words: str, ok: bool = True, shown: bool = True, limit_s: float = 0.0) -> smoke_aws.Done:
        self.afford()
        self.report.say(f"$ spotfleet {' '.join(words)}")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = gcp_smoke_cli.main(list(words), self.account, self.fake)
        self.report.note(out.getvalue())
        if ok and code:
            raise smoke_aws.Stopped(f"`spotfleet {words[0]}` ended with {code}: {err.getvalue()}")
        return smoke_aws.Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def server():
    with GcpCloud() as cloud:
        yield cloud


@pytest.fixture
def smoke(server: GcpCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """smoke(trouble, options...) -> (exit code, report); `price` of the machines, $/h."""
    server.reset()
    session.reset()
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)
    InProcess.fake = server
    real = smoke_gcp.prepared

    def preempted(call: Any) -> None:
        """A notice of some seconds is enough here."""
        if call.action == "compute.instances.simulateMaintenanceEvent":
            server.machine(call.params["instance"]).body["scheduling"]["preemptionNoticeDuration"] = {"seconds": "2"}

    def run(trouble: str = "", *options: str, price: float = 0.1) -> tuple[int, str]:
        def prepared(args: Any, folder: Path, *more: Any) -> str:
            (folder / "trouble").write_text(trouble)
            return real(args, folder, *more)

        monkeypatch.setattr(smoke_gcp, "prepared", prepared)
        server.before = preempted
        report = tmp_path / "report.txt"
        where = ["--project", server.project, "--region", "us-central1"]
        code = smoke_gcp.main([*where, "--report", str(report), *options], InProcess, poll_s=0.1,
                              price_usd_h=lambda _file: price)
        return code, report.read_text()

    yield run
    server.before = None
    assert not server.findings and not server.bugs


def test_a_smoke_of_google_cloud_runs_in_the_right_order_and_leaves_nothing(server, smoke):
    code, report = smoke()
    assert code == 0, report
    assert re.findall(r"== ok after \d+ s: (.*)", report) == STEPS
    assert "SPOT, DELETE at a preemption, 120 s of notice" in report
    assert re.search(r"compute.instances.preempted by system: \S+ to \S+, DONE", report)
    assert re.search(r"s until its replacement trained", report) and "ALL WENT WELL" in report
    assert server.everything() == []
    assert "cost of PROJECT at ADDRESS by PERSON" in report and server.project not in report


def test_the_part_stop_sees_the_same_machine_come_back(server, smoke):
    code, report = smoke("", "--part", "stop")
    assert code == 0, report
    assert "s until the machine ran again" in report and server.everything() == []
    code, report = smoke("another machine", "--part", "stop")
    assert code == 1 and "is on another machine" in report
    assert server.everything() == []


@pytest.mark.parametrize(("trouble", "failed"), [("check", "check"), ("up", "up"), ("train", "train")])
def test_whatever_fails_in_a_smoke_the_fleet_goes_down(server, smoke, trouble: str, failed: str):
    code, report = smoke(trouble)
    assert code == 1 and f"NOT ALL WENT WELL: {failed}" in report
    assert server.everything() == []
    assert ("nothing was launched" in report) == (trouble == "check")


def test_a_fleet_that_stays_is_named_with_the_commands_that_show_it(server, smoke):
    code, report = smoke("down", "--name", "smoke-y")
    assert code == 1 and "THE FLEET MAY NOT BE GONE" in report and "it is still there" in report
    for command in ("spotfleet down smoke-y -y", "spotfleet leaks --all-regions --fix",
                    "gcloud compute instances list --project PROJECT --filter 'labels.spotfleet~^smoke-y(-|$)'"):
        assert command in report


def test_a_smoke_that_costs_more_than_its_limit_is_not_begun(server, smoke):
    code, report = smoke("", price=30.0)
    assert code == 1 and "give --max-usd" in report and "nothing was launched" in report
    assert server.everything() == []


def test_without_a_preemption_a_host_is_ended_by_our_own_means(server, smoke):
    _code, report = smoke("", "--no-preemption")
    assert "$ spotfleet chaos kill" in report
    assert "compute.instances.simulateMaintenanceEvent" not in server.actions()


def test_a_project_has_to_be_named(monkeypatch, capsys):
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        smoke_gcp.parse(["--region", "us-central1"])
    assert "gcloud projects list" in capsys.readouterr().err
