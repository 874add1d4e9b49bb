"""What a fleet file may say of EC2, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.codec import to_json
from spotfleet.config import load, parse
from spotfleet.errors import UsageError
from spotfleet.model import EnvironmentSpec, FleetSpec, Need, Nodes
from spotfleet.plugins import FileFacts
from spotfleet.providers.aws.plugin import AWS as AWS_PLUGIN
from spotfleet.providers.aws.section.spec import AwsNetwork, AwsSpec, parsed

FILE = Path("/work/fleet.yaml")
EXAMPLES = Path(__file__).parents[2] / "examples"
AWS = "provider: aws\n"


def spec(text: str) -> FleetSpec:
    return parse(text, FILE, {}).spec


def aws(text: str) -> AwsSpec:
    return parsed(spec(AWS + text).section)


def problems(text: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(text, FILE, {})
    lines = [one.strip() for one in str(caught.value).splitlines()]
    return [one.removeprefix(f"{FILE}:") for one in lines[1 if len(lines) > 1 else 0:]]


def test_a_full_file_becomes_a_spec():
    assert spec("""
provider: aws
nodes: {min: 2, target: 4}
resources:
  accelerators: A10G:1
  any_of: [{region: us-east-1}, {zone: us-west-2b, use_spot: false}]
placement: cluster
all_or_nothing: true
tags: {team: vision}
aws:
  regions: [us-east-1, us-west-2]
  joined: true
  networks:
    us-east-1: {vpc: vpc-0123456789abcdef0, subnets: [subnet-01234567, subnet-89abcdef], security_groups: sg-01234567}
    us-west-2: {subnets: subnet-0123456789abcdef0}
  profile: research
  public_addresses: false
  ssh_from: [203.0.113.0/24, 198.51.100.7, "2001:db8::/32"]
  image: /aws/service/our/image
  dispatcher_image: /aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id
  user: admin
  disk: 200
  dispatcher_disk: 40
  kms_key: alias/ours
  key_pair: My key
  dispatcher_profile: dispatchers
  host_profile: hosts
  event_queue: true
  permissions_boundary: arn:aws:iam::123456789012:policy/research-boundary
  capacity_reservation: cr-0a1b2c3d4e5f60718
