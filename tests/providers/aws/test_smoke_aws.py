"""scripts/smoke-aws against the AWS fake, with a stand-in for the command line (`smoke_cli.py`): the notice by FIS,
money, failures and Ctrl-C on the way; and always the end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import smoke_aws
import smoke_notice
import smoke_parts
from smoke_report import hide

from tests.support.aws import smoke_cli
from tests.support.aws.aws_hosts import LONG

TOP = Path(__file__).parents[3]

class InProcess(smoke_aws.Smoke):
    """The stand-in is called, not run: quicker."""

    def cli(self, *words: str, ok: bool = True, shown: bool = True, limit_s: float = 0.0) -> smoke_aws.Done:
        self.afford()
        self.report.say(f"$ spotfleet {' '.join(words)}")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = smoke_cli.main(list(words), self.session.client("ec2", region_name=self.region))
        self.report.note(out.getvalue())
        if ok and code:
            raise smoke_aws.Stopped(f"`spotfleet {words[0]}` ended with {code}: {err.getvalue()}")
        return smoke_aws.Done(code, out.getvalue(), err.getvalue())


STAND_IN = (sys.executable, str(TOP / "tests" / "support" / "aws" / "smoke_cli.py"))


@pytest.fixture
def fis(cloud: Any) -> list[str]:
    """The experiments of the fake come true: a hint, a notice, the loss. The instances that met with one."""
    from moto.fis.models import fis_backends

    fis_backends.reset()
    met: list[str] = []

    def after(call: Any) -> None:
        if call.service != "fis":
            return
        begun = fis_backends[cloud.ACCOUNT]["us-east-1"].experiments.values()
        arns = [arn for experiment in begun for target in experiment.targets.values() for arn in target["resourceArns"]]
        for instance in [arn.rpartition("/")[2] for arn in arns[len(met):]]:
            met.append(instance)
            cloud.rebalance(instance)
            cloud.interrupt(instance, notice_s=3.0, room=None)

    cloud.after = after
    return met


@pytest.fixture
def smoke(cloud: Any, fis: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """smoke(trouble, options...) -> (exit code, report); `price` of the machines, $/h."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(smoke_notice, "POLL_S", 0.1)
    monkeypatch.setattr(smoke_parts, "RETURN_S", 60.0)
    real = smoke_aws.prepared

    def run(trouble: str = "", *options: str, price: float = 0.1, kind: type = InProcess) -> tuple[int, str]:
        def prepared(args: Any, folder: Path, *part: Any) -> str:
            (folder / "trouble").write_text(trouble)
            return real(args, folder, *part)

        monkeypatch.setattr(smoke_aws, "prepared", prepared)
        report = tmp_path / "report.txt"
        code = smoke_aws.main(["--region", "us-east-1", "--report", str(report), *options], kind, command=STAND_IN,
                              poll_s=0.1, price_usd_h=lambda _file: price)
        return code, report.read_text()

    yield run
    cloud.after = None


def left(cloud: Any) -> list[str]:
    return [thing.kind for thing in cloud.everything()]


def test_all_of_it_in_the_right_order_and_nothing_left(cloud, smoke, fis):
    code, report = smoke()
    assert code == 0, report
    steps = re.findall(r"== ok after \d+ s: (.*)", report)
    assert steps == ["check", "plan", "up", "train", "interruption notice", "cost", "cancel", "down", "leaks"]
    assert len(fis) == 1 and re.search(r"s until its replacement trained", report) and "ALL WENT WELL" in report
    assert left(cloud) == []
    templates = cloud.client("fis").list_experiment_templates()["experimentTemplates"]
    assert templates == []
    assert "cost of ACCOUNT at ADDRESS by AKIA***" in report  # nothing that is nobody's business
    assert "123456789012" not in report and "203.0.113" not in report


