"""The printed policies with one right taken away: the first thing that fails names that right and the policy to compare
with, and `check` has named it before. The policies are attached to the user and to the role, and judged by resource.

Some rights are tried in each run, others each time; all of them in the long form.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spotfleet import providers
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import CheckpointSpec, FleetSpec, Need, Nodes, Role
from spotfleet.providers.aws import AwsProvider
from spotfleet.providers.aws.account import identity
from spotfleet.providers.aws.mapping import policies
from spotfleet.providers.aws.mapping.policies import Scope
from tests.providers.aws.account.test_resources import OURS, scatter
from tests.support.aws.aws_hosts import A, B, dispatcher, request

LONG = bool(os.environ.get("SPOTFLEET_LONG"))
RUN = "PYTEST_XDIST_TESTRUNUID"
AT_ONCE = 3  # rights that a run tries, for each policy
HERE, OFFICE, TARGET = "us-east-1", ("198.51.100.0/24",), "s3://bucket/x"
SPEC = FleetSpec("f", "aws", (Need(accelerator="A10G", accelerator_count=1),), Nodes(1, 2, 4), placement="cluster",
                 checkpoint=CheckpointSpec(target=TARGET))
LAPTOPS = policies.laptop(Scope(queue=True, target=TARGET))
DISPATCHERS = policies.dispatcher(Scope("f", queue=True, host_role="x"))
DOES_WITHOUT = {  # rights of the dispatcher -> what it does without them
    "pricing:GetProducts": "compares spot prices alone",
    "ec2:DeleteFleets": "leaves fleets without a machine to `down`",
    "ec2:DeleteLaunchTemplate": "leaves templates to `down`",
    "sqs:DeleteMessage": "reads a warning twice",
    "sqs:GetQueueUrl": "learns of notices from the hosts alone",
    "sqs:ReceiveMessage": "learns of notices from the hosts alone",
}
Step = Callable[[], object]


def some(document: dict[str, Any]) -> list[str]:
    """Return all rights in the long form, else a few; every process of a run collects the same."""
    every = sorted(policies.actions(document))
    return every if LONG else sorted(random.Random(os.environ.get(RUN, "")).sample(every, AT_ONCE))


def without(document: dict[str, Any], right: str) -> dict[str, Any]:
    kept = [{**s, "Action": [a for a in s["Action"] if a != right]} for s in document["Statement"]]
    return {**document, "Statement": [s for s in kept if s["Action"]]}


def failures(steps: list[Step]) -> list[SpotfleetError]:
    """Each command is tried, whatever became of those before; what is no error of ours is a bug."""
    found = []
    for step in steps:
        try:
            step()
        except SpotfleetError as error:
            found.append(error)
    return found


@contextmanager
def credentials(key: str, secret: str, token: str = "") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        if token:
            patch.setenv("AWS_SESSION_TOKEN", token)
        yield


@pytest.fixture
def fleet(aws, cloud) -> Callable[..., AwsProvider]:
    cloud.client("s3").create_bucket(Bucket="bucket")

    def make(side: str = "laptop", placement: str = "cluster") -> AwsProvider:
        plain = aws(side, placement, ssh_from=OFFICE, event_queue=True)
        return AwsProvider({**plain._config, "target": TARGET})

    return make


def of_laptop(provider: AwsProvider, cloud: Any) -> list[Step]:
    """`up`, `status` from another place, `down` and `leaks`."""
    def remove() -> None:
        scatter(cloud, "spotfleet-f-x", OURS)
        for resource in provider.list_resources("f"):
            provider.delete_resource(resource)

    def end() -> None:
        for host in provider.hosts("f"):
            provider.terminate(host.request_id)
        cloud.settle()

    def choose() -> None:
        provider.in_regions([HERE, "us-west-2"]).cheapest_region((Need(), *SPEC.any_of), SPEC.dispatcher, 2)

    return [provider.check, choose,
            lambda: provider.prices([A.pool, "aws/us-east-1a/t3.small/on-demand"], cloud.now() - 3600),
            lambda: provider.prepare("f", {"team": "blue"}, lambda _line: None),
            lambda: provider.allow_ssh_from_here("f", lambda _line: None),
            lambda: provider.launch(dispatcher()), cloud.settle, lambda: provider.boot_files("f-d-0"), end, remove]


def of_dispatcher(boss: AwsProvider, stopping: AwsProvider, cloud: Any) -> list[Step]:
    return [lambda: boss.offers(SPEC.any_of[0]), lambda: boss.prices([A.pool], cloud.now() - 3600),
            lambda: boss.launch(request(A, "f-1", alternatives=(B,))),
            lambda: boss.launch_together([request(B, "f-3"), request(B, "f-4")]), cloud.settle,
            lambda: boss.hosts("f"),
            lambda: boss.tag("f-1", {providers.DISPATCHER_TAG: "https://10.0.0.9:7443"}),
            lambda: boss.poll_events("f", 0.1),
            lambda: stopping.launch(request(B, "f-7", interruption_behavior="stop")), cloud.settle,
            lambda: stopping.interrupt("f-7", None), lambda: stopping.terminate("f-7"),
            lambda: boss.terminate("f-1")]


@pytest.mark.parametrize("right", some(LAPTOPS))
def test_a_right_that_the_laptops_policy_lacks_is_named_by_check_and_by_what_needs_it(cloud, fleet, right):
    provider = fleet()
    key, secret = cloud.user("ci")
    cloud.attach("ci", without(LAPTOPS, right))
    with credentials(key, secret):
        told = [f for f in provider.findings(SPEC) if f.level != "ok"]
        failed = failures(of_laptop(provider, cloud))
    assert any(right in f.what for f in told), (right, told)
    assert all(f.fix for f in told)
    for error in failed[:1]:
        assert isinstance(error, NeedsPerson) and right in str(error), (right, error)
        assert "check aws --policy" in error.hint, (right, error.hint)


@pytest.mark.parametrize("right", some(DISPATCHERS))
def test_a_right_that_the_dispatchers_policy_lacks_is_named_by_what_needs_it(cloud, fleet, right):
    provider = fleet()
    provider.prepare("f", {}, lambda _line: None)
    name = identity.profile(provider.account, "f", Role.DISPATCHER)
    iam = cloud.client("iam")
    document = iam.get_role_policy(RoleName=name, PolicyName=name)["PolicyDocument"]
    iam.put_role_policy(RoleName=name, PolicyName=name, PolicyDocument=json.dumps(without(document, right)))
    key, made = cloud.rights.session(name, "test", cloud.now() + 3600)
    with credentials(key, made.secret, made.token):
        failed = failures(of_dispatcher(fleet("dispatcher"), fleet("dispatcher", "spread"), cloud))
    if not failed:
        assert right in DOES_WITHOUT
    for error in failed[:1]:
        assert isinstance(error, NeedsPerson) and right in str(error), (right, error)
        assert "check aws --policy dispatcher" in error.hint, (right, error.hint)


def test_with_every_right_of_the_printed_policies_nothing_fails(cloud, fleet):
    provider = fleet()
    key, secret = cloud.user("ci")
    cloud.attach("ci", LAPTOPS)
    with credentials(key, secret):
        assert [f for f in provider.findings(SPEC) if f.level == "blocker"] == []
        steps = of_laptop(provider, cloud)
        assert failures(steps[:-2]) == []
    name = identity.profile(provider.account, "f", Role.DISPATCHER)
    session, made = cloud.rights.session(name, "test", cloud.now() + 3600)
    with credentials(session, made.secret, made.token):
        assert failures(of_dispatcher(fleet("dispatcher"), fleet("dispatcher", "spread"), cloud)) == []
    with credentials(key, secret):
        assert failures(steps[-2:]) == []
    assert [t for t in cloud.everything() if t.tags.get("spotfleet") == "f"] == []
