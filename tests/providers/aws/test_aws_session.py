"""How AWS is asked: credentials, retries, regions; and what a user reads when that fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import Need
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.mapping import errors
from spotfleet.providers.aws.section.spec import AwsSpec
from spotfleet.providers.aws.session import Account, Settings, settings_of
from spotfleet.version import install

ANY = Need(instance_type="g5.xlarge")


def test_a_provider_without_a_configuration_is_one_of_defaults():
    assert settings_of({}) == Settings(AwsSpec())


def test_a_configuration_that_cannot_be_read_is_told():
    with pytest.raises(UsageError, match="cannot be read"):
        settings_of({"aws": "{"})


def test_a_secret_does_not_show():
    assert "hush" not in repr(settings_of({"secret": "hush"}))


@pytest.mark.parametrize("code", [
    "import spotfleet.providers.aws",
    "from spotfleet.providers import load; load('aws', {})",
    "import spotfleet.providers.aws.offers, spotfleet.providers.aws.launch, spotfleet.providers.aws.account.resources",
])
def test_the_sdk_is_not_imported_before_aws_is_asked(code):
    said = subprocess.run([sys.executable, "-c", f"import sys; {code}; print(sorted({{'boto3', 'botocore'}} & "
                           "sys.modules.keys()))"], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_without_the_sdk_the_extra_to_install_is_named(monkeypatch):
    for name in ("boto3", "botocore", "botocore.config", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NeedsPerson, match="needs boto3") as told:
        Account(Settings(AwsSpec(regions=("us-east-1",)))).client("ec2")
    assert told.value.hint == install("aws")


def test_without_credentials_a_person_hears_how_to_get_some(cloud, aws, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(NeedsPerson, match="no valid credentials") as told:
        aws().check()
    assert "aws sso login" in told.value.hint
    assert "aws configure" in told.value.hint


def test_on_a_machine_the_hint_is_about_its_instance_profile(cloud, aws, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(NeedsPerson) as told:
        aws(side="dispatcher").check()
    assert "instance profile" in told.value.hint


def test_a_profile_that_is_not_there_is_named(aws):
    with pytest.raises(NeedsPerson, match="nobody") as told:
        aws(profile="nobody").check()
    assert "--profile nobody" in told.value.hint


def test_a_machine_of_the_fleet_is_told_nothing_of_the_laptops_profile(aws):
    aws(profile="nobody", side="dispatcher").check()


def test_expired_credentials_need_a_person_and_new_ones_are_taken_without_a_new_process(cloud, aws):
    provider = aws()
    provider.check()
    cloud.expire("owner")
    with pytest.raises(NeedsPerson, match="the credentials have expired") as told:
        provider.account.client("ec2").describe_regions()
    assert "aws sso login" in told.value.hint
    cloud.expire("owner", False)
    provider.account.client("ec2").describe_regions()


def test_new_credentials_are_taken_from_where_they_were_put(cloud, aws, monkeypatch):
    provider = aws()
    provider.account.client("ec2").describe_regions()
    cloud.expire("owner")
    with pytest.raises(NeedsPerson):
        provider.account.client("ec2").describe_regions()
    key, secret = cloud.user("renewed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    provider.account.client("ec2").describe_regions()
    assert cloud.calls[-1].principal == "renewed"


def test_a_clock_that_is_off_is_told_by_how_much(cloud, aws):
    cloud.skew_s = 3600.0
    with pytest.raises(NeedsPerson, match=r"this machine's clock is 3[56]\d\d s behind AWS's") as told:
        aws().account.client("ec2").describe_regions()
    assert "timedatectl" in told.value.hint


@pytest.mark.parametrize("skew_s", [0.0, 86_400.0, -86_400.0])
def test_the_time_of_aws_comes_with_every_answer_and_every_refusal(cloud, aws, skew_s):
    cloud.skew_s = skew_s
    assert abs(aws().cloud_time() - (time.time() + skew_s)) < 60.0
    cloud.skew_s = 0.0
    cloud.deny("owner", {"ec2:DescribeVpcs"})
    assert abs(aws().cloud_time() - time.time()) < 60.0


def test_a_denied_action_is_named_with_who_may_not_and_where_permissions_are_listed(cloud, aws):
    cloud.deny("owner", {"ec2:DescribeSpotPriceHistory"})
    with pytest.raises(NeedsPerson, match="aws us-east-1: denied: ec2:DescribeSpotPriceHistory") as told:
        aws().offers(ANY)
    assert told.value.hint == "`spotfleet check aws --policy` prints the permissions that are needed"


def test_questions_are_asked_again_when_aws_slows_us_down(cloud, aws, hurried):
    cloud.fault("ec2:DescribeRegions", code="RequestLimitExceeded", times=2)
    aws().account.client("ec2").describe_regions()
    assert [c.code for c in cloud.calls if c.action == "ec2:DescribeRegions"] == ["RequestLimitExceeded"] * 2 + [""]


def test_an_aws_that_goes_on_slowing_us_down_is_a_passing_trouble(cloud, aws, hurried):
    cloud.fault("ec2:DescribeRegions", code="RequestLimitExceeded", times=100)
    with pytest.raises(SpotfleetError, match="AWS slows us down") as told:
        aws().account.client("ec2").describe_regions()
    assert type(told.value) is SpotfleetError
    assert told.value.hint == "it is asked again"


@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "RequestLimitExceeded", "InternalError"])
def test_a_launch_is_asked_once_whatever_the_answer(cloud, aws, code):
    """botocore would repeat what comes as HTTP 500 or 503: three calls into a pool that has no room."""
    cloud.fault("ec2:RunInstances", code=code, times=10)
    with pytest.raises(SpotfleetError) as told:
        aws().account.launching("us-east-1").run_instances(ImageId=cloud.UBUNTU, MinCount=1, MaxCount=1)
    assert errors.code(told.value) == code
    assert [c.code for c in cloud.calls if c.action == "ec2:RunInstances"] == [code]


def test_an_error_begins_with_the_pool_that_was_asked(cloud, aws):
    cloud.fault("ec2:RunInstances", code="InsufficientInstanceCapacity")
    launching = aws().account.launching("us-east-1", "us-east-1 us-east-1a g5.xlarge spot")
    with pytest.raises(SpotfleetError) as told:
        launching.run_instances(ImageId=cloud.UBUNTU, MinCount=1, MaxCount=1)
    assert str(told.value).startswith("aws us-east-1 us-east-1a g5.xlarge spot: no capacity there now")


def test_a_lost_answer_of_a_question_is_asked_again(cloud, aws, hurried):
    cloud.fault("ec2:DescribeRegions", lost="after")
    assert aws().all_regions()


def test_an_endpoint_that_nobody_listens_at_is_a_passing_trouble(cloud, monkeypatch):
    from spotfleet.providers.aws import session

    monkeypatch.setattr(session, "ATTEMPTS", 1)
    provider = AwsProvider({"endpoint_url": "http://127.0.0.1:9", "aws": json.dumps({"regions": ["us-east-1"]})})
    with pytest.raises(SpotfleetError, match="aws us-east-1: AWS does not answer") as told:
        provider.check()
    assert type(told.value) is SpotfleetError


def test_a_region_that_is_not_there_is_answered_with_the_nearest():
    from botocore.exceptions import EndpointConnectionError

    def said(region: str) -> str:
        error = EndpointConnectionError(endpoint_url=f"https://sts.{region}.amazonaws.com/")
        return str(Account(Settings()).connection_error(error, f"aws {region}"))

    assert said("eu-centrl-1") == ("aws eu-centrl-1: AWS does not answer, and no region of that name is known; "
                                 "did you mean 'eu-central-1'?")
    assert "is known: af-south-1, " in said("mars")
    assert said("us-east-1").startswith("aws us-east-1: AWS does not answer: Could not connect")


def test_we_say_who_we_are(cloud, aws):
    assert "spotfleet/" in aws().account.client("ec2").raw.meta.config.user_agent


def test_without_regions_the_one_of_the_surroundings_is_meant(monkeypatch):
    account = Account(Settings())
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.delenv("AWS_REGION", raising=False)
    assert account.regions == ("us-east-1",)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert account.regions == ("eu-west-1",)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert account.regions == ("us-west-2",)


# ---- what is remembered


def account() -> Account:
    return Account(Settings(AwsSpec(regions=("us-east-1",))))


def test_an_answer_is_remembered_as_long_as_was_said():
    mine, made = account(), iter(range(9))
    assert [mine.cached("a", 60.0, lambda: next(made)) for _ in range(3)] == [0, 0, 0]
    mine.forget("a")
    assert mine.cached("a", 0.0, lambda: next(made)) == 1
    assert mine.cached("a", 0.0, lambda: next(made)) == 2


def test_a_failure_is_remembered_where_that_was_asked_for_but_never_a_persons_matter():
    mine, tries = account(), []

    def fail(error: type[SpotfleetError]):
        tries.append(error)
        raise error("no")

    for _ in range(3):
        with pytest.raises(SpotfleetError):
            mine.cached("a", 60.0, lambda: fail(SpotfleetError), failed_s=60.0)
        with pytest.raises(NeedsPerson):
            mine.cached("b", 60.0, lambda: fail(NeedsPerson), failed_s=60.0)
    assert [tries.count(SpotfleetError), tries.count(NeedsPerson)] == [1, 3]


def test_an_old_answer_serves_while_there_is_no_new_one():
    mine = account()
    assert mine.cached("a", 0.0, lambda: 1, stale_s=60.0) == 1

    def fail() -> int:
        raise SpotfleetError("slow")

    assert mine.cached("a", 0.0, fail, stale_s=60.0) == 1
    with pytest.raises(SpotfleetError):
        mine.cached("b", 0.0, fail, stale_s=60.0)


def test_what_nobody_asks_for_any_more_is_forgotten(monkeypatch):
    from spotfleet.providers.kit import cache

    monkeypatch.setattr(cache, "KEPT", 10)
    monkeypatch.setattr(cache, "FORGOTTEN_S", 0.0)
    mine = account()
    for n in range(100):
        mine.cached(n, 0.0, lambda: "")
    assert len(mine._remembered) <= 12


def test_several_questions_at_once_keep_their_order():
    def slow(n: int) -> int:
        time.sleep(0.01 * (4 - n))
        return n

    assert account().each(slow, range(4)) == [0, 1, 2, 3]