def test_the_role_of_fis_may_interrupt_this_fleet_and_nothing_else(cloud, smoke):
    seen: list[dict[str, Any]] = []

    def before(call: Any) -> None:
        if call.action in ("iam:CreateRole", "iam:PutRolePolicy"):
            seen.append(call.params)

    cloud.before = before
    code, report = smoke("", "--name", "smoke-x")
    cloud.before = None
    assert code == 0, report
    role, allowed = seen
    assert role["Path"] == "/spotfleet/" and {"Key": "spotfleet", "Value": "smoke-x"} in role["Tags"]
    (trust,) = json.loads(role["AssumeRolePolicyDocument"])["Statement"]
    assert trust["Principal"] == {"Service": "fis.amazonaws.com"}
    assert trust["Condition"] == {"StringEquals": {"aws:SourceAccount": cloud.ACCOUNT}}
    interrupts, _looks = json.loads(allowed["PolicyDocument"])["Statement"]
    assert interrupts["Condition"] == {"StringEquals": {"aws:ResourceTag/spotfleet": "smoke-x"}}


@pytest.mark.parametrize("trouble, failed", [("check", "check"), ("up", "up"), ("train", "train")])
def test_whatever_fails_the_fleet_goes_down(cloud, smoke, trouble: str, failed: str):
    code, report = smoke(trouble)
    assert code == 1 and f"NOT ALL WENT WELL: {failed}" in report
    assert left(cloud) == []
    assert ("nothing was launched" in report) == (trouble == "check")


def test_a_fleet_that_does_not_go_down_is_shouted_about_with_how_to_verify(cloud, smoke):
    code, report = smoke("down", "--name", "smoke-y")
    assert code == 1 and "THE FLEET MAY NOT BE GONE" in report and "it is still there" in report
    for command in ("spotfleet down smoke-y -y", "spotfleet leaks --all-regions --fix",
                    "Name=tag:spotfleet,Values=smoke-y,smoke-y-????"):
        assert command in report


def test_more_than_the_limit_is_not_begun(cloud, smoke):
    code, report = smoke("", "--max-usd", "0.5", price=3.0)
    assert code == 1 and "give --max-usd" in report and "nothing was launched" in report
    assert left(cloud) == []


def test_when_the_money_is_spent_it_stops_in_the_middle_of_a_command(cloud, smoke, monkeypatch):
    monkeypatch.setitem(smoke_aws.PARTS, "basic", replace(smoke_aws.PARTS["basic"], minutes=0))
    begun = time.monotonic()
    code, report = smoke("slow", "--no-fis", "--max-usd", "1", price=3600.0, kind=smoke_aws.Smoke)
    assert code == 1 and "the estimate has reached --max-usd 1" in report
    assert left(cloud) == [] and time.monotonic() - begun < 120  # it was ended


def test_without_fis_a_host_is_ended_by_our_own_means(cloud, smoke, fis):
    _code, report = smoke("", "--no-fis")
    assert fis == [] and "$ spotfleet chaos kill" in report


def part(report: str) -> list[str]:
    return re.findall(r"=== part (\w+):", report)


def test_two_spot_hosts_of_one_call_are_shown_with_their_launch_indexes_and_places(cloud, smoke):
    code, report = smoke("", "--part", "gang")
    assert code == 0, report
    assert part(report) == ["gang"] and "== ok after 0 s: two spot hosts by one call" in report
    assert len(re.findall(r"launch index 0, place '[01]'", report)) == 2 and left(cloud) == []
    assert "all of it about 15 minutes and $" in report


def test_hosts_that_were_launched_one_by_one_are_no_gang(cloud, smoke):
    code, report = smoke("one by one", "--part", "gang")
    assert code == 1 and "NOT ALL WENT WELL: two spot hosts by one call" in report and left(cloud) == []


def test_disks_of_another_key_than_the_customers_are_found(cloud, smoke):
    kms = cloud.client("kms")
    key = kms.create_key(Description="disks")["KeyMetadata"]["Arn"]
    kms.create_grant(KeyId=key, GranteePrincipal=f"arn:aws:iam::{cloud.ACCOUNT}:role/aws-service-role/"
                     "spot.amazonaws.com/AWSServiceRoleForEC2Spot", Operations=["CreateGrant", "Decrypt"])
    code, report = smoke("", "--part", "key", "--kms-key", key)
    assert code == 0, report
    assert "3 disks of 3 machines, encrypted by arn:aws:kms:us-east-1:ACCOUNT:key/" in report
    code, report = smoke("plain disks", "--part", "key", "--kms-key", key)
    assert code == 1 and "every disk was expected to be encrypted by the one key" in report and left(cloud) == []


