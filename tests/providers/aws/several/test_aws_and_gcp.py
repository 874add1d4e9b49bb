"""One fleet on AWS and on Google Cloud: both fakes behind their real SDKs, a dispatcher on either of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfleet.api import check
from spotfleet.api.account import leaks
from spotfleet.api.home import Home
from spotfleet.api.machine import load_provider
from spotfleet.config import parse
from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.fleet.cost.meter import Meter
from spotfleet.fleet.reconcile import leftovers
from spotfleet.model import Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.aws import session as aws_session
from spotfleet.providers.gcp import session as gcp_session
from spotfleet.providers.kit import userdata
from spotfleet.providers.plugin import plugin_of
from tests.providers.aws.test_toy_and_aws import ZONES, Both

AWS_NEED = "{infra: aws/us-east-1, instance_type: g5.xlarge}"
GCP_NEED = "{infra: gcp/us-central1, instance_type: g2-standard-4}"
DISPATCHERS = {"aws": "t3.small", "gcp": "e2-medium"}
ACCOUNT = "fleet@{}.iam.gserviceaccount.com"
GCP_ZONES = ("us-central1-a", "us-central1-b", "us-central1-c")


@pytest.fixture(scope="session")
def shared_gcp() -> Iterator[Any]:
    from tests.support.fakes.gcp import GcpCloud

    with GcpCloud() as cloud:
        yield cloud


@pytest.fixture
def gcp_cloud(shared_gcp: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As new. The laptop is the project's owner; each request needs a token."""
    shared_gcp.reset()
    for name, value in shared_gcp.environ().items():
        monkeypatch.setenv(name, value)
    shared_gcp.anonymous = ""
    monkeypatch.setattr(gcp_session, "PAUSE_S", 0.0)
    yield shared_gcp
    assert not shared_gcp.findings, shared_gcp.findings[:10]
    assert not shared_gcp.bugs, shared_gcp.bugs[:10]


