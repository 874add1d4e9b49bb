"""Meaning of AWS's error codes for a fleet: one table, code -> scope and reaction. Pure.

`kit/mapping/errors.py` defines scopes and reactions. No code refuses for a whole account. That scope comes from
`offers.cheapest_region`, where no region has offers, and from the reconciler for NeedsPerson.

Sources: EC2 API reference, "Error codes for the Amazon EC2 API"; "Common errors" of IAM, STS, SSM, Pricing and Service
Quotas; botocore's exceptions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.providers.kit.mapping import errors as kit
from spotfleet.providers.kit.mapping.errors import (
    ASKED_AGAIN,
    GONE,
    PRESENT,
    ErrorTable,
    Reach,
    Reaction,
    short,
)
from spotfleet.providers.kit.mapping.errors import rows as _rows
from spotfleet.providers.kit.mapping.errors import worst as worst


@dataclass(frozen=True)
class RequestOrigin:
    """The caller of AWS, to whom hints are addressed."""

    laptop: bool = True
    profile: str = ""  # name in the laptop's AWS configuration

    @property
    def option(self) -> str:
        return f" --profile {self.profile}" if self.profile else ""


ELSEWHERE = "other pools are tried; this one again in some minutes"
RAISE = ("raise '{quota}' in {region}: https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas; "
         "`spotfleet check` shows what is used of it; or name more regions under `aws.regions`")
LOGIN = "`aws sso login{profile}` or `aws configure{profile}`, then `aws sts get-caller-identity{profile}`"
ROLE = "see that the machine's instance profile and its role still exist; `spotfleet up` on the laptop makes ours again"
POLICY = "`spotfleet check aws --policy` prints the permissions that are needed"
ITS_POLICY = "`spotfleet check aws --policy dispatcher` prints what the dispatcher's role needs"
CLOCK = "set the clock: `sudo timedatectl set-ntp true`"
LINKED_ROLE = ("a person who may: `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com{profile}`, "
               "once per account")
OFFLINE = "see that this machine reaches AWS (a proxy is named in HTTPS_PROXY); a fleet asks again by itself"
LIMIT = "remove what is not used (`spotfleet leaks --all-regions` shows ours), or raise the quota in Service Quotas"


TABLE: dict[str, Reaction] = {
    # -- no room
    **_rows(Reach.POOL, "no capacity there now", ELSEWHERE,
            "InsufficientInstanceCapacity", "InsufficientCapacity", "UnfulfillableCapacity", "InsufficientHostCapacity",
            "InsufficientReservedInstanceCapacity", "ReservationCapacityExceeded",
            "Server.InsufficientInstanceCapacity", enough=True),
    **_rows(Reach.POOL, "its subnet has no free address", "name another subnet of the zone under `aws.networks`",
            "InsufficientFreeAddressesInSubnet", "PrivateIpAddressLimitExceeded"),
    **_rows(Reach.POOL, "the price limit is below the spot price", "other pools are tried; or raise `max_price`",
            "SpotMaxPriceTooLow"),
    **_rows(Reach.POOL, "not sold in this zone", "other pools are tried",
            "Unsupported", "InvalidAvailabilityZone", "InvalidFleetConfiguration", "InvalidFleetConfig"),
    **_rows(Reach.POOL, "a limit of volumes is reached", LIMIT,
            "VolumeLimitExceeded", "MaxIOPSLimitExceeded", "Client.VolumeLimitExceeded"),
    **_rows(Reach.TYPE, "this type is not sold in that form", "other types are tried; name some",
            "InvalidInstanceType", "InstanceTypeNotSupported", "UnsupportedOperation"),
    # -- quotas
    **_rows(Reach.QUOTA, "the spot quota is used up", RAISE,
            "MaxSpotInstanceCountExceeded", "SpotInstanceCountLimitExceeded"),
    **_rows(Reach.QUOTA, "the on-demand quota is used up", RAISE, "VcpuLimitExceeded", "InstanceLimitExceeded"),
    **_rows(Reach.REGION, "too many EC2 fleets",
            "old ones go by themselves; or raise 'EC2 Fleets per Region' in {region}",
            "MaxFleetCountExceeded", "MaxSpotFleetRequestCountExceeded"),
    **_rows(Reach.REGION, "the region is not enabled for this account",
            "`aws account enable-region --region-name {region}{profile}`, or take it out of `aws.regions`",
            "OptInRequired"),
    # -- later
    **_rows(Reach.AGAIN, "AWS slows us down", ASKED_AGAIN,
            "RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
            "TooManyRequestsException", "RequestThrottledException", "SlowDown", "EC2ThrottledException",
            "PriorRequestNotComplete", "BandwidthLimitExceeded", "ProvisionedThroughputExceededException"),
    **_rows(Reach.AGAIN, "AWS has trouble now", ASKED_AGAIN,
            "ServiceUnavailable", "ServiceUnavailableException", "InternalError", "InternalFailure", "Unavailable",
            "RequestTimeout", "RequestTimeoutException", "InternalServerError", "ServiceFailure",
            "InternalServiceError", "ServerInternal", "InternalErrorException", "500", "502", "503", "504"),
    **_rows(Reach.AGAIN, "it is still changing", ASKED_AGAIN,
            "IncorrectInstanceState", "IncorrectState", "IncorrectSpotRequestState", "ConcurrentModification",
            "ConcurrentModificationException", "FleetNotInModifiableState"),
    **_rows(Reach.AGAIN, "something still uses it", ASKED_AGAIN,
            "DependencyViolation", "DeleteConflict", "VolumeInUse", "InvalidGroup.InUse", "InvalidPlacementGroup.InUse",
            "InvalidNetworkInterface.InUse", "InvalidParameterValue.InUse", "ResourceInUse", "ResourceInUseException"),
    # -- credentials and permissions
    **_rows(Reach.PERSON, "the credentials have expired", LOGIN,
            "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "UnauthorizedException", there=ROLE),
    **_rows(Reach.PERSON, "the credentials have expired, or the clock is wrong", f"{LOGIN}; or {CLOCK}",
            "RequestExpired", there=f"{CLOCK}; or {ROLE}"),
    **_rows(Reach.PERSON, "the credentials are not valid", f"{LOGIN}; or the region is not enabled",
            "AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId",
            "MissingAuthenticationToken", "MissingAuthenticationTokenException", "IncompleteSignature", "InvalidToken",
            there=ROLE),
    **_rows(Reach.PERSON, "the secret key does not fit, or the clock is wrong", f"{LOGIN}; or {CLOCK}",
            "SignatureDoesNotMatch", "InvalidSignatureException", "RequestTimeTooSkewed", there=f"{CLOCK}; or {ROLE}"),
    **_rows(Reach.PERSON, "denied", POLICY,
            "UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "403", there=ITS_POLICY),
    **_rows(Reach.PERSON, "the account has no service-linked role for spot, and we may not make it", LINKED_ROLE,
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted"),
    **_rows(Reach.PERSON, "AWS is still verifying the account",
            "wait for AWS's mail, which takes some hours at most; or ask its support",
            "PendingVerification", "PendingAccountVerification"),
    **_rows(Reach.PERSON, "the account is blocked", "ask AWS's support",
            "Blocked", "AccountDisabled", "AccountProblem", "NotSignedUp", "InvalidPaymentInstrument"),
    # -- invalid requests
    **_rows(Reach.PERSON, "the image is not there", "name another under `aws.image`",
            "InvalidAMIID.NotFound", "InvalidAMIID.Malformed", "InvalidAMIID.Unavailable", "ParameterNotFound"),
    **_rows(Reach.PERSON, "the image asks for a subscription",
            "accept its terms in AWS Marketplace, or name another under `aws.image`",
            "MarketplaceSubscriptionRequired"),
    **_rows(Reach.PERSON, "the key pair is not there", "name another under `aws.key_pair`, or leave it out",
            "InvalidKeyPair.NotFound"),
    **_rows(Reach.PERSON, "the subnet is not there", "name another under `aws.networks`",
            "InvalidSubnetID.NotFound", "InvalidSubnet"),
    **_rows(Reach.PERSON, "the VPC is not there", "name another under `aws.networks`",
            "InvalidVpcID.NotFound", "VPCIdNotSpecified", "DefaultVpcDoesNotExist", "MissingDefaultVpc"),
    **_rows(Reach.PERSON, "the volumes' key cannot be used", "see `aws.kms_key`, and that its policy lets EC2 use it",
            "InvalidKmsKey.InvalidState", "KMSKeyNotAccessibleFault", "Client.InvalidKMSKey.InvalidState",
            "KMS.NotFoundException", "InvalidKmsKeyId"),
    **_rows(Reach.PERSON, "the account has too many of them", LIMIT,
            "SecurityGroupLimitExceeded", "RulesPerSecurityGroupLimitExceeded", "VpcLimitExceeded", "LimitExceeded",
            "LimitExceededException", "SecurityGroupsPerInstanceLimitExceeded", "PlacementGroupLimitExceeded",
            "NetworkInterfaceLimitExceeded", "AddressLimitExceeded", "TagLimitExceeded",
            "LaunchTemplateLimitExceeded", "InstanceProfileLimitExceeded"),
    **_rows(Reach.PERSON, "it is protected", "`aws ec2 modify-instance-attribute --no-disable-api-termination` for it",
            "OperationNotPermitted"),
    **_rows(Reach.PERSON, "EC2 does not take what it was asked",
            "if that names nothing of the fleet file it is our bug: please report it",
            "InvalidParameter", "InvalidParameterValue", "InvalidParameterCombination", "MissingParameter",
            "UnknownParameter", "ValidationError", "ValidationException", "InvalidUserData.Malformed", "InvalidInput",
            "InvalidInputException", "InvalidBlockDeviceMapping", "IdempotentParameterMismatch", "InvalidAction",
            "InvalidRequest", "MalformedPolicyDocument", "InvalidFilter", "UnknownOperationException",
            "ParamValidationError", "InvalidIamInstanceProfileArn.Malformed"),
}  # fmt: skip

# AWS's messages under a code with another meaning: code, a piece of the message, the code that applies.
OTHER_MEANINGS = (
    ("InvalidParameterValue", "IAM Instance Profile", "IncorrectState"),  # a new one becomes known after some seconds
    ("InvalidParameterValue", "for InstanceType", "InvalidInstanceType"),
    ("InvalidParameterValue", "not supported in your requested Availability Zone", "Unsupported"),
    ("InvalidParameterCombination", "not supported in your requested Availability Zone", "Unsupported"),
    ("OptInRequired", "Marketplace", "MarketplaceSubscriptionRequired"),
    ("AuthFailure", "for images", "InvalidAMIID.NotFound"),
    ("UnauthorizedOperation", "service-linked role", "AuthFailure.ServiceLinkedRoleCreationNotPermitted"),
)
DENIED = TABLE["UnauthorizedOperation"]
UNKNOWN = Reaction(Reach.POOL, "", "other pools are tried; the EC2 API reference, \"Error codes\", may say more")
LAUNCHES = ("", "ec2:RunInstances", "ec2:CreateFleet", "ec2:CreateLaunchTemplate")
ENDS_ABSENT = ("NotFound", "NotFoundException", ".Unknown", ".NonExistentQueue", "404")
ENDS_PRESENT = ("Duplicate", "AlreadyExists", "AlreadyExistsException")
CREDENTIALS = frozenset(c for c, row in TABLE.items() if row.there and row is not DENIED)  # fresh credentials may work

# botocore's errors that are no answer from AWS
NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "SSOTokenLoadError",
    "UnauthorizedSSOTokenError", "TokenRetrievalError", "SSOError", "NoAuthTokenError", "MetadataRetrievalError",
    "PendingAuthorizationExpiredError", "RefreshWithMFAUnsupportedError", "InfiniteLoopConfigError",
    "UnknownCredentialError", "UnknownTokenProviderError", "LoginRefreshRequired", "LoginTokenLoadError",
    "LoginInsufficientPermissions", "LoginError", "LoginAuthorizationCodeError",
})  # fmt: skip
OUR_WORDS = frozenset({
    "ParamValidationError", "InvalidRegionError", "NoRegionError", "UnknownServiceError", "InvalidConfigError",
    "ConfigParseError", "ConfigNotFound", "InvalidEndpointConfigurationError", "ValueError", "InvalidDefaultsMode",
    "InvalidRetryModeError", "InvalidMaxRetryAttemptsError", "InvalidRetryConfigurationError",
    "InvalidIMDSEndpointError", "InvalidIMDSEndpointModeError", "InvalidProxiesConfigError",
    "InvalidChecksumConfigError", "InvalidSTSRegionalEndpointsConfigError", "InvalidS3AddressingStyleError",
    "InvalidEndpointDiscoveryConfigurationError", "InvalidS3UsEast1RegionalEndpointConfigError", "UnknownRegionError",
    "UnknownEndpointError", "UnknownFIPSEndpointError", "EndpointVariantError", "EndpointResolutionError",
    "InvalidDNSNameError", "InvalidHostLabelError", "UnsupportedSignatureVersionError", "UnknownSignatureVersionError",
})  # fmt: skip
MISSING = "MissingDependencyException"  # credentials of `aws login` need one


def _by_shape(code: str) -> Reaction | None:
    if code.endswith(ENDS_ABSENT) or code.startswith("NoSuch"):
        return GONE
    if code.endswith(ENDS_PRESENT):
        return PRESENT
    return TABLE["InvalidParameterValue"] if code.endswith("Malformed") else None


CODES = ErrorTable(TABLE, UNKNOWN, LAUNCHES, "AWS's reference of {operation} may say more", OTHER_MEANINGS, _by_shape)
reaction = CODES.reaction


def refusal(where: str, code: str, message: str, operation: str = "",
            origin: RequestOrigin = RequestOrigin()) -> SpotfleetError:
    """Make the exception for AWS's answer; `where`: "aws us-east-1 us-east-1a g5.xlarge spot"."""
    text = denied(message, operation) if reaction(code, message) is DENIED else message
    fill = {"{profile}": origin.option, "{region}": _region(where), "{quota}": quota(where)}
    return CODES.refusal(where, code, text, operation, laptop=origin.laptop, fill=fill)


