"""A cloud that behaves like Google Cloud, for tests: Compute Engine and what a fleet needs beside it, over a socket.

Its room, time, machines and faults are those of `fakes/kit`. Google's own discovery documents judge it
(`fakes/discovery.py`): a request that they do not allow is refused, and what they do not allow in an answer is in
`cloud.findings`.

    from tests.support.fakes.gcp import GcpCloud

    with GcpCloud() as cloud:                       # GcpCloud(address="10.0.0.1") where machines in namespaces call it
        cloud.client("InstancesClient")             # the real google-cloud-compute, as the project's owner
        os.environ.update(cloud.environ())          # endpoint, project and a key file, by which google-auth gets tokens
        cloud.reset()                               # as new, in milliseconds; same url

One base URL serves every API: Compute Engine at /compute/v1/..., Resource Manager, Service Usage, IAM and Cloud Billing
at /v1/..., OAuth tokens at /token. `about.py` describes what is sold, `rules.py` what a new instance may be, `life.py`
what becomes of it, `resources.py` all other resources and operations, `account.py` the project.

One project, `cloud.project`. Regions: us-central1, us-east4, europe-west4 with their zones and not every GPU in each
(`catalog.py`). The network `default` is an auto mode one; `cloud.add_network(name, auto=False, project="", nat=True)`
makes others.

TIME. `GcpCloud(clock=...)`: a function that returns Unix seconds; time.time by default, then a thread of the fake lets
things fall due. With a clock of your own call `cloud.tick()` after moving it (each request ticks too); no request waits
then, unless `cloud.passing = f(seconds)` lets time pass. How long things take, all in seconds and settable at any time:

    cloud.pending_s = 0.0       PROVISIONING, STAGING -> RUNNING; a refused instance vanishes after as long
    cloud.ending_s = 0.0        STOPPING -> TERMINATED, or gone
    cloud.operation_s = 0.0     until an operation is done; no shorter than the two above where it waits for these
    cloud.wait_s = 120.0        operations.wait answers after so long, done or not
    cloud.new_lag_s = 0.0       until a new instance is listed (`get` knows it at once)
    cloud.lag_s = 0.0           listings of instances show them as of so long ago
    cloud.account_lag_s = 0.0   until a new service account can be used

CAPACITY AND PRICES. A pool is (zone, machine type, market), market "spot" or "on-demand".

    cloud.set_room("us-central1-a", "g2-standard-4", 2)      free places of a spot pool; None: endless (default)
    cloud.set_room("us-central1-a", "e2-small", 0, "on-demand")
    cloud.room(zone, type) -> int | None
    cloud.plain_stockouts = True                             stockouts without details, as older ones
    cloud.set_price(zone, type, 0.21)                        spot, from now on; the history keeps the earlier ones
    cloud.price(zone, type), cloud.on_demand_usd(type, region)
    cloud.set_quota("us-central1", "PREEMPTIBLE_NVIDIA_L4_GPUS", 1)    region "": of the project, "GPUS_ALL_REGIONS"
    cloud.quota_at_once = True                               refuse for a quota at once, not in the operation
    cloud.preemption_rate = 0.05                             as advice.capacityHistory tells it
    cloud.invoice() -> {name: dollars}                       machines without disks

WHAT HAPPENS TO INSTANCES, by name, each shown as an `InstanceView` (`run` counts boots).

    cloud.instances(**labels) -> list[InstanceView]          those that exist, TERMINATED ones, too
    cloud.instance(name) -> InstanceView                     also ended ones
    cloud.preempt(name)                                      after the notice that it asked for (120 s or none)
    cloud.preempt(name, notice_s=20.0, room=0)               after another one; None: at once, without `preempted`
                                                             before. Its pool has `room` from then on
    cloud.host_error(name)                                   its host breaks
    cloud.maintain(name, after_s)                            maintenance-event; ends a VM that cannot migrate
    cloud.guest_shutdown(name)                               the guest powered itself off
    cloud.settle()                                           what is due and every call of the runner is done

RUNNER. `cloud.runner = r` with methods `run(view)`, `stop(view)`, `terminate(view)`: see `kit/cloud.py`.

METADATA. `cloud.metadata(name, target, method="GET", headers={}) -> (status, headers, body)`: `metadata.py`. Status 0:
no answer. `cloud.metadata_down(name)`.

REQUESTS, RIGHTS, FAULTS. Every request is a `Call(at, service, action, region, principal, params, code, status)`;
`action` is the method's id ("compute.instances.insert"), `code` the reason of its error.

    cloud.calls; cloud.actions(principal=""); cloud.forget_calls()
    cloud.owner                                              the principal of cloud.client() and cloud.environ()
    cloud.anonymous = ""                                     refuse requests without a token (default: the owner's)
    cloud.allow(principal, {"compute.*"}); cloud.deny(principal, {"compute.instances.create"}); cloud.expire(principal)
                                                             a machine's principal is its service account's address
    cloud.fault("compute.instances.insert", code="rateLimitExceeded", times=3)    or "429", "backendError"
    cloud.fault(action, lost="before")                       the connection dies before it is carried out, or "after"
    cloud.fault(action, delay_s=2.0); cloud.faults_off()
    cloud.throttles = True                                   limits of requests per minute
    cloud.services.discard("compute.googleapis.com")         the API is off
    cloud.unreachable.add("zones/us-central1-b")             a zone that aggregated listings leave out
    cloud.unreachable_warns = True                           and mark with a warning, in place of `unreachables`
    cloud.no_external_ips = True                             the organization's policy forbids external addresses
    cloud.common_metadata["enable-oslogin"] = "TRUE"         metadata of the project
    cloud.before = f(call), cloud.after = f(call)            around each request; may raise Lost or GcpError
    cloud.bugs, cloud.findings                               the fake's own mistakes; violations of the documents

WHAT IS THERE. `cloud.everything(owned=True) -> list[Thing(kind, place, name, labels)]`, straight from the state.

Where the documentation leaves a thing open, the fake does the worse of both: a request id that comes with another
request is refused; GPUs of Spot VMs count in GPUS_ALL_REGIONS; the operation of a preemption appears when the guest
gets the signal to power off, and not with the notice.
"""

from __future__ import annotations

from tests.support.fakes.gcp.catalog import PROJECT, REGIONS, TYPES, ZONES, Image
from tests.support.fakes.gcp.cloud import GcpCloud
from tests.support.fakes.gcp.errors import GcpError, Lost
from tests.support.fakes.gcp.state import InstanceView, Thing
from tests.support.fakes.kit.requests import Call

__all__ = ["PROJECT", "REGIONS", "TYPES", "ZONES", "Call", "GcpCloud", "GcpError", "Image", "InstanceView", "Lost",
           "Thing"]
