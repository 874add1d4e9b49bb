"""`spotfleet check aws` against an account of the fake: each thing that keeps a new account from a first fleet is named
and answered with what mends it; and nothing is made or changed."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spotfleet.model import CheckpointSpec, FleetSpec, Market, Need, Nodes
from spotfleet.providers import Finding
from spotfleet.providers.aws.account import bucket, check, permissions, quotas
from spotfleet.providers.aws.mapping import policies
from spotfleet.providers.aws.section.spec import AwsNetwork
from spotfleet.providers.aws.session import INSTALL, account_of
from spotfleet.providers.kit import laptop

G5 = FleetSpec("g5", provider="aws", any_of=(Need(instance_type="g5.xlarge"),), nodes=Nodes(2, 4, 4))
HOME = {"ssh_from": ("198.51.100.0/24",)}


class Checkip(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"203.0.113.9\n")

    def log_message(self, *_args: object) -> None:
        return


@pytest.fixture
def found_by_the_internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Checkip)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(laptop, "CHECKIP_URL", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def ask(provider: Any, spec: FleetSpec | None = None, about: str = "") -> list[Finding]:
    return [f for f in provider.findings(spec) if about in ("", f.about)]


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(f.level, f.about) for f in findings if f.level != "ok"]


def one(findings: list[Finding], level: str) -> Finding:
    (found,) = [f for f in findings if f.level == level]
    return found


def test_in_an_account_that_is_ready_nothing_is_in_the_way_and_nothing_is_made(cloud, aws, found_by_the_internet):
    before = cloud.everything()
    found = ask(aws(), G5)
    assert bad(found) == []
    assert {f.about for f in found} == {"credentials", "clock", "permissions", "spot role", "notices", "pools",
                                        "vCPU quota", "network", "image", "disk key", "SSH"}
    said = "\n".join(f.what for f in found)
    assert "arn:aws:iam::123456789012:user/owner of account 123456789012" in said
    assert "for hosts, the cheapest g5.xlarge in us-east-1" in said
    assert "for the dispatcher, the cheapest t3a.small in us-east-1" in said
    assert f"{cloud.DEEP_LEARNING} for hosts such as g5.xlarge" in said and f"{cloud.UBUNTU} for the dispatcher" in said
    assert "you come from 203.0.113.9/32" in said
    assert cloud.everything() == before
    changing = [c.action for c in cloud.calls if not c.dry_run and not c.action.rpartition(":")[2].startswith(
        ("Describe", "Get", "List", "Simulate", "Head"))]
    assert changing == []


@contextlib.contextmanager
def a_user(cloud: Any, document: dict[str, Any] | None) -> Iterator[None]:
    """Someone to whom this policy is attached, and no other."""
    key, secret = cloud.user("ci")
    cloud.attach("ci", document)
    cloud.forget_calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        yield


@pytest.mark.parametrize("more", [{}, {"key_pair": "mine", "kms_key": "alias/mine"}], ids=["plain", "with-keys"])
def test_check_does_not_call_denied_what_the_printed_policy_allows(cloud, aws, more):
    cloud.client("ec2", "us-east-1").create_key_pair(KeyName="mine")
    kms = cloud.client("kms", "us-east-1")
    key = kms.create_key()["KeyMetadata"]["KeyId"]
    kms.create_alias(AliasName="alias/mine", TargetKeyId=key)
    kms.create_grant(KeyId=key, Operations=["CreateGrant"], GranteePrincipal="arn:aws:iam::123456789012:role/"
                     "aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot")
    document = policies.laptop(policies.Scope(kms_key=more.get("kms_key", "")))
    with a_user(cloud, document):
        assert bad(ask(aws(**HOME, **more), G5)) == []
    assert [c.action for c in cloud.calls if c.code in permissions.DENIED] == []


RUN = {"Effect": "Deny", "Action": "ec2:RunInstances"}
INSTANCE, VOLUME = ({"Resource": f"arn:aws:ec2:*:*:{kind}/*"} for kind in ("instance", "volume"))
COMPANY = (
    {**RUN, **INSTANCE, "Condition": {"StringNotEquals": {"ec2:MetadataHttpTokens": "required"}}},
    {**RUN, **VOLUME, "Condition": {"Bool": {"ec2:Encrypted": "false"}}},
    {**RUN, **VOLUME, "Condition": {"Null": {"aws:RequestTag/cost-center": "true"}}},
)


def test_a_companys_rules_that_a_launch_keeps_are_kept_by_the_question_as_well(cloud, aws):
    cloud.guardrail(*COMPANY)
    assert bad(ask(aws(**HOME), replace(G5, tags={"cost-center": "42"}))) == []


def test_a_companys_rule_that_a_launch_breaks_is_named_and_no_policy_is_said_to_help(cloud, aws):
    cloud.guardrail(*COMPANY)
    found = one(ask(aws(**HOME), G5, "permissions"), "blocker")
    assert found.what.startswith("a rule of your organization denies ec2:RunInstances on arn:aws:ec2:us-east-1:"
                                 "123456789012:volume/*")
    assert "attach" not in found.fix and "`tags`" in found.fix


def test_check_names_the_right_that_is_missing_and_not_the_call_that_asked_for_it(cloud, aws):
    document = policies.laptop(policies.Scope())
    document["Statement"] = [s for s in document["Statement"] if s["Sid"] != "TagAtLaunch"]
    with a_user(cloud, document):
        assert one(ask(aws(**HOME), G5, "permissions"), "blocker").what == "denied: ec2:CreateTags"


# ---- credentials and clock


def test_expired_credentials_end_the_check_with_how_to_log_in(cloud, aws):
    cloud.expire(cloud.owner)
    (found,) = ask(aws(), G5)
    assert (found.level, found.about) == ("blocker", "credentials")
    assert "the credentials have expired" in found.what and "aws sso login" in found.fix


def test_no_credentials_mean_that_aws_is_not_set_up(cloud, aws, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (found,) = ask(aws(), None)
    assert (found.level, found.about) == ("absent", "credentials")
    assert "no valid credentials" in found.what and "aws configure" in found.fix


def test_without_boto3_it_says_what_to_install(aws, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert ask(aws(), G5) == [Finding("boto3 is not installed", "absent", INSTALL, "SDK")]


@pytest.mark.parametrize("skew_s, level", [(100.0, "warning"), (-270.0, "blocker"), (3600.0, "blocker")])
def test_a_clock_that_is_off_is_told_with_by_how_much(cloud, aws, skew_s: float, level: str):
    cloud.skew_s = skew_s
    found = next(f for f in ask(aws(**HOME), None) if f.about == "clock")
    assert found.level == level and found.fix == "timedatectl set-ntp true"
    assert f"{'behind' if skew_s > 0 else 'ahead of'} AWS's" in found.what
    assert abs(skew_s) - 5 <= float(found.what.split(" is ")[1].split(" s ")[0]) <= abs(skew_s) + 5


# ---- permissions


def test_a_denied_action_is_named_whether_dry_run_or_the_simulation_told(cloud, aws):
    cloud.deny(cloud.owner, {"ec2:RunInstances", "ec2:DescribeVolumes", "iam:PassRole", "ec2:TerminateInstances"})
    found = one(ask(aws(**HOME), G5, "permissions"), "blocker")
    assert found.what == "denied: ec2:DescribeVolumes, ec2:RunInstances, ec2:TerminateInstances, iam:PassRole"
    assert "aws iam attach-user-policy --user-name owner" in found.fix and "check aws --policy" in found.fix


def test_what_cannot_be_tried_is_said_to_be_undecided(cloud, aws):
    cloud.deny(cloud.owner, {"iam:SimulatePrincipalPolicy"})
    found = one(ask(aws(**HOME), G5, "permissions"), "warning")
    assert found.what.startswith("cannot be tried without doing it: ec2:AuthorizeSecurityGroupEgress, ")
    assert "iam:SimulatePrincipalPolicy" in found.fix
    assert re.search("; IAM's simulation has failed: .*iam:SimulatePrincipalPolicy", found.what), found.what


def test_what_the_fleet_file_names_needs_no_right_to_make_it(cloud, aws):
    named = {"dispatcher_profile": "d", "host_profile": "h",
             "networks": (AwsNetwork("us-east-1", security_groups=("sg-1",)),)}
    document = policies.laptop(policies.Scope())
    spec = aws(**named).account.settings.spec
    spared = policies.actions(document) - permissions.needs(document, spec, G5)
    assert spared >= {"iam:CreateRole", "ec2:CreateSecurityGroup", "ec2:CreatePlacementGroup"}
    assert "iam:PassRole" not in spared


# ---- quotas


def test_a_new_account_has_no_gpus_and_hears_which_quota_to_raise_and_how(cloud, aws):
    cloud.set_quota("us-east-1", "G", "spot", 0)
    found = one(ask(aws(**HOME), G5), "blocker")
    assert found.about == "vCPU quota"
    assert found.what == ("us-east-1: 'All G and VT Spot Instance Requests' allows 0 vCPUs, 0 are used: "
                          "room for 0 of 4 hosts of g5.xlarge (4 vCPUs each)")
    page, command = found.fix.splitlines()
    assert page.startswith("https://us-east-1.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/L-")
    assert "aws service-quotas request-service-quota-increase --region us-east-1" in command
    assert command.endswith("--desired-value 20")  # one more than the target: for a replacement


def test_a_quota_for_the_least_number_of_hosts_is_a_warning_only(cloud, aws):
    cloud.set_quota("us-east-1", "G", "spot", 11)
    assert "room for 2 of 4 hosts" in one(ask(aws(**HOME), G5), "warning").what


@pytest.mark.parametrize(("vcpus", "spare"), [(16, False), (19, False), (20, True)])
def test_a_quota_of_just_the_target_is_a_warning_as_a_replacement_has_to_wait(cloud, aws, vcpus: int, spare: bool):
    cloud.set_quota("us-east-1", "G", "spot", vcpus)
    (found,) = [f for f in ask(aws(**HOME), G5, "vCPU quota") if "G and VT" in f.what]
    assert "enough for 4 hosts of g5.xlarge (4 vCPUs each)" in found.what
    assert (found.level, "none to spare: a replacement waits" in found.what) == (
        ("ok", False) if spare else ("warning", True))
    assert spare or found.fix.endswith("--desired-value 20")


def test_quotas_of_several_families_add_up(cloud, aws):
    cloud.set_quota("us-east-1", "G", "spot", 8)
    spec = FleetSpec("mixed", provider="aws", nodes=Nodes(4, 4, 4),
                     any_of=(Need(instance_type="g5.xlarge"), Need(instance_type="m5.large")))
    assert bad(ask(aws(**HOME), spec)) == []


def test_what_others_run_counts_and_what_the_fleet_itself_runs_does_not(cloud, aws):
    cloud.set_quota("us-east-1", "G", "spot", 24)
    ec2 = cloud.client("ec2", "us-east-1")
    for fleet, count in (("other", 1), ("g5", 2)):
        ec2.run_instances(ImageId=cloud.DEEP_LEARNING, InstanceType="g5.xlarge", MinCount=count, MaxCount=count,
                          InstanceMarketOptions={"MarketType": "spot"}, TagSpecifications=[
                              {"ResourceType": "instance", "Tags": [{"Key": "spotfleet", "Value": fleet}]}])
    (found,) = [f for f in ask(aws(**HOME), G5, "vCPU quota") if "G and VT" in f.what]
    assert (found.level, "4 are used: enough for 4 hosts" in found.what) == ("ok", True)


def test_without_a_quota_for_the_dispatcher_nothing_comes_up(cloud, aws):
    cloud.set_quota("us-east-1", "Standard", "on-demand", 1)
    found = one(ask(aws(**HOME), G5), "blocker")
    assert "'Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances' allows 1 vCPUs" in found.what
    assert "the dispatcher (t3a.small) needs 2" in found.what


def test_without_a_fleet_file_every_family_that_cannot_be_launched_is_a_warning(cloud, aws):
    for family in ("G", "P", "P5"):
        cloud.set_quota("us-east-1", family, "spot", 0)
    found = [f for f in ask(aws(**HOME), None) if f.level != "ok"]
    assert [(f.level, f.what.split("'")[1]) for f in found] == [
        ("warning", "All G and VT Spot Instance Requests"), ("warning", "All P4, P3 and P2 Spot Instance Requests"),
        ("warning", "All P5 Spot Instance Requests")]


def test_a_quota_of_which_only_the_default_is_listed_counts(cloud, aws):
    cloud.market.unapplied = {("G", "spot")}
    found = one(ask(aws(**HOME), G5), "blocker")
    assert "'All G and VT Spot Instance Requests' allows 0 vCPUs" in found.what


@pytest.mark.parametrize("kind, market, name", [
    ("gr6.4xlarge", Market.SPOT, "All G and VT Spot Instance Requests"),
    ("gr6f.4xlarge", Market.ON_DEMAND, "Running On-Demand G and VT instances"),
    ("p6-b200.48xlarge", Market.ON_DEMAND, "Running On-Demand P instances"),
    ("p5en.48xlarge", Market.SPOT, "All P5 Spot Instance Requests"),
    ("r6i.large", Market.SPOT, "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests")])
def test_every_type_is_counted_by_the_quota_of_its_family(aws, kind, market, name):
    found = quotas.of_type(quotas.quotas(aws().account, "us-east-1"), kind, market)
    assert found is not None and found.name == name


def test_a_family_whose_quota_has_an_unknown_name_is_said_to_be_unknown(aws):
    assert quotas.of_type(quotas.quotas(aws().account, "us-east-1"), "p6-b200.48xlarge", Market.SPOT) is None
    listed = (quotas.Quota("All P6 Spot Instance Requests", "L-0", 192, Market.SPOT),)
    assert quotas.of_type(listed, "p6-b200.48xlarge", Market.SPOT) is listed[0]


def test_another_region_that_is_free_is_enough(cloud, aws):
    cloud.set_quota("us-east-1", "G", "spot", 0)
    found = one(ask(aws(regions=("us-east-1", "us-west-2"), **HOME), G5), "warning")
    assert found.about == "vCPU quota" and found.what.endswith("(us-west-2 is free)")
    cloud.set_quota("us-west-2", "G", "spot", 0)
    both = ask(aws(regions=("us-east-1", "us-west-2"), **HOME), G5)
    assert bad(both) == [("blocker", "vCPU quota")] * 2


# ---- roles, networks, images, buckets


def test_without_the_spot_role_a_person_makes_it_once(cloud, aws):
    cloud.spot_role = False
    found = one(ask(aws(**HOME), G5), "blocker")
    assert (found.about, found.fix) == (
        "spot role", "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com")


def subnets(cloud: Any) -> list[dict[str, Any]]:
    return cloud.client("ec2", "us-east-1").describe_subnets()["Subnets"]


def test_a_named_subnet_without_the_way_out_that_its_machines_need_is_warned_of(cloud, aws):
    ec2 = cloud.client("ec2", "us-east-1")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.1.0/24",
                               AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
    networks = (AwsNetwork("us-east-1", subnets=(subnet,)),)
    found = [f for f in ask(aws(networks=networks, **HOME), G5, "network") if f.what.startswith(subnet)]
    assert [f.level for f in found] == ["warning"] and "no route to an internet gateway" in found[0].what
    found = [f for f in ask(aws(networks=networks, public_addresses=False, **HOME), G5, "network")
             if f.what.startswith(subnet)]
    assert [f.level for f in found] == ["warning"] and "no default route" in found[0].what
    (there,) = [s for s in subnets(cloud) if s["DefaultForAz"] and s["AvailabilityZone"] == "us-east-1b"]
    networks = (AwsNetwork("us-east-1", subnets=(there["SubnetId"],)),)
    found = [f for f in ask(aws(networks=networks, public_addresses=False, **HOME), G5, "network")
             if f.what.startswith(there["SubnetId"])]
    assert [f.level for f in found] == ["warning"] and "leads to an internet gateway" in found[0].what


def test_a_zone_that_sells_the_type_and_has_no_subnet_is_named(cloud, aws):
    (lost,) = [s for s in subnets(cloud) if s["AvailabilityZone"] == "us-east-1a"]
    cloud.client("ec2", "us-east-1").delete_subnet(SubnetId=lost["SubnetId"])
    found = one(ask(aws(**HOME), G5, "network"), "warning")
    assert found.what.startswith("us-east-1a sells g5.xlarge, but vpc-")
    assert "create-default-subnet --region us-east-1 --availability-zone us-east-1a" in found.fix


def test_without_a_default_vpc_nothing_can_be_launched(cloud, aws):
    ec2 = cloud.client("ec2", "us-east-1")
    vpc = subnets(cloud)[0]["VpcId"]
    for subnet in subnets(cloud):
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    for gateway in ec2.describe_internet_gateways()["InternetGateways"]:
        ec2.detach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc)
    with contextlib.suppress(Exception):
        ec2.delete_vpc(VpcId=vpc)
    found = [f for f in ask(aws(**HOME), G5, "network") if f.level == "blocker"]
    assert len(found) == 1 and "us-east-1" in found[0].what and "aws ec2 create-default-" in found[0].fix


def test_a_name_that_nothing_sells_is_told_with_the_nearest(cloud, aws):
    spec = FleetSpec("f", provider="aws", any_of=(Need(instance_type="g5.xlargee"),))
    found = [f for f in ask(aws(**HOME), spec) if f.level == "blocker"]
    assert [f.about for f in found] == ["pools"] and "did you mean 'g5.xlarge'" in found[0].what


def test_an_image_that_is_not_there_is_named(cloud, aws):
    found = [f for f in ask(aws(image="ami-0123456789abcdef0", **HOME), G5) if f.level == "blocker"]
    assert [f.about for f in found] == ["image"]
    assert "ami-0123456789abcdef0" in found[0].what and "aws.image" in found[0].fix


def test_named_things_must_be_there(cloud, aws):
    cloud.client("ec2", "us-east-1").create_key_pair(KeyName="mine")
    found = ask(aws(key_pair="mine", dispatcher_profile="nobody", **HOME), G5, "named things")
    assert [(f.level, f.what) for f in found] == [
        ("blocker", "aws.dispatcher_profile names nobody, which is not there"),
        ("ok", "aws.key_pair: mine in us-east-1 is there")]


@pytest.mark.parametrize("region, level, word", [
    ("us-east-1", "ok", "answers"), ("eu-west-1", "warning", "traffic between regions"), ("", "blocker", "no bucket")])
def test_the_checkpoints_bucket_is_looked_at(cloud, region: str, level: str, word: str):
    if region:
        cloud.client("s3", region).create_bucket(
            Bucket="runs", **({} if region == "us-east-1" else {
                "CreateBucketConfiguration": {"LocationConstraint": region}}))
    account = account_of({"endpoint_url": cloud.url, "target": "s3://runs/g5", "secret": region,
                          "aws": '{"regions": ["us-east-1"], "ssh_from": ["198.51.100.0/24"]}'})
    spec = FleetSpec("g5", provider="aws", any_of=G5.any_of, checkpoint=CheckpointSpec(target="s3://runs/g5"))
    found = next(f for f in check.findings(account, spec) if f.about == "checkpoints")
    assert (found.level, word in found.what) == (level, True), found


def lifecycle_rule(**rule: Any) -> dict[str, Any]:
    return {"ID": "one", "Status": "Enabled", "Filter": {"Prefix": ""}, **rule}


ABORTS = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}}
FORGETS = {"NoncurrentVersionExpiration": {"NoncurrentDays": 3}}


@pytest.mark.parametrize("versioned, rules, words", [
    (False, [], ["ends incomplete uploads"]),
    (True, [], ["keeps each version", "ends incomplete uploads"]),
    (False, [lifecycle_rule(**ABORTS)], []),
    (True, [lifecycle_rule(**ABORTS)], ["keeps each version"]),
    (True, [lifecycle_rule(**ABORTS, **FORGETS, Filter={"Prefix": "g5/"})], []),
    (True, [lifecycle_rule(**ABORTS, **FORGETS, Filter={"Prefix": "logs/"})],
     ["keeps each version", "ends incomplete uploads"]),
    (True, [lifecycle_rule(**ABORTS, **FORGETS, Status="Disabled")], ["keeps each version", "ends incomplete uploads"]),
    (True, [lifecycle_rule(**FORGETS, Filter={"And": {"Prefix": "", "Tags": [{"Key": "a", "Value": "b"}]}}),
            lifecycle_rule(**ABORTS, ID="two")], ["keeps each version"]),
])
def test_a_bucket_that_keeps_what_the_fleet_removes_is_named(cloud, versioned: bool, rules: list[Any],
                                                             words: list[str]):
    """Checkpoints of a large model in a versioned bucket cost more within a day than its machines."""
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="runs")
    if versioned:
        s3.put_bucket_versioning(Bucket="runs", VersioningConfiguration={"Status": "Enabled"})
    if rules:
        s3.put_bucket_lifecycle_configuration(Bucket="runs", LifecycleConfiguration={"Rules": rules})
    account = account_of({"endpoint_url": cloud.url, "target": "s3://runs/g5"})
    found = [f for f in bucket.findings(account) if f.level == "warning"]
    assert [word in f.what for f, word in zip(found, words, strict=True)] == [True] * len(words), found


def test_rules_of_a_bucket_that_may_not_be_read_are_no_obstacle(cloud):
    cloud.client("s3").create_bucket(Bucket="runs")
    cloud.deny(cloud.owner, {"s3:GetLifecycleConfiguration"})
    (found,) = [f for f in bucket.findings(account_of({"endpoint_url": cloud.url, "target": "s3://runs/g5"}))
                if f.level == "warning"]
    assert "cannot be read" in found.what and "allow s3:GetBucketVersioning" in found.fix


def test_a_buckets_own_key_is_named_and_who_gets_the_right_to_use_it(cloud):
    s3, key = cloud.client("s3"), cloud.client("kms").create_key()["KeyMetadata"]["Arn"]
    s3.create_bucket(Bucket="runs")
    s3.put_bucket_encryption(Bucket="runs", ServerSideEncryptionConfiguration={"Rules": [
        {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}}]})
    for named, level, words in (("", "ok", "`up` gives hosts"), ("mine", "warning", "must allow kms:GenerateDataKey")):
        settings = {"regions": ["us-east-1"], **{k: list(v) for k, v in HOME.items()}, "host_profile": named}
        account = account_of({"endpoint_url": cloud.url, "target": "s3://runs/g5", "secret": f"sse {named}",
                              "aws": json.dumps(settings)})
        spec = FleetSpec("g5", provider="aws", any_of=G5.any_of, checkpoint=CheckpointSpec(target="s3://runs/g5"))
        (found,) = [f for f in check.findings(account, spec) if f.about == "checkpoints" and key in f.what]
        assert (found.level, words in found.what + found.fix) == (level, True), found


def test_a_cluster_without_efa_is_warned(cloud, aws):
    found = ask(aws(placement="cluster", **HOME), G5, "EFA")
    assert [(f.level, "g5.xlarge has no EFA" in f.what) for f in found] == [("warning", True)]


# ---- SSH


def test_an_unknown_address_of_ones_own_is_in_the_way(cloud, aws, monkeypatch):
    monkeypatch.setattr(laptop, "CHECKIP_URL", "http://127.0.0.1:9")
    found = one(ask(aws(), G5, "SSH"), "blocker")
    assert "does not return your address" in found.what and "aws.ssh_from" in found.fix
    assert "does not return your address" in one(ask(aws(), None, "SSH"), "warning").what  # no fleet asked for


def test_what_aws_does_not_answer_is_a_warning_and_the_rest_goes_on(cloud, aws, hurried):
    cloud.fault("servicequotas:ListServiceQuotas", code="ServiceUnavailable", times=20)
    found = ask(aws(**HOME), G5)
    assert bad(found) == [("warning", "vCPU quota")] and "cannot be looked at" in one(found, "warning").what