def connection_error(where: str, kind: str, message: str, origin: RequestOrigin = RequestOrigin()) -> SpotfleetError:
    """Make the exception for botocore's error `kind`, which is no answer: no credentials, no connection."""
    if kind in NO_CREDENTIALS:
        hint = LOGIN.replace("{profile}", origin.option) if origin.laptop else ROLE
        return NeedsPerson(f"{where}: no valid credentials: {short(message)}", hint=hint)
    if kind == MISSING:
        return NeedsPerson(f"{where}: {short(message)}", hint="pip install 'botocore[crt]'; or other credentials, by "
                           f"`aws configure{origin.option}` or `aws sso login{origin.option}`")
    if kind in OUR_WORDS:
        return NeedsPerson(f"{where}: {short(message)}",
                           hint=f"see section `aws` of the fleet file, and `aws configure list{origin.option}`")
    if kind == "ResponseParserError":
        return SpotfleetError(f"{where}: AWS does not answer: what came is no answer of AWS's", hint=OFFLINE)
    return SpotfleetError(f"{where}: AWS does not answer: {short(message)}", hint=OFFLINE)


def skewed(where: str, seconds: float) -> SpotfleetError:
    """Make the exception for a clock that differs from AWS's by `seconds`; positive is ahead."""
    way = "ahead of" if seconds > 0 else "behind"
    return NeedsPerson(f"{where}: this machine's clock is {abs(seconds):.0f} s {way} AWS's, which refuses "
                       "its requests for that", hint=CLOCK)


