"""What AWS's error codes mean for a fleet: one table, code -> how far it reaches and what to do. Pure.

    POOL, TYPE, REGION, ACCOUNT   NoCapacity of that scope: others are tried, this cools down
    PERSON                        NeedsPerson: nothing helps but somebody with an account
    AGAIN                         SpotfleetError: the same call again, later, under the same token
    GONE                          SpotfleetError: the thing is not there; callers who expect that look at `code`

A code of a launch that is not in the table has scope "pool": somewhere else it may work, and the message says what AWS
said.
Sources: EC2 API reference, "Error codes for the Amazon EC2 API"; "Common errors" of IAM, STS, SSM, Pricing and Service
Quotas; botocore's exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError


class Reach(Enum):
    """In the order in which one of several decides: the widest last."""

    GONE = "gone"
    POOL = "pool"
    TYPE = "type"
    REGION = "region"
    AGAIN = "again"
    ACCOUNT = "account"
    PERSON = "person"


@dataclass(frozen=True)
class Reaction:
    reach: Reach
    what: str = ""  # in short; empty: what AWS said
    hint: str = ""  # {profile}, {region}, {quota} are filled in
    there: str = ""  # the hint on a machine of the fleet, where it is another one
    enough: bool = False  # what AWS said adds nothing to `what`


@dataclass(frozen=True)
class Asker:
    """Who asked: hints speak to them."""

    laptop: bool = True
    profile: str = ""  # of the laptop's AWS configuration

    @property
    def option(self) -> str:
        return f" --profile {self.profile}" if self.profile else ""


ELSEWHERE = "other pools are tried; this one again in some minutes"
RAISE = ("raise '{quota}' in {region}: https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas; "
         "`spotfleet check` shows what is used of it; or name more regions under `aws.regions`")
LOGIN = "`aws sso login{profile}` or `aws configure{profile}`, then `aws sts get-caller-identity{profile}`"
ROLE = "see that the machine's instance profile and its role still exist; `spotfleet up` on the laptop makes ours again"
POLICY = "`spotfleet check --policy` prints the permissions that are needed"
ITS_POLICY = "`spotfleet check --policy dispatcher` prints what the dispatcher's role needs"
CLOCK = "set the clock: `sudo timedatectl set-ntp true`"
LINKED_ROLE = ("a person who may: `aws iam create-service-linked-role --aws-service-name spot.amazonaws.com{profile}`, "
               "once per account")
ASKED_AGAIN = "it is asked again"
OFFLINE = "see that this machine reaches AWS (a proxy is named in HTTPS_PROXY); a fleet asks again by itself"
LIMIT = "remove what is not used (`spotfleet leaks --all-regions` shows ours), or raise the quota in Service Quotas"


def _rows(reach: Reach, what: str, hint: str, *codes: str, there: str = "", enough: bool = False,
          ) -> dict[str, Reaction]:
    return dict.fromkeys(codes, Reaction(reach, what, hint, there, enough))


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
    **_rows(Reach.TYPE, "this type cannot be had like that", "other types are tried; name some",
            "InvalidInstanceType", "InstanceTypeNotSupported", "UnsupportedOperation"),
    # -- quotas
    **_rows(Reach.REGION, "the spot quota is used up", RAISE,
            "MaxSpotInstanceCountExceeded", "SpotInstanceCountLimitExceeded"),
    **_rows(Reach.REGION, "the on-demand quota is used up", RAISE, "VcpuLimitExceeded", "InstanceLimitExceeded"),
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
    # -- who asks
    **_rows(Reach.PERSON, "the credentials have expired", LOGIN,
            "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "UnauthorizedException", there=ROLE),
    **_rows(Reach.PERSON, "the credentials have expired, or the clock is wrong", f"{LOGIN}; or {CLOCK}",
            "RequestExpired", there=f"{CLOCK}; or {ROLE}"),
    **_rows(Reach.PERSON, "the credentials are not valid", f"{LOGIN}; a region that is not enabled says so too",
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
    # -- what was asked for
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

# What AWS says under a code of another meaning: code, a piece of the message, the code that it should have.
SAID = (
    ("InvalidParameterValue", "IAM Instance Profile", "IncorrectState"),  # a new one is known after some seconds
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
ABSENT = ("NotFound", "NotFoundException", ".Unknown", ".NonExistentQueue", "404")
PRESENT = ("Duplicate", "AlreadyExists", "AlreadyExistsException")
CREDENTIALS = frozenset(c for c, row in TABLE.items() if row.there and row is not DENIED)  # other ones may do

# botocore's errors that are no answer of AWS
NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "SSOTokenLoadError",
    "UnauthorizedSSOTokenError", "TokenRetrievalError", "SSOError", "NoAuthTokenError", "MetadataRetrievalError",
    "PendingAuthorizationExpiredError", "RefreshWithMFAUnsupportedError", "InfiniteLoopConfigError",
    "UnknownCredentialError", "UnknownTokenProviderError", "LoginRefreshRequired", "LoginTokenLoadError",
    "LoginInsufficientPermissions",
})  # fmt: skip
OUR_WORDS = frozenset({"ParamValidationError", "InvalidRegionError", "NoRegionError", "UnknownServiceError",
                       "InvalidConfigError", "ConfigParseError", "InvalidEndpointConfigurationError", "ValueError"})


def reaction(code: str, message: str = "") -> Reaction:
    for known, piece, means in SAID:
        if code == known and piece in message:
            return TABLE[means]
    if code in TABLE:
        return TABLE[code]
    if code.endswith(ABSENT) or code.startswith("NoSuch"):
        return Reaction(Reach.GONE)
    if code.endswith(PRESENT):
        return Reaction(Reach.AGAIN, "somebody else made it at the same time", ASKED_AGAIN)
    if code.endswith("Malformed"):
        return TABLE["InvalidParameterValue"]
    return UNKNOWN


def refusal(where: str, code: str, message: str, operation: str = "", asker: Asker = Asker()) -> SpotfleetError:
    """The exception for what AWS answered; `where`: "aws us-east-1 us-east-1a g5.xlarge spot"."""
    row = reaction(code, message)
    if row is UNKNOWN and operation not in LAUNCHES:
        row = Reaction(Reach.AGAIN, "", f"AWS's reference of {operation} may say more")
    said = denied(message, operation) if row is DENIED else "" if row.enough else short(message)
    what = f"{row.what}: {said}" if row.what and said else row.what or said
    hint = row.hint if asker.laptop or not row.there else row.there
    for word, value in (("{profile}", asker.option), ("{region}", _region(where)), ("{quota}", quota(where))):
        hint = hint.replace(word, value)
    return _bearing(code, row.reach, f"{where}: {what} ({code})", hint)


def broken(where: str, kind: str, message: str, asker: Asker = Asker()) -> SpotfleetError:
    """The exception for botocore's error `kind`, which is no answer: no credentials, no connection."""
    if kind in NO_CREDENTIALS:
        hint = LOGIN.replace("{profile}", asker.option) if asker.laptop else ROLE
        return NeedsPerson(f"{where}: no valid credentials: {short(message)}", hint=hint)
    if kind in OUR_WORDS:
        return NeedsPerson(f"{where}: {short(message)}",
                           hint=f"see section `aws` of the fleet file, and `aws configure list{asker.option}`")
    if kind == "ResponseParserError":
        return SpotfleetError(f"{where}: AWS does not answer: what came is no answer of AWS's", hint=OFFLINE)
    return SpotfleetError(f"{where}: AWS does not answer: {short(message)}", hint=OFFLINE)


