"""What AWS's codes mean for a fleet, and how they are told."""

from __future__ import annotations

import json
from pathlib import Path

import botocore
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.providers.aws.mapping import errors
from spotfleet.providers.aws.mapping.errors import (
    TABLE,
    Reach,
    RequestOrigin,
    connection_error,
    denied,
    quota,
    reaction,
    refusal,
    worst,
)

POOL = "aws us-east-1 us-east-1a g5.xlarge spot"
SCOPES = {
    "pool": ("InsufficientInstanceCapacity", "UnfulfillableCapacity", "InsufficientCapacity", "SpotMaxPriceTooLow",
             "ReservationCapacityExceeded", "Unsupported", "InsufficientFreeAddressesInSubnet", "NeverHeardOfThis"),
    "type": ("UnsupportedOperation", "InvalidInstanceType"),
    "quota": ("MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded"),
    "region": ("MaxFleetCountExceeded", "OptInRequired"),
}
A_PERSON = (
    "UnauthorizedOperation", "AccessDenied", "AuthFailure", "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    "ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidClientTokenId", "SignatureDoesNotMatch",
    "PendingVerification", "Blocked", "InvalidParameterValue", "InvalidAMIID.NotFound", "InvalidKeyPair.NotFound",
    "InvalidSubnetID.NotFound", "IdempotentParameterMismatch", "MarketplaceSubscriptionRequired",
)  # fmt: skip
AGAIN = ("RequestLimitExceeded", "Throttling", "ServiceUnavailable", "InternalError", "Unavailable",
         "IncorrectSpotRequestState", "DependencyViolation", "PriorRequestNotComplete")


@pytest.mark.parametrize(("code", "scope"), [(c, s) for s, codes in SCOPES.items() for c in codes])
def test_a_refusal_for_want_of_room_reaches_as_far_as_the_lack(code, scope):
    error = refusal(POOL, code, "No.")
    assert isinstance(error, NoCapacity)
    assert (error.scope, errors.code(error)) == (scope, code)


@pytest.mark.parametrize("code", A_PERSON)
def test_what_no_retry_can_mend_needs_a_person_and_says_what_to_do(code):
    error = refusal(POOL, code, "No.")
    assert isinstance(error, NeedsPerson)
    assert error.hint


@pytest.mark.parametrize("code", AGAIN)
def test_a_passing_trouble_is_neither_a_lack_of_room_nor_a_persons_matter(code):
    assert type(refusal(POOL, code, "No.")) is SpotfleetError


@pytest.mark.parametrize("code", ["InvalidInstanceID.NotFound", "NoSuchEntity", "InvalidGroup.NotFound",
                                  "AWS.SimpleQueueService.NonExistentQueue", "InvalidPlacementGroup.Unknown"])
def test_a_thing_that_is_not_there_burns_no_pool(code):
    error = refusal(POOL, code, "It does not exist")
    assert type(error) is SpotfleetError
    assert errors.code(error) == code


@pytest.mark.parametrize(("code", "message", "means"), [
    ("InvalidParameterValue", "Value (f) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance "
                              "Profile name", Reach.AGAIN),
    ("InvalidParameterValue", "Invalid value 'g99.xlarge' for InstanceType.", Reach.TYPE),
    ("OptInRequired", "In order to use this AWS Marketplace product you need to accept terms", Reach.PERSON),
    ("AuthFailure", "Not authorized for images: [ami-1]", Reach.PERSON),
    ("InvalidParameterCombination", "Your requested instance type (p4d.24xlarge) is not supported in your requested "
                                    "Availability Zone (us-east-1f).", Reach.POOL),
])
def test_a_code_with_two_meanings_is_told_by_its_message(code, message, means):
    assert reaction(code, message).reach is means


@pytest.mark.parametrize("code", ["InvalidGroup.Duplicate", "EntityAlreadyExists",
                                  "InvalidLaunchTemplateName.AlreadyExistsException"])
def test_a_thing_that_another_has_made_meanwhile_burns_no_pool(code):
    assert type(refusal(POOL, code, "It exists")) is SpotfleetError


@pytest.mark.parametrize(("operation", "kind"), [
    ("ec2:CreateFleet", NoCapacity), ("ec2:RunInstances", NoCapacity), ("", NoCapacity),
    ("ec2:CreateSecurityGroup", SpotfleetError), ("iam:CreateRole", SpotfleetError),
])
def test_an_unknown_code_sends_launches_elsewhere_and_means_nothing_for_other_calls(operation, kind):
    assert type(refusal(POOL, "NeverHeardOfThis", "No.", operation)) is kind