def code(error: BaseException | None) -> str:
    """Return AWS's code behind `error`, botocore's or one made from it; "" if there is none."""
    return kit.code(error, _of_botocore)


def _of_botocore(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def denied(message: str, operation: str = "") -> str:
    """Return action, user and reason of a "not authorized" message, without AWS's encoded part."""
    plain = message.partition("Encoded authorization failure message")[0]
    denial = re.search(r"(?:User: (\S+) is )?not authorized to perform: (\S+)(?: on resource: (\S+))?", plain)
    if denial is None:
        text = short(plain).rstrip(". ")
        return f"{operation}: {text}" if operation else text
    who, action, what = ((word or "").rstrip(".,") for word in denial.groups())
    why = re.search(r"\b(?:because|with an explicit deny)\b.*", plain, re.S)
    text = action + (f" on {what}" if what not in ("", "*") else "") + (f" for {who}" if who else "")
    return short(text + (f", {why.group()}".rstrip(". ") if why else ""))


def encoded(message: str) -> str:
    """Return the part of a denial that only sts:DecodeAuthorizationMessage can decode; "" if there is none."""
    return message.partition("Encoded authorization failure message:")[2].strip()


def quota(where: str) -> str:
    """Return the vCPU quota of the type and market in `where`."""
    spot = where.endswith(" spot")
    found = re.search(r"\b([a-z]+)(\d*)[a-z0-9-]*\.\w+", where)
    family, generation = found.groups() if found else ("", "")
    if family in ("g", "gr", "vt"):
        name = "G and VT"
    elif family == "p":
        name = {"2": "P4, P3 and P2", "3": "P4, P3 and P2", "4": "P4, P3 and P2"}.get(generation, f"P{generation}") \
            if spot else "P"
    elif family in ("f", "x", "inf", "trn", "dl", "hpc", "u"):
        name = family.upper() if len(family) == 1 else family.capitalize()
    else:
        name = "Standard (A, C, D, H, I, M, R, T, Z)"
    return f"All {name} Spot Instance Requests" if spot else f"Running On-Demand {name} instances"


def _region(where: str) -> str:
    found = re.search(r"\b[a-z]{2}(-[a-z]+)+-\d", where)
    return found.group() if found else "REGION"
