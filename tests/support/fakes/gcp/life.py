"""Instances and their operations, from insert to the end. Under the cloud's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.fakes.gcp import catalog
from tests.support.fakes.gcp.errors import LateError, no_room, over_quota
from tests.support.fakes.gcp.state import SPOT, Instance, Operation, link, relative, stamp
from tests.support.fakes.kit.machines import MachineLife

if TYPE_CHECKING:
    from tests.support.fakes.gcp.cloud import GcpCloud

SYSTEM = "system"
ACCOUNT_GONE = "EXTERNAL_RESOURCE_NOT_FOUND"


class GcpLife(MachineLife):
    def __init__(self, cloud: GcpCloud) -> None:
        self.cloud = cloud

    # ---- birth

    def why_not(self, instance: Instance) -> LateError | None:
        """Why it cannot run now."""
        room = self.cloud.market.holds(instance.pool)
        return self.denied(instance) or self.over_quota(instance) or (None if room else self.stockout(instance))

    def denied(self, instance: Instance) -> LateError | None:
        """Why its service account cannot be used: found out after the request was accepted."""
        email = next((a["email"] for a in instance.body.get("serviceAccounts", ())), "")
        if email and not self.cloud.may_act_as(instance.user, email):
            return LateError("SERVICE_ACCOUNT_ACCESS_DENIED", f"The user does not have access to service account "
                             f"'{email}'.  User: '{instance.user}'.  Ask a project owner to grant you the "
                             "iam.serviceAccountUser role on the service account")
        if email and not self.cloud.account_known(email):
            return LateError(ACCOUNT_GONE, f"The resource '{email}' of type 'serviceAccount' was not found.")
        return None

    def over_quota(self, instance: Instance, count: int = 1) -> LateError | None:
        """Why so many like it do not fit into the quotas."""
        wanted = {k: v * count for k, v in self.cloud.needed(instance).items()}
        lacking = self.cloud.quota_exceeded(instance.region, wanted)
        return over_quota(*lacking) if lacking else None

    def stockout(self, instance: Instance) -> LateError:
        cloud, (card, count) = self.cloud, instance.gpus
        elsewhere = [z for z in catalog.REGIONS[instance.region] if z != instance.zone
                     and catalog.in_zone(instance.kind, z) and cloud.market.holds((z, *instance.pool[1:]))]
        return no_room(instance.zone, instance.kind.name, f"{card}:{count}" if card and not instance.kind.optimized
                       else "", elsewhere, cloud.plain_stockouts)

    def insert(self, instance: Instance, operation: Operation) -> None:
        """It is there at once, and it runs or vanishes later; then its operation is done."""
        cloud = self.cloud
        error = self.why_not(instance)
        cloud.instances_by_path[cloud.path(instance)] = instance
        self._make_parts(instance)
        if error is None:
            cloud.market.take(instance)
            self.boot(instance)
            self._limit(instance)
            cloud.later(cloud.now() + max(cloud.pending_s, cloud.operation_s), lambda: operation.finish(cloud.now()))
            return

        def vanished() -> None:
            if instance.state == "pending":
                self._drop(instance)
            operation.finish(cloud.now(), error)

        cloud.later(cloud.now() + max(cloud.pending_s, cloud.operation_s), vanished)

    def _limit(self, instance: Instance) -> None:
        """End its run when `maxRunDuration` is over."""
        limit_s = float(instance.scheduling.get("maxRunDuration", {}).get("seconds", 0))
        run, deletes = instance.run, instance.scheduling.get("instanceTerminationAction") == "DELETE"

        def due() -> None:
            if instance.run == run and instance.runs:
                self._taken(instance, f"compute.instances.deferred{'Delete' if deletes else 'Stop'}",
                            "Instance run duration is over.", deletes)

        if limit_s:
            self.cloud.later(self.cloud.now() + self.cloud.pending_s + limit_s, due)

    def _make_parts(self, instance: Instance) -> None:
        cloud = self.cloud
        now = stamp(cloud.now())
        instance.body |= {"id": instance.id, "creationTimestamp": now, "lastStartTimestamp": now}
        for disk in instance.body["disks"]:
            made = disk.pop("_new", None)
            if made is not None:
                cloud.things[relative(made["selfLink"])] = {**made, "id": cloud.number(), "creationTimestamp": now}
            if "source" in disk:
                cloud.things[relative(disk["source"])]["users"] = [link(cloud.path(instance))]
        for nic in instance.body["networkInterfaces"]:
            subnet = cloud.things[relative(nic["subnetwork"])]
            nic.setdefault("networkIP", cloud.addresses.private(subnet["ipCidrRange"]))
            self.connect(nic)
        instance.body["resourceStatus"] = {"scheduling": {"availabilityDomain": 0}}

    def connect(self, nic: dict[str, Any]) -> None:
        for config in nic.get("accessConfigs", ()):
            config.setdefault("natIP", self.cloud.addresses.public())

    def _drop(self, instance: Instance) -> None:
        """Remove an instance and the disks that go with it."""
        cloud = self.cloud
        for disk in instance.body["disks"]:
            source = relative(disk.get("source", ""))
            if source in cloud.things:
                if disk["autoDelete"]:
                    del cloud.things[source]
                else:
                    cloud.things[source].pop("users", None)
        cloud.instances_by_path.pop(cloud.path(instance), None)
        instance.ended_at = cloud.now()
        cloud.gone.append(instance)
        cloud.ended.append(instance)
        if instance.state != "terminated":
            self.become(instance, "terminated")

    # ---- what the kit asks

    def has_stopped(self, machine: Instance) -> None:
        machine.stopped_at = self.cloud.now()
        machine.maintenance = None
        machine.body["lastStopTimestamp"] = stamp(machine.stopped_at)
        for nic in machine.body["networkInterfaces"]:  # an ephemeral external address is given back
            for config in nic.get("accessConfigs", ()):
                config.pop("natIP", None)

    def has_ended(self, machine: Instance) -> None:
        self._drop(machine)

    def changed(self, machine: Instance, name: str) -> None:
        self.cloud.noise_of(machine)

    # ---- requests

    def start(self, instance: Instance, operation: Operation) -> None:
        cloud = self.cloud
        if instance.state in ("pending", "running"):
            return cloud.later(cloud.now() + cloud.operation_s, lambda: operation.finish(cloud.now()))
        error = self.why_not(instance)
        instance.preempted = False
        instance.acpi_at = None
        self.become(instance, "pending")
        instance.body["lastStartTimestamp"] = stamp(cloud.now())
        if error is None:
            cloud.market.take(instance)
            for nic in instance.body["networkInterfaces"]:
                self.connect(nic)
            self.boot(instance)
            self._limit(instance)
            return cloud.later(cloud.now() + max(cloud.pending_s, cloud.operation_s),
                               lambda: operation.finish(cloud.now()))

        def refused() -> None:
            if instance.state == "pending":
                self.become(instance, "stopped")
            operation.finish(cloud.now(), error)

        return cloud.later(cloud.now() + max(cloud.pending_s, cloud.operation_s), refused)

    def end(self, instance: Instance, operation: Operation | None, delete: bool, by: str) -> None:
        """Stop or delete it; the operation is done with it."""
        cloud = self.cloud
        if instance.state in ("running", "pending"):
            instance.acpi_at = cloud.now()
        if delete:
            self.terminate(instance, ("", ""), by)
        else:
            self.stop(instance, ("", ""), by)
        if operation is not None:
            wait = 0.0 if not delete and instance.state == "stopped" else cloud.ending_s
            cloud.later(cloud.now() + max(wait, cloud.operation_s), lambda: operation.finish(cloud.now()))

    # ---- what the cloud does

    def preempt(self, instance: Instance, notice_s: float | None, room: int | None) -> None:
        """Take it, `notice_s` after the notice in its metadata; None: with the signal to power off alone."""
        if instance.market != SPOT or not instance.runs:
            raise AssertionError(f"{instance.name} is no running Spot VM")
        if notice_s is not None:
            instance.preempted = True
        self.reclaim(instance, notice_s, room, "delete" if instance.deletes else "stop",
                     lambda: self._taken(instance, "compute.instances.preempted", "Instance was preempted.",
                                         instance.deletes), lambda: self.cloud.noise_of(instance))

    def _taken(self, instance: Instance, kind: str, message: str, deletes: bool) -> None:
        instance.preempted = kind.endswith("preempted")
        operation = self.cloud.operate(f"zones/{instance.zone}", kind, instance, SYSTEM)
        operation.message = message
        operation.finish(self.cloud.now())
        self.end(instance, None, deletes, SYSTEM)

    def host_error(self, instance: Instance) -> None:
        """Its host fails: no signal. Without automatic restart it stays TERMINATED."""
        restarts = instance.scheduling["automaticRestart"]
        operation = self.cloud.operate(f"zones/{instance.zone}", "compute.instances.hostError", instance, SYSTEM)
        operation.message = "Instance terminated by Compute Engine."
        operation.finish(self.cloud.now())
        self.stop(instance, ("", ""), SYSTEM, (lambda: self._restarted(instance)) if restarts else None)

    def _restarted(self, instance: Instance) -> None:
        operation = self.cloud.operate(f"zones/{instance.zone}", "compute.instances.automaticRestart", instance, SYSTEM)
        self.start(instance, operation)

    def maintain(self, instance: Instance, after_s: float) -> None:
        """Maintenance of its host, `after_s` after its metadata tell it; an instance that cannot migrate is stopped."""
        migrates = instance.scheduling["onHostMaintenance"] == "MIGRATE"
        event = "MIGRATE_ON_HOST_MAINTENANCE" if migrates else "TERMINATE_ON_HOST_MAINTENANCE"
        at = self.cloud.now() + after_s
        instance.maintenance = (event, at)
        self.cloud.noise_of(instance)
        run = instance.run

        def due() -> None:
            instance.maintenance = None
            if instance.run == run and instance.runs and not migrates:
                self._taken(instance, "compute.instances.terminateOnHostMaintenance",
                            "Instance terminated by maintenance event.", False)
            self.cloud.noise_of(instance)

        self.cloud.later(at, due)

    def guest_shutdown(self, instance: Instance) -> None:
        """The guest has powered off: the instance is stopped."""
        if instance.state == "running":
            self._taken(instance, "compute.instances.guestTerminate", "Instance terminated by guest OS shutdown.",
                        False)
