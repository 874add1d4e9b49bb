"""What EC2 launches anew for a persistent request, without tags: it is seen, and ended or named, until it is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import CloudState
from spotfleet.providers.aws import session
from spotfleet.providers.aws.mapping import listing, policies
from spotfleet.providers.aws.mapping.policies import Scope
from tests.support.aws.aws_hosts import A, B, hosts_things, line, prepared, raw, request, requests

CANCEL = "cancel_spot_instance_requests"
HERE = "us-east-1"


@pytest.fixture
def provider(aws, cloud):
    return prepared(aws)


@pytest.fixture
def lasting(provider, cloud):
    """A host whose machine EC2 launches again, without tags, when somebody ends it."""
    cloud.relaunched_tagged = False
    provider.launch(request(A, interruption_behavior="stop"))
    (made,) = cloud.instances()
    return made


@pytest.fixture
def calls(monkeypatch) -> Callable[[str, Callable[..., Any]], None]:
    """calls("operation", instead): what is asked goes to `instead(ask, parameters)`."""
    plain = session.AwsClient.__getattr__

    def replaced(operation: str, instead: Callable[..., Any]) -> None:
        monkeypatch.setattr(session.AwsClient, "__getattr__", lambda self, name: (
            (lambda **parameters: instead(plain(self, name), parameters)) if name == operation else plain(self, name)))

    return replaced


def end_by_hand(cloud, id: str) -> None:
    """By somebody who does not know of the request."""
    cloud.client("ec2", HERE).terminate_instances(InstanceIds=[id])
    cloud.tick()


def relaunched(cloud, made) -> str:
    """Its machine was ended and launched anew, and then its request was cancelled."""
    end_by_hand(cloud, made.id)
    (new,) = cloud.instances()
    assert "spotfleet" not in new.tags and new.id != made.id
    cloud.client("ec2", HERE).cancel_spot_instance_requests(SpotInstanceRequestIds=[made.request_id])
    return new.id


def test_a_relaunched_machine_whose_request_is_cancelled_is_listed_and_ended(provider, cloud, lasting):
    new = relaunched(cloud, lasting)
    assert requests(cloud) == []
    found = line(provider)
    assert (found.provider_id, found.state) == (new, CloudState.RUNNING)
    assert [b.id for b in provider.list_resources("f") if b.kind == "spot-instances-request"] == [lasting.request_id]
    provider.terminate("f-1")
    assert raw(cloud) == [] and hosts_things(cloud) == []
    assert line(provider).state is CloudState.TERMINATED
    assert [b for b in provider.list_resources("f") if b.kind == "spot-instances-request"] == []


def test_what_is_launched_while_its_request_is_being_cancelled_is_ended(provider, cloud, lasting, calls):
    def cancel(ask, parameters):
        end_by_hand(cloud, lasting.id)
        return ask(**parameters)

    calls(CANCEL, cancel)
    provider.terminate("f-1")
    assert cloud.instances() == [] and requests(cloud) == []


def test_what_a_forgotten_request_launches_while_it_is_being_cancelled_is_ended(provider, cloud, lasting, calls):
    cloud.retry_s = 3600.0
    end_by_hand(cloud, lasting.id)
    assert cloud.instances() == []
    (left,) = (b for b in provider.list_resources("f") if b.kind == "spot-instances-request")

    def cancel(ask, parameters):
        cloud.requests()[0].looks_at = 0.0
        assert cloud.instances()
        return ask(**parameters)

    calls(CANCEL, cancel)
    provider.delete_resource(left)
    assert cloud.instances() == [] and requests(cloud) == []


def test_a_relaunched_machine_that_may_not_be_ended_is_named_and_stays_in_sight(aws, cloud, lasting, monkeypatch):
    """With no more rights than `check --policy` prints."""
    iam = cloud.client("iam")
    iam.create_role(RoleName="user", AssumeRolePolicyDocument=json.dumps(policies.trust()))
    iam.put_role_policy(RoleName="user", PolicyName="user", PolicyDocument=json.dumps(
        policies.laptop(Scope(account=cloud.ACCOUNT))))
    name, key = cloud.rights.session("user", "test", cloud.now() + 3600)
    new = relaunched(cloud, lasting)
    with monkeypatch.context() as patch:
        for variable, value in (("ACCESS_KEY_ID", name), ("SECRET_ACCESS_KEY", key.secret),
                                ("SESSION_TOKEN", key.token)):
            patch.setenv(f"AWS_{variable}", value)
        user = aws(ssh_from=("192.0.2.1/32",))
        (left,) = (b for b in user.list_resources("f") if b.kind == "spot-instances-request")
        for end in (lambda: user.terminate("f-1"), lambda: user.delete_resource(left)):
            with pytest.raises(NeedsPerson, match=f"EC2 has launched {new} anew .* without the tag") as caught:
                end()
            assert caught.value.hint.endswith(f"terminate-instances --region {HERE} --instance-ids {new}`")
        assert line(user).state is CloudState.RUNNING and left in user.list_resources("f")
        end_by_hand(cloud, new)
        cloud.settle()
        user.terminate("f-1")
        assert left not in user.list_resources("f") and line(user).state is CloudState.TERMINATED
    assert hosts_things(cloud) == []


def test_an_instance_that_has_left_the_listing_hides_no_other(provider, cloud, lasting, monkeypatch):
    end_by_hand(cloud, lasting.id)
    (new,) = cloud.instances()
    plain = listing.unseen
    monkeypatch.setattr(listing, "unseen", lambda *told: [*plain(*told), "i-0123456789abcdef0"])
    assert line(provider).provider_id == new.id


# fleets that EC2 does not delete


def not_ended(ask, parameters):
    return ask(**{**parameters, "TerminateInstances": False})  # an instant fleet cannot be deleted so


def test_a_fleet_that_ec2_does_not_delete_is_told_though_the_answer_is_200(provider, cloud, calls):
    provider.launch(request(B))
    cloud.client("ec2", HERE).terminate_instances(InstanceIds=[i.id for i in cloud.instances()])
    cloud.settle()
    (left,) = (b for b in provider.list_resources("f") if b.kind == "fleet")
    calls("delete_fleets", not_ended)
    for end in (lambda: provider.terminate("f-1"), lambda: provider.delete_resource(left)):
        with pytest.raises(SpotfleetError, match=f"does not delete fleet {left.id}: .*unexpectedError"):
            end()
    calls("delete_fleets", lambda ask, parameters: ask(**parameters))
    provider.delete_resource(left)
    assert left not in provider.list_resources("f")


@pytest.mark.parametrize("state", ["failed", "deleted_terminating", "deleted"])
def test_a_fleet_that_is_over_is_not_listed(provider, cloud, state):
    provider.launch(request(B))
    cloud.client("ec2", HERE).terminate_instances(InstanceIds=[i.id for i in cloud.instances()])
    (fleet,) = cloud.regions[HERE].fleets.values()
    fleet.state = state
    assert [b for b in provider.list_resources("f") if b.kind == "fleet"] == []