environment: {python: python3.12, packages: [torch==2.13.0]}
""") == FleetSpec(
        name="fleet", provider="aws", workdir="/work", nodes=Nodes(2, 4, 4),
        any_of=(Need(region="us-east-1", accelerator="A10G", accelerator_count=1),
                Need(zone="us-west-2b", accelerator="A10G", accelerator_count=1, use_spot=False)),
        environment=EnvironmentSpec("python3.12", ("torch==2.13.0",)), tags={"team": "vision"},
        placement="cluster", all_or_nothing=True,
        section=to_json(AwsSpec(
            regions=("us-east-1", "us-west-2"), joined=True,
            networks=(AwsNetwork("us-east-1", "vpc-0123456789abcdef0", ("subnet-01234567", "subnet-89abcdef"),
                                 ("sg-01234567",)), AwsNetwork("us-west-2", "", ("subnet-0123456789abcdef0",))),
            profile="research", public_addresses=False,
            ssh_from=("203.0.113.0/24", "198.51.100.7/32", "2001:db8::/32"), image="/aws/service/our/image",
            dispatcher_image="/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
            user="admin", disk_gib=200, dispatcher_disk_gib=40, kms_key="alias/ours", key_pair="My key",
            dispatcher_profile="dispatchers", host_profile="hosts", event_queue=True,
            permissions_boundary="arn:aws:iam::123456789012:policy/research-boundary",
            capacity_reservations=("cr-0a1b2c3d4e5f60718",))),
    )


def test_the_section_may_be_left_out():
    assert aws("") == AwsSpec() == parsed(AWS_PLUGIN.read_section(None, FileFacts(), lambda _place, _text: None))


@pytest.mark.parametrize(("resources", "regions"), [
    ("{region: us-east-1}", ("us-east-1",)),
    ("{zone: eu-central-1b}", ("eu-central-1",)),
    ("{infra: aws/us-west-2}", ("us-west-2",)),
    ("{any_of: [{region: us-west-2}, {zone: us-east-1a}, {region: us-west-2}]}", ("us-west-2", "us-east-1")),
    ("{any_of: [{region: us-west-2}, {use_spot: false}]}", ()),
    ("{zone: us-east-1-bos-1a}", ("us-east-1",)),
], ids=["a region", "a zone", "infra", "several", "one may be anywhere", "a local zone"])
def test_without_regions_those_of_the_resources_are_meant(resources: str, regions: tuple[str, ...]):
    assert aws(f"resources: {resources}").regions == regions


def test_one_region_needs_no_list():
    assert aws("aws: {regions: us-east-1}").regions == ("us-east-1",)


def test_the_example_is_a_file_that_a_user_can_start_from():
    found = load(EXAMPLES / "aws-g5.yaml").spec
    assert parsed(found.section).regions
    assert {n.accelerator for n in found.any_of} == {"A10G"} and all(n.use_spot for n in found.any_of)


@pytest.mark.parametrize(("text", "said"), [
    ("name: a\naws: {regions: [us-east-1]}", "2: aws: is for provider aws, but the fleet's is 'local'; write "
                                             "`provider: aws`, or remove the section"),
    ("provider: ssh\nssh: {dispatcher: a, hosts: [b]}\nplacement: zone",
     "3: placement: is for provider aws or gcp, but the fleet's is 'ssh'; write `provider: aws`, or remove this"),
    ("name: a\nall_or_nothing: true", "2: all_or_nothing: is for provider aws or gcp, but the fleet's is 'local'; "
                                      "write `provider: aws`, or remove this"),
    (AWS + "interruption_behavior: stop",
     "2: interruption_behavior: a host that nobody ends powers itself off, which only stops it, and its spot request "
     "would stay open for ever: write `max_lifetime`, after which the request ends, or `terminate`"),
    (AWS + "placement: cluster\ninterruption_behavior: stop\nmax_lifetime: 1h",
     "3: interruption_behavior: EC2 launches no spot instance that it would stop into a placement group; write "
     "`terminate`, or `placement: zone`"),
    (AWS + "placement: rack", "2: placement: expected spread or zone or cluster, got 'rack'"),
    (AWS + "aws:\n  regionz: a", "3: aws.regionz: unknown key; did you mean 'regions'?"),
    (AWS + "aws:\n  vpc: a", "3: aws.vpc: unknown key; expected one of regions, joined, networks, profile, "
                             "public_addresses, ssh_from, image, dispatcher_image, user, disk, dispatcher_disk, "
                             "kms_key, key_pair, dispatcher_profile, host_profile, dispatcher_credentials, "
                             "event_queue, permissions_boundary, capacity_reservation"),
    (AWS + "aws:\n  capacity_reservation: [cr-01234567, cr-01234567]", "3: aws.capacity_reservation: cr-01234567 is "
     "here twice"),
    (AWS + "aws:\n  capacity_reservation: mine", "3: aws.capacity_reservation: expected the id of a capacity "
     "reservation such as cr-0a1b2c3d4e5f67890, got 'mine'"),
    (AWS + "aws:\n  networks:\n    us-east-1: {subnet: subnet-01234567}",
     "4: aws.networks.us-east-1.subnet: unknown key; did you mean 'subnets'?"),
    (AWS + "aws:\n  networks:\n    us-east-1: 7",
     "4: aws.networks.us-east-1: expected `key: value` lines with vpc, subnets, security_groups"),
    (AWS + "aws:\n  networks: {us-east: {}}", "3: aws.networks: expected a region such as us-east-1, got 'us-east'"),
    (AWS + "aws:\n  networks:\n    us-east-1: {vpc: subnet-01234567}",
     "4: aws.networks.us-east-1.vpc: expected the id of a VPC such as vpc-0a1b2c3d4e5f67890, got 'subnet-01234567'"),
    (AWS + "aws:\n  regions: [us-east-1a]", "3: aws.regions: expected a region such as us-east-1, got 'us-east-1a'; "
                                            "that is a zone of us-east-1; zones stand under `resources`"),
    (AWS + "aws:\n  regions: [us-east-1, us-east-1]", "3: aws.regions: us-east-1 is here twice"),
    (AWS + "aws:\n  regions: []", "3: aws.regions: expected a list of regions such as [us-east-1, us-west-2], got []"),
    (AWS + "aws:\n  regions: [us-east-1]\n  networks: {us-west-2: {}}",
     "4: aws.networks.us-west-2: is of a region where the fleet may not be; aws.regions has us-east-1"),
    (AWS + "aws: {regions: [us-east-1]}\nresources: {any_of: [{region: us-east-1}, {zone: eu-west-1a}]}",
     "3: resources.any_of[1].zone: is in eu-west-1, which is none of aws.regions: us-east-1"),
    (AWS + "aws: {regions: [us-east-1]}\ndispatcher:\n  region: us-west-2",
     "4: dispatcher.region: is in us-west-2, which is none of aws.regions: us-east-1"),
    (AWS + "resources:\n  region: us-east-1\n  zone: us-west-2a",
     "4: resources.zone: us-west-2a is a zone of us-west-2, not of us-east-1"),
    (AWS + "aws:\n  joined: true\n  regions: [us-east-1, us-west-2]\n  networks: {us-east-1: {vpc: vpc-01234567}}",
     "3: aws.joined: is your promise that the networks of all regions reach each other; name each under aws.networks: "
     "us-west-2 has none"),
    (AWS + "aws:\n  joined: true\n  regions: us-east-1\n  networks: {us-east-1: {vpc: vpc-01234567}}",
     "3: aws.joined: is your promise that the networks of all regions reach each other; name each under aws.networks, "
     "of two regions at least"),
    (AWS + "aws:\n  ssh_from: 0.0.0.0/0",
     "3: aws.ssh_from: expected an address or a network such as 203.0.113.7 or 203.0.113.0/24, got '0.0.0.0/0'; that "
     "is the whole world, to which nothing of a fleet is open: leave it out, and `up` allows SSH from the address "
     "that you have then"),
    (AWS + "aws:\n  ssh_from: [10.0.0.7/8]",
     "3: aws.ssh_from: expected an address or a network such as 203.0.113.7 or 203.0.113.0/24, got '10.0.0.7/8'; "
     "10.0.0.7/8 has host bits set"),
    (AWS + "aws:\n  ssh_from: [my laptop]", "3: aws.ssh_from: expected an address or a network such as 203.0.113.7 or "
                                            "203.0.113.0/24, got 'my laptop'"),
    (AWS + "aws:\n  public_addresses: false",
     "2: aws.ssh_from: is missing: without public addresses you come by a way of your own, and `up` cannot find out "
     "from which network"),
    (AWS + "aws:\n  image: ubuntu", "3: aws.image: expected an image such as ami-0a1b2c3d4e5f67890, or an SSM "
                                    "parameter such as /aws/service/deeplearning/ami/.../ami-id, got 'ubuntu'"),
    (AWS + "aws:\n  image: ami-0a1b2c3d4e5f67890\n  regions: [us-east-1, us-west-2]",
     "3: aws.image: an image with an id is of one region, and the fleet may be in us-east-1, us-west-2; name one "
     "region, or an SSM parameter"),
    (AWS + "aws:\n  disk: 4", "3: aws.disk: expected whole GiB, 8 to 16384, got 4"),
    (AWS + "aws:\n  disk: 100GB", "3: aws.disk: expected whole GiB, 8 to 16384, got '100GB'"),
    (AWS + "aws:\n  kms_key: mine", "3: aws.kms_key: expected a key of KMS: its id, its ARN or alias/NAME, got 'mine'"),
    (AWS + "aws:\n  regions: us-west-2\n  kms_key: arn:aws:kms:us-east-1:123456789012:alias/ours",
     "4: aws.kms_key: is a key of us-east-1, and the fleet may be in us-west-2; name one region, or alias/NAME"),
    (AWS + "aws:\n  permissions_boundary: mine", "3: aws.permissions_boundary: expected the ARN of an IAM policy such "
     "as arn:aws:iam::123456789012:policy/boundary, got 'mine'"),
    (AWS + "aws:\n  host_profile: arn:aws:iam::123456789012:instance-profile/hosts",
     "3: aws.host_profile: expected the name of an instance profile, got "
     "'arn:aws:iam::123456789012:instance-profile/hosts'; write hosts"),
    (AWS + "tags:\n  AWS:team: a", "3: tags.AWS:team: begins with 'aws:', which is not yours to use; choose another "
                                   "name"),
    (AWS + "tags:\n  spotfleet-role: a", "3: tags.spotfleet-role: begins with 'spotfleet', which is not yours to use; "
                                         "choose another name"),
    (AWS + "tags:\n  my team: a", "3: tags.my team: is no name of a tag that instances can read: 1 to 128 letters, "
                                  "digits and any of + - = . _ : @"),
    (AWS + "tags:\n  größe: a", "3: tags.größe: is no name of a tag that instances can read: 1 to 128 letters, "
                                "digits and any of + - = . _ : @"),
    (AWS + "tags:\n  a,b: a", "3: tags.a,b: is no name of a tag that instances can read: 1 to 128 letters, "
                              "digits and any of + - = . _ : @"),
    (AWS + f"tags:\n  team: {'a' * 257}", "3: tags.team: expected at most 256 letters, digits, blanks and any of + - = "
                                          ". _ : / @"),
    (AWS + f"tags: {{{', '.join(f't{i}: a' for i in range(41))}}}",
     "2: tags: are 41; an instance takes 40 beside ours"),
], ids=lambda value: value.splitlines()[-1].strip()[:60] if "\n" in value else "")
def test_what_cannot_be_is_said_with_its_line_and_what_to_write(text: str, said: str):
    assert problems(text) == [said]