def test_machines_of_private_subnets_have_no_public_address(cloud, smoke):
    subnet = cloud.client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
    code, report = smoke("", "--part", "private", "--subnets", subnet)
    assert code == 0 and "no machine has a public address" in report, report
    code, report = smoke("public", "--part", "private", "--subnets", subnet)
    assert code == 1 and "have public addresses" in report and left(cloud) == []


def test_a_host_that_ec2_stops_comes_back_as_the_same_machine(cloud, smoke, fis):
    code, report = smoke("", "--part", "stop")
    assert code == 0, report
    assert len(fis) == 1 and "s until EC2 had started the stopped host again" in report and left(cloud) == []


def test_a_host_that_ec2_ends_instead_of_stopping_it_is_a_finding(cloud, smoke, fis):
    code, report = smoke("one-time", "--part", "stop")
    assert code == 1 and "instead of stopping it" in report and left(cloud) == []


def test_all_parts_that_have_what_they_need_run_one_after_the_other_for_one_limit(cloud, smoke, fis):
    code, report = smoke("", "--part", "all")
    assert code == 0, report
    assert part(report) == ["basic", "gang", "stop"] and "about 70 minutes" in report
    assert left(cloud) == []
    code, report = smoke("", "--part", "all", "--max-usd", "0.7")
    assert code == 1 and part(report) == ["basic", "gang", "stop"]
    assert "== FAILED after 0 s: plan" in report.partition("=== part stop")[2] and left(cloud) == []


def test_a_part_without_what_it_needs_is_refused(cloud, capsys):
    with pytest.raises(SystemExit):
        smoke_aws.main(["--region", "us-east-1", "--part", "key"])
    assert "--part key needs --kms-key" in capsys.readouterr().err


@LONG  # two processes of their own; that any end takes it down is seen by the tests around
def test_ctrl_c_takes_the_fleet_down_first(cloud, tmp_path, monkeypatch):
    """In a process of its own, as a user's."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    report = tmp_path / "report.txt"
    script = (f"import sys; sys.path.insert(0, {str(TOP / 'scripts')!r}); import smoke_aws\n"
              f"real = smoke_aws.prepared\n"
              f"def prepared(args, folder, *part):\n    (folder / 'trouble').write_text('slow')\n"
              f"    return real(args, folder, *part)\n"
              f"smoke_aws.prepared = prepared\n"
              f"sys.exit(smoke_aws.main(['--region', 'us-east-1', '--report', {str(report)!r}], "
              f"command={STAND_IN!r}, poll_s=0.1, price_usd_h=lambda f: 0.1))")
    running = subprocess.Popen([sys.executable, "-c", script], env=dict(os.environ), stderr=subprocess.PIPE, text=True)
    try:
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(running.stderr), daemon=True)  # type: ignore[arg-type]
        reading.start()
        deadline = time.monotonic() + 60
        while not any("launching dispatcher" in line for line in lines):
            assert time.monotonic() < deadline and running.poll() is None, lines
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 1
        reading.join(10)
    finally:
        running.kill()
    assert "interrupted: the fleet is taken down first" in "".join(lines) and left(cloud) == []
    assert "report: " in lines[-1]


@pytest.mark.parametrize("told, hidden", [
    ("arn:aws:iam::123456789012:user/jane.doe", "arn:aws:iam::ACCOUNT:user/***"),
    ("arn:aws:iam::123456789012:role/spotfleet/x", "arn:aws:iam::ACCOUNT:role/spotfleet/x"),
    ("at 172.31.4.10 and 10.0.0.1 and 52.1.2.3", "at 172.31.4.10 and 10.0.0.1 and ADDRESS"),
])
def test_what_is_hidden(told: str, hidden: str):
    assert hide(told) == hidden


def test_the_policy_for_fis_is_printed(capsys):
    assert smoke_aws.main(["--policy"]) == 0
    assert "fis:StartExperiment" in capsys.readouterr().out