def skewed(where: str, seconds: float) -> SpotfleetError:
    """The exception for a clock that differs from AWS's by so much; more than that is ahead."""
    way = "ahead of" if seconds > 0 else "behind"
    return NeedsPerson(f"{where}: this machine's clock is {abs(seconds):.0f} s {way} AWS's, which refuses "
                       "its requests for that", hint=CLOCK)


def code(error: BaseException | None) -> str:
    """AWS's code behind `error`, which is botocore's or one made of it; "" if there is none."""
    while error is not None:
        told = getattr(error, "response", None)
        if isinstance(told, dict):
            return str(told.get("Error", {}).get("Code", ""))
        if mark := getattr(error, "aws_code", ""):
            return str(mark)
        error = error.__cause__
    return ""


def worst(refusals: Iterable[SpotfleetError]) -> SpotfleetError:
    """Of several refusals of one call, the one that reaches furthest; the first of those."""
    order = list(Reach)
    return max(refusals, key=lambda e: order.index(getattr(e, "aws_reach", Reach.POOL)))


def denied(message: str, operation: str = "") -> str:
    """Who may not do what, and why, of a message that says "not authorized": without AWS's encoded part."""
    plain = message.partition("Encoded authorization failure message")[0]
    told = re.search(r"(?:User: (\S+) is )?not authorized to perform: (\S+)(?: on resource: (\S+))?", plain)
    if told is None:
        said = short(plain).rstrip(". ")
        return f"{operation}: {said}" if operation else said
    who, action, what = ((word or "").rstrip(".,") for word in told.groups())
    why = re.search(r"\b(?:because|with an explicit deny)\b.*", plain, re.S)
    said = action + (f" on {what}" if what not in ("", "*") else "") + (f" for {who}" if who else "")
    return short(said + (f", {why.group()}".rstrip(". ") if why else ""))


def encoded(message: str) -> str:
    """The part of a denial that only sts:DecodeAuthorizationMessage can read; "" if there is none."""
    return message.partition("Encoded authorization failure message:")[2].strip()


def quota(where: str) -> str:
    """The vCPU quota of the type and market that `where` names."""
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


def short(message: str) -> str:
    """At most 300 characters, on one line; nothing of a web page, which somebody between us and AWS answers with."""
    line = " ".join(message.split()) if not message.lstrip().lower().startswith(("<!doctype", "<html")) else ""
    return line if len(line) <= 300 else line[:297] + "..."


def _bearing(code: str, reach: Reach, text: str, hint: str) -> SpotfleetError:
    if reach is Reach.PERSON:
        error: SpotfleetError = NeedsPerson(text, hint=hint)
    elif reach in (Reach.AGAIN, Reach.GONE):
        error = SpotfleetError(text, hint=hint)
    else:
        error = NoCapacity(text, hint=hint, scope=reach.value)
    error.aws_code, error.aws_reach = code, reach  # type: ignore[attr-defined]
    return error


def _region(where: str) -> str:
    found = re.search(r"\b[a-z]{2}(-[a-z]+)+-\d", where)
    return found.group() if found else "REGION"
