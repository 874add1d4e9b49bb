"""A cloud that behaves like AWS, for tests: moto in server mode, extended by what moto lacks, over a real socket.

Its room, time, machines and faults are those of `fakes/kit`.

    sys.path.insert(0, "tests/fakes")            # tests in tests/fakes have it already
    from aws import AwsCloud

    with AwsCloud() as cloud:                    # AwsCloud(address="10.0.0.1") where machines in namespaces come to it
        ec2 = cloud.client("ec2", "us-east-1")   # the real boto3, as the account's owner
        os.environ.update(cloud.environ())       # AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...: all of boto3 comes here
        cloud.reset()                            # as new, in milliseconds; same url

One account, one server per process. Regions: us-east-1, us-west-2, eu-west-1, three zones each (us-east-1a is use1-az1
...; not every type in every zone, see `catalog.TYPES`), each with a default VPC 172.31.0.0/16 and a public subnet /20
per zone. Addresses of instances are handed out upwards from .10, and never twice before the subnet is through.

TIME. `AwsCloud(clock=...)`: a function that returns Unix seconds; time.time by default, then a thread of the fake lets
things fall due. With a clock of your own call `cloud.tick()` after moving it (each request ticks too). How long things
take, all in seconds and settable at any time:

    cloud.notice_s = 120.0      from an interruption notice until the instance goes
    cloud.pending_s = 0.0       pending -> running
    cloud.ending_s = 0.0        shutting-down -> terminated, stopping -> stopped
    cloud.new_lag_s = 0.0       until a new instance or spot request is listed and known (InvalidInstanceID.NotFound)
    cloud.lag_s = 0.0           listings of instances and spot requests show their states of so long ago
    cloud.profile_lag_s = 0.0   until a new instance profile can be used (InvalidParameterValue till then)
    cloud.gone_s = 3600.0       terminated instances and ended spot requests stay listed so long
    cloud.retry_s = 0.0         how often EC2 looks again at open or disabled requests (0: always)
    cloud.template_ends_s = 0.0 ValidUntil of a persistent request by a launch template that has none (AWS: 7 days)
    cloud.credentials_s = 3600  so long before there are new credentials in the metadata

CAPACITY AND PRICES. A pool is (zone, type, market), market "spot" or "on-demand".

    cloud.set_room("us-east-1a", "g5.xlarge", 2)             free places of a spot pool; None: endless (default)
    cloud.set_room("us-east-1a", "m5.large", 0, "on-demand")
    cloud.room("us-east-1a", "g5.xlarge") -> int | None
    cloud.set_price("us-east-1a", "g5.xlarge", 0.41)         spot, from now on; the history keeps the earlier ones
    cloud.price("us-east-1a", "g5.xlarge"), cloud.on_demand_usd("g5.xlarge", "us-east-1")
    cloud.set_quota("us-east-1", "G", "spot", 96)            vCPUs; family G, P, P5 or Standard (default: 100000)
    cloud.usage("us-east-1", "G", "spot") -> int             vCPUs, open requests counted
    cloud.set_default_key("us-east-1", arn)                  a customer's key encrypts disks; a launch whose caller may
                                                             not use it ends at once, and a spot one without a grant
    cloud.invoice() -> {instance: dollars}                   what EC2 would bill, with its first hour

WHAT HAPPENS TO INSTANCES, each shown as an `InstanceView` (`run` counts boots: persistent hosts come back).

    cloud.instances(region="", **tags) -> list[InstanceView]         living ones (not terminated)
    cloud.instance(id) -> InstanceView                               also ended ones
    cloud.requests(region="") -> list[SpotRequest]                   `.id`, `.state`, `.now.code`, `.instance_id`
    cloud.interrupt(id, notice_s=None, room=0)  notice now, taken after notice_s (cloud.notice_s); its pool has `room`
    cloud.take(id, room=0)                      taken now, without a notice
    cloud.rebalance(id)                         rebalance recommendation
    cloud.schedule(id, code, after_s, state="active")   maintenance event, as "system-reboot", "instance-stop" ...
    cloud.guest_shutdown(id)                    the guest powered itself off: InstanceInitiatedShutdownBehavior decides
    cloud.settle()                              wait until what is due and every call of the runner is done

RUNNER. `cloud.runner = r` with these methods, called one after another by a thread of the fake without any lock, so
they may call everything here. What they raise is kept in `cloud.runner_errors`.

    r.run(view)        the instance boots (it is "running" when this is called); also a stopped one that starts again
    r.stop(view)       the machine stops, its disk stays
    r.terminate(view)  the machine ends, its disk goes

METADATA. `cloud.metadata(id, path, method="GET", headers={}, hops=1) -> (status, body: bytes)`, all of
169.254.169.254: IMDSv2 tokens (PUT /latest/api/token, 401 without one where HttpTokens is required, hop limit),
instance-id, ami-launch-index, local-ipv4, public-ipv4, mac, network/interfaces/macs/..., placement/...,
instance-type, tags/instance/KEY (if enabled), spot/instance-action, spot/termination-time,
events/recommendations/rebalance, events/maintenance/scheduled, iam/info, iam/security-credentials/ROLE (a principal
of its own), public-keys/0/openssh-key, dynamic/instance-identity/document, user-data. Status 0: no answer.
`cloud.metadata_down(id, True)`: it does not answer.

REQUESTS, RIGHTS, FAULTS. Every request is a `Call(at, service, action, region, principal, params, code, status,
dry_run)`; `action` as in a policy ("ec2:RunInstances"), `code` "" if it went well, `params` as botocore names them.

    cloud.calls -> list[Call];  cloud.actions(principal="") -> set of "ec2:RunInstances" ...;  cloud.forget_calls()
    cloud.owner                                       "owner": the principal of cloud.client()
    cloud.user("ci") -> (access key, secret key)      another one; cloud.client(..., key=...)
    "role/NAME"                                       of credentials that a machine got from its metadata
    cloud.allow("owner", {"ec2:Describe*", ...})      only these from now on; None: everything. Roles: their policies
    cloud.deny("owner", {"ec2:RunInstances"})         never these; set() takes it back
    cloud.attach("ci", document)                      a user may what this policy allows, judged resource by resource
    cloud.guardrail({"Effect": "Deny", ...})          statements of a service control policy, for everybody
    cloud.expire("owner")                             its credentials have expired; (..., False) takes it back
    cloud.fault("ec2:RunInstances", code="RequestLimitExceeded", times=3)   the next calls fail; status by the code
    cloud.fault(action, lost="before")                the connection dies before it is carried out; "after": before
                                                      it is answered
    cloud.fault(action, delay_s=2.0)                  answered late; `action` may be a pattern: "ec2:*"
    cloud.faults_off()
    cloud.throttles = True                            EC2's rate limits, a bucket per action and region (RequestLimit-
                                                      Exceeded); without time that passes no token comes back
    cloud.fleet_throttles = 2                         the next two pools of CreateFleet: RequestLimitExceeded in the
                                                      Errors of an answer that is no error
    cloud.before = f(call), cloud.after = f(call)     called around each request, for anything else; may raise Lost
                                                      (the connection dies) or AwsError(code, message)
    cloud.skew_s = 0.0                                the server's clock (Date header) is ahead; > 300: RequestExpired
    cloud.spot_role = False                           before the first use of spot: its service-linked role is missing
    cloud.parameters, cloud.images, cloud.image_gone  of SSM and images; cloud.add_image("ami-..."): the account's own
    cloud.bugs                                        tracebacks of the fake's own mistakes (answered as InternalError)
    cloud.findings                                    what botocore's models refuse in a request or answer that went
                                                      well: lengths, patterns, enums, unknown members, filters

WHAT IS THERE. `cloud.everything(owned=True) -> list[Thing(kind, region, id, name, tags)]`: straight from the state, not
through the API: instances that are not terminated, live spot requests, fleets with instances, launch templates,
volumes, interfaces, groups, key pairs, addresses, placement groups, roles, profiles, queues, rules, buckets. Without
what every account has: default VPCs and their parts, service-linked roles.

Images and account: `cloud.ACCOUNT`, `cloud.UBUNTU`, `cloud.DEEP_LEARNING` (image ids, the same in every region).

What EC2 does where nobody says it, and this fake does the worse: what a persistent request launches anew has no tags
(`cloud.relaunched_tagged`); each spot machine of one launch has the launch index 0 (`cloud.spot_index_zero`); a
one-time spot instance whose guest powers off under the shutdown behavior "stop" goes on being "running"; a stopped
instance stays when its request expires.
"""

from __future__ import annotations

from tests.support.fakes.aws.catalog import ACCOUNT, DEEP_LEARNING, REGIONS, TYPES, UBUNTU, Image
from tests.support.fakes.aws.cloud import AwsCloud
from tests.support.fakes.aws.controls import InstanceView
from tests.support.fakes.aws.errors import AwsError, Lost
from tests.support.fakes.aws.inventory import Thing
from tests.support.fakes.kit.requests import Call

__all__ = [
    "ACCOUNT",
    "DEEP_LEARNING",
    "REGIONS",
    "TYPES",
    "UBUNTU",
    "AwsCloud",
    "AwsError",
    "Call",
    "Image",
    "InstanceView",
    "Lost",
    "Thing",
]