def test_every_reaction_has_words_and_a_hint():
    assert [code for code, row in TABLE.items() if not row.what or not row.hint] == []


def test_a_quota_is_called_by_its_name_with_the_place_where_it_is_raised():
    error = refusal(POOL, "MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    assert str(error) == ("aws us-east-1 us-east-1a g5.xlarge spot: the spot quota is used up: Max spot instance count "
                          "exceeded (MaxSpotInstanceCountExceeded)")
    assert error.hint.startswith("raise 'All G and VT Spot Instance Requests' in us-east-1: "
                                 "https://us-east-1.console.aws.amazon.com/servicequotas/")


def test_want_of_room_is_told_in_our_words_alone():
    said = "We currently do not have sufficient g5.xlarge capacity in the Availability Zone you requested (us-east-1a)."
    assert str(refusal(POOL, "InsufficientInstanceCapacity", said)) == (
        "aws us-east-1 us-east-1a g5.xlarge spot: no capacity there now (InsufficientInstanceCapacity)")


@pytest.mark.parametrize(("where", "name"), [
    ("aws us-east-1 us-east-1a g5.xlarge spot", "All G and VT Spot Instance Requests"),
    ("aws us-east-1 us-east-1a p4d.24xlarge spot", "All P4, P3 and P2 Spot Instance Requests"),
    ("aws us-east-1 us-east-1a p5en.48xlarge spot", "All P5 Spot Instance Requests"),
    ("aws us-east-1 us-east-1a p5.48xlarge on-demand", "Running On-Demand P instances"),
    ("aws us-east-1 us-east-1a t3.small on-demand",
     "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
    ("aws us-east-1 us-east-1a m6i.large spot",
     "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
])
def test_the_quota_of_a_type_is_known_by_its_family(where, name):
    assert quota(where) == name


def test_hints_name_the_profile_of_the_laptop_and_the_role_of_a_machine():
    asked = {"where": "aws us-east-1", "code": "ExpiredToken", "message": "The security token has expired"}
    assert "`aws sso login --profile work`" in refusal(**asked, origin=RequestOrigin(profile="work")).hint
    assert "instance profile" in refusal(**asked, origin=RequestOrigin(laptop=False)).hint
    assert "check aws --policy dispatcher" in refusal("aws us-east-1", "AccessDenied", "no",
                                                  origin=RequestOrigin(laptop=False)).hint


def test_the_missing_service_linked_role_comes_with_its_command():
    error = refusal(POOL, "AuthFailure.ServiceLinkedRoleCreationNotPermitted", "The provided credentials do not have "
                    "permission to create the service-linked role for EC2 Spot Instances.",
                    origin=RequestOrigin(profile="me"))
    assert "`aws iam create-service-linked-role --aws-service-name spot.amazonaws.com --profile me`" in error.hint


SAYS = ("You are not authorized to perform this operation. User: arn:aws:iam::1:user/me is not authorized to perform: "
        "ec2:RunInstances on resource: arn:aws:ec2:us-east-1:1:instance/* because no identity-based policy allows the "
        "ec2:RunInstances action. Encoded authorization failure message: dGhpcyBpcyBsb25n")


def test_a_denial_says_who_may_not_do_what_and_why_without_its_encoded_part():
    assert denied(SAYS) == ("ec2:RunInstances on arn:aws:ec2:us-east-1:1:instance/* for arn:aws:iam::1:user/me, "
                            "because no identity-based policy allows the ec2:RunInstances action")
    assert errors.encoded(SAYS) == "dGhpcyBpcyBsb25n"


def test_a_denial_that_names_nothing_is_told_with_the_call_that_was_made():
    said = "You are not authorized to perform this operation."
    assert str(refusal("aws us-east-1", "UnauthorizedOperation", said, "ec2:RunInstances")) == (
        "aws us-east-1: denied: ec2:RunInstances: You are not authorized to perform this operation "
        "(UnauthorizedOperation)")


def test_a_denial_of_iam_and_one_by_an_organization_are_understood():
    assert denied("User: arn:aws:sts::1:assumed-role/r/i is not authorized to perform: iam:CreateRole on resource: "
                  "arn:aws:iam::1:role/x with an explicit deny in a service control policy").startswith(
        "iam:CreateRole on arn:aws:iam::1:role/x for arn:aws:sts::1:assumed-role/r/i, with an explicit deny in a ")


def test_of_several_refusals_the_one_that_reaches_furthest_counts():
    pool = refusal(POOL, "InsufficientInstanceCapacity", "")
    region = refusal(POOL, "MaxSpotInstanceCountExceeded", "")
    person = refusal(POOL, "UnauthorizedOperation", "")
    assert worst([pool, region, pool]) is region
    assert worst([region, person, pool]) is person
    assert worst([pool]) is pool


def test_the_code_is_found_behind_errors_of_botocore_and_of_ours():
    raw = ClientError({"Error": {"Code": "DryRunOperation", "Message": ""}}, "RunInstances")
    assert errors.code(raw) == "DryRunOperation"
    try:
        raise NeedsPerson("so") from raw
    except NeedsPerson as error:
        assert errors.code(error) == "DryRunOperation"
    assert errors.code(OSError("no")) == errors.code(None) == ""


@pytest.mark.parametrize(("kind", "reaction"), [
    ("NoCredentialsError", NeedsPerson), ("SSOTokenLoadError", NeedsPerson), ("ProfileNotFound", NeedsPerson),
    ("ParamValidationError", NeedsPerson), ("EndpointConnectionError", SpotfleetError),
    ("ReadTimeoutError", SpotfleetError), ("ConnectTimeoutError", SpotfleetError), ("SSLError", SpotfleetError),
])
def test_missing_credentials_need_a_person_and_a_broken_line_does_not(kind, reaction):
    assert type(connection_error("aws us-east-1", kind, "so")) is reaction


def test_every_error_of_botocore_that_is_about_credentials_is_known():
    from botocore import exceptions

    about = {n for n in dir(exceptions) if any(w in n for w in ("Credential", "SSO", "Token", "Login"))
             and n.endswith("Error")}
    assert about - errors.NO_CREDENTIALS == set()


def test_every_error_of_botocore_about_this_machines_settings_is_a_persons_and_those_of_a_connection_pass():
    """Repeated, a setting stays wrong: `up` would ask in vain, and speak of the network."""
    from botocore import exceptions

    ours = {n for n in dir(exceptions) if n.startswith(("Invalid", "Unknown", "Endpoint", "MissingDep", "Config"))
            and isinstance(kind := getattr(exceptions, n), type) and issubclass(kind, exceptions.BotoCoreError)
            and not issubclass(kind, (exceptions.ConnectionError, exceptions.HTTPClientError))}
    of_its_insides = {"InvalidExpressionError", "UnknownClientMethodError", "UnknownServiceStyle", "UnknownKeyError",
                      "UnknownParameterError", "UnknownEndpointResolutionBuiltInName", "EndpointProviderError"}
    passing = {n for n in ours - of_its_insides
               if not isinstance(connection_error("aws us-east-1", n, "so"), NeedsPerson)}
    assert passing == set()
    for kind in ("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyConnectionError",
                 "SSLError", "IncompleteReadError"):
        assert not isinstance(connection_error("aws us-east-1", kind, "so"), NeedsPerson)


def test_credentials_of_aws_login_name_the_package_that_they_need():
    told = connection_error("aws us-east-1", "MissingDependencyException", "Using the login credential provider")
    assert isinstance(told, NeedsPerson) and told.hint.startswith("pip install 'botocore[crt]'")


def test_codes_that_ec2s_model_calls_retryable_are_asked_again():
    """botocore's list of throttling and transient codes, as its own standard retries have it."""
    folder = Path(botocore.__file__).parent
    known = json.loads((folder / "data" / "_retry.json").read_text())["definitions"]
    codes = {known[name]["applies_when"]["response"].get("service_error_code") for name in known
             if "response" in known[name].get("applies_when", {})} - {None}
    assert codes
    assert {c for c in codes if c in TABLE and TABLE[c].reach is not Reach.AGAIN} == {"RequestTimeTooSkewed"} & codes


@given(st.text(max_size=400), st.text(max_size=2000))
def test_no_code_and_no_message_is_too_odd_to_be_told(code, message):
    error = refusal(POOL, code, message)
    assert len(str(error)) < 1200
    assert "\n" not in str(error).partition(f"({code})")[0]