@pytest.fixture
def home(cloud: Any, gcp_cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurried: None) -> Path:
    """A laptop with credentials for both clouds, and with others for the dispatcher."""
    monkeypatch.setenv("HOME", str(tmp_path))
    aws_session.reset()
    gcp_session.reset()
    key, secret = cloud.user("fleet")
    keys = tmp_path / "credentials"
    keys.write_text(f"[fleet]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    return tmp_path / "home"


def text(gcp_cloud: Any, *clouds: str, needs: str = f"[{AWS_NEED}, {GCP_NEED}]", keys: bool = True) -> str:
    """A fleet file; `keys`: with credentials for its dispatcher, which is on the first cloud."""
    key = gcp_cloud.key_file(ACCOUNT.format(gcp_cloud.project))
    aws, gcp = (f", dispatcher_credentials: {given}" if keys else "" for given in ("fleet", key))
    return (f"name: both\nprovider: [{', '.join(clouds)}]\nnodes: 2\nresources: {{any_of: {needs}}}\n"
            f"dispatcher: {{instance_type: {DISPATCHERS[clouds[0]]}}}\n"
            f"aws: {{ssh_from: [192.0.2.1/32]{aws}}}\ngcp: {{ssh_from: [192.0.2.1/32]{gcp}}}\n")


class Pair(Both):
    """Both fakes; `cloud` is that of AWS."""

    def __init__(self, home: Path, fleet_file: str, cloud: Any, gcp: Any) -> None:
        self.gcp = gcp
        super().__init__(home, fleet_file, cloud)

    def rooms(self, aws: int | None, gcp: int | None) -> None:
        for zone in ZONES:
            self.cloud.set_room(zone, "g5.xlarge", aws)
        for zone in GCP_ZONES:
            self.gcp.set_room(zone, "g2-standard-4", gcp)

    def take_all(self) -> None:
        for instance in self.cloud.instances():
            self.cloud.take(instance.id)
        for instance in self.gcp.instances():
            self.gcp.preempt(instance.name, notice_s=None, room=None)


@pytest.mark.parametrize("clouds", [("aws", "gcp"), ("gcp", "aws")], ids="+".join)
def test_hosts_go_where_there_is_capacity_change_clouds_and_are_in_both_at_once_and_down_leaves_nothing(
        clouds: tuple[str, str], home: Path, cloud: Any, gcp_cloud: Any):
    pair = Pair(home, text(gcp_cloud, *clouds), cloud, gcp_cloud)
    assert {row.region for row in pair.regions} == {"us-east-1", "us-central1"}
    pair.rooms(aws=0, gcp=None)
    assert pair.ticks() == ["gcp", "gcp"]
    pair.rooms(aws=None, gcp=0)
    pair.take_all()
    assert pair.ticks(60) == ["aws", "aws"]
    pair.rooms(aws=0, gcp=1)
    cloud.take(next(i.id for i in cloud.instances() if i.state == "running"))
    assert pair.ticks(60) == ["aws", "gcp"]

    bill = Meter(pair.ledger.rows, max(pair.ledger.state().clock, 0.0))
    assert {h.offer.provider for h in bill.hosts.values()} == {"aws", "gcp"}
    known = Home(home)
    assert leaks.search(known).leaks == ()
    for host in leftovers(pair.provider, "both"):
        pair.provider.terminate(host.request_id)
    cloud.settle()
    gcp_cloud.settle()
    left = pair.provider.list_resources("both")
    assert {one.kind.split()[0] for one in left} == {"aws", "gcp"}
    for one in sorted(left, key=lambda r: pair.provider.resource_kinds().index(r.kind)):
        pair.provider.delete_resource(one)
    assert (pair.provider.list_resources("both"), leftovers(pair.provider, "both")) == ([], [])
    assert (cloud.everything(), gcp_cloud.everything()) == ([], [])


@pytest.mark.parametrize("clouds", [("aws", "gcp"), ("gcp", "aws")], ids="+".join)
def test_the_dispatcher_has_both_sdks_and_for_the_other_cloud_the_credentials_that_its_section_names(
        clouds: tuple[str, str], home: Path, cloud: Any, gcp_cloud: Any, monkeypatch: pytest.MonkeyPatch):
    pair = Pair(home, text(gcp_cloud, *clouds), cloud, gcp_cloud)
    plugin, config = plugin_of("+".join(clouds)), pair.record.provider_config
    there = plugin.for_dispatcher(config)
    own, other = (dict(plugin.parts(there))[name] for name in clouds)
    assert "credentials" not in own and other["credentials"] and "dispatcher_credentials" not in str(
        {k: v for k, v in other["section"].items() if v})
    assert "credentials" not in str(config).replace("dispatcher_credentials", "")  # fleet.json has none
    assert "credentials" not in str(plugin.moved(there, pair.record.spec)).replace("dispatcher_credentials", "")
    offer = pair.provider.offers(pair.record.spec.dispatcher)[0]
    request = LaunchRequest("both-d-0", "both", Role.DISPATCHER, offer, Boot("a.b"))
    settings = (aws_session if clouds[0] == "aws" else gcp_session).settings_of(dict(plugin.parts(config))[clouds[0]])
    assert (set(settings.machine.extras), len(settings.machine.modules)) == ({"aws", "gcp"}, 2)
    assert userdata.user_data(settings.machine, [request])

    for name in [n for n in os.environ if n.startswith(("AWS_ACCESS", "AWS_SECRET", "AWS_SHARED", "GOOGLE_APP"))]:
        monkeypatch.delenv(name)
    fake = gcp_cloud if clouds[1] == "gcp" else cloud
    fake.forget_calls()
    fake.allow("fleet" if fake is cloud else ACCOUNT.format(gcp_cloud.project),
               {"ec2:*"} if fake is cloud else {"compute.*"})
    assert plugin.open(there).clouds[clouds[1]].hosts("both") == []
    assert {c.principal.rpartition("/")[2] for c in fake.calls if c.action != "token"} == {
        "fleet" if fake is cloud else ACCOUNT.format(gcp_cloud.project)}


def test_a_cloud_that_cannot_be_used_is_left_out_with_one_line_and_the_fleet_is_on_the_other(
        home: Path, cloud: Any, gcp_cloud: Any, monkeypatch: pytest.MonkeyPatch):
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name)
    pair = Pair(home, text(gcp_cloud, "aws", "gcp"), cloud, gcp_cloud)
    (line,) = [row.why for row in pair.regions if row.region == "gcp"]
    assert line.startswith("left out: gcp") and "credentials" in line
    assert plugin_of("aws+gcp").region(pair.record.provider_config) == "us-east-1+none"
    assert pair.ticks() == ["aws", "aws"] and gcp_cloud.everything() == []
    monkeypatch.undo()
    again, _ = plugin_of("aws+gcp").settle(load_provider(pair.record), pair.record.provider_config, pair.record.spec,
                                           2, "us-east-1+none")
    assert [name for name, _ in plugin_of("aws+gcp").parts(again)] == ["aws"]  # as the accepted plan said


@pytest.mark.parametrize(("clouds", "needs"), [(("gcp", "aws"), f"[{AWS_NEED}, {GCP_NEED}]"),
                                               (("aws", "gcp"), f"[{GCP_NEED}]")], ids=["its dispatcher", "its hosts"])
def test_a_cloud_that_the_fleet_cannot_do_without_is_an_error(
        clouds: tuple[str, str], needs: str, home: Path, cloud: Any, gcp_cloud: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    with pytest.raises(NeedsPerson, match=r"gcp .*: no credentials"):
        Pair(home, text(gcp_cloud, *clouds, needs=needs), cloud, gcp_cloud)
    assert (cloud.everything(), gcp_cloud.everything()) == ([], [])


def test_without_credentials_for_its_dispatcher_the_second_cloud_is_left_out_and_the_line_says_where_they_stand(
        home: Path, cloud: Any, gcp_cloud: Any):
    pair = Pair(home, text(gcp_cloud, "aws", "gcp", keys=False), cloud, gcp_cloud)
    assert [row.why for row in pair.regions if row.region == "gcp"] == [
        "left out: the dispatcher on aws has no credentials for gcp (name them as `dispatcher_credentials` in section "
        "`gcp` of the fleet file (docs/clouds/gcp.md))"]


@pytest.mark.parametrize(("was", "now", "said"), [
    ("dispatcher_credentials: fleet", "dispatcher_credentials: nobody", "has no access key of profile 'nobody'"),
    ("fleet@", "nobody@", "nobody@.* cannot be read: No such file"),
])
def test_credentials_that_cannot_be_read_are_an_error_that_names_them(
        was: str, now: str, said: str, home: Path, cloud: Any, gcp_cloud: Any):
    first = ("gcp", "aws") if "fleet" in was and "@" not in was else ("aws", "gcp")
    with pytest.raises(UsageError, match=said):
        Pair(home, text(gcp_cloud, *first).replace(was, now), cloud, gcp_cloud)


def test_check_covers_both_and_a_cloud_without_credentials_hides_nothing_of_the_other(
        home: Path, cloud: Any, gcp_cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "both.yaml"
    file.write_text(text(gcp_cloud, "gcp", "aws", keys=False))

    def found() -> list[str]:
        (section,) = check.sections(Home(home), file=file)
        return [f"{f.level} {f.what}" for f in section.findings]

    lines = found()
    assert {name for line in lines for name in ("aws: ", "gcp: ") if name in line} == {"aws: ", "gcp: "}
    assert "blocker the dispatcher on gcp has no credentials for aws" in lines
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    gcp_session.reset()
    after = found()
    assert any(line.startswith("blocker gcp: ") and "no credentials" in line for line in after)
    assert [line for line in after if "aws: " in line] == [line for line in lines if "aws: " in line]


def test_a_cloud_in_trouble_ends_no_check_that_another_passes(home: Path, cloud: Any, gcp_cloud: Any,
                                                              monkeypatch: pytest.MonkeyPatch):
    spec = parse(text(gcp_cloud, "aws", "gcp"), home / "both.yaml", {}).spec
    provider = plugin_of("aws+gcp").open(plugin_of("aws+gcp").config(spec, os.environ, ""))
    for failing in ({"gcp"}, {"aws"}, {"aws", "gcp"}):
        for name, one in provider.clouds.items():
            monkeypatch.setattr(one, "check", _fails if name in failing else lambda: None)
        if len(failing) == 2:
            with pytest.raises(SpotfleetError, match="no answer"):
                provider.check()
        else:
            provider.check()


def _fails() -> None:
    raise SpotfleetError("no answer")
