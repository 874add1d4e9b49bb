"""Instances and spot requests from birth to death. Under the cloud's lock."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from tests.support.fakes.aws import birth, keys
from tests.support.fakes.aws.birth import new_id
from tests.support.fakes.aws.catalog import region_of
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.market import EXCEEDED
from tests.support.fakes.aws.state import Machine, Order, RegionState, SpotRequest, iso
from tests.support.fakes.kit.machines import MachineLife

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud

NO_ROOM = (
    "We currently do not have sufficient {kind} capacity in the Availability Zone you requested ({zone}). Our system "
    "will be working on provisioning additional capacity."
)
USER = ("Client.UserInitiatedShutdown", "Client.UserInitiatedShutdown: User initiated shutdown")
GUEST = ("Client.InstanceInitiatedShutdown", "Client.InstanceInitiatedShutdown: Instance initiated shutdown")
SPOT_STOP = ("Server.SpotInstanceShutdown", "Server.SpotInstanceShutdown: Spot instance shutdown")
SPOT_END = ("Server.SpotInstanceTermination", "Server.SpotInstanceTermination: Spot instance termination")


class Life(MachineLife):
    def __init__(self, cloud: AwsCloud) -> None:
        self.cloud = cloud

    # ---- birth

    def launch(self, order: Order, least: int, most: int, fleet_id: str = "") -> list[Machine]:
        """Between `least` and `most` instances, or none and AwsError."""
        cloud, market = self.cloud, self.cloud.market
        state, now = cloud.regions[region_of(order.zone)], cloud.now()
        if order.market == "spot":
            price = market.price(order.zone, order.type, now)
            if "MaxPrice" in order.spot and float(order.spot["MaxPrice"]) < price:
                raise AwsError(
                    "SpotMaxPriceTooLow",
                    f"Your Spot request price of {order.spot['MaxPrice']} is lower than the "
                    f"minimum required Spot request fulfillment price of {price}.",
                )
        if not order.reservation:  # a reservation counts as a whole, whether it is used or not
            market.within_quota(state, order.type, order.market, least)
        room = market.room((order.zone, order.type, order.reservation or order.market))
        if order.reservation and (room or 0) < least:
            raise AwsError("ReservationCapacityExceeded", EXCEEDED)
        if room is not None and room < least:
            raise AwsError("InsufficientInstanceCapacity", NO_ROOM.format(kind=order.type, zone=order.zone))
        count = most if room is None else min(most, room)
        while count > least and not order.reservation:
            try:
                market.within_quota(state, order.type, order.market, count)
                break
            except AwsError:
                count -= 1
        birth.addresses_free(order, count)
        reservation = new_id("r")
        machines = []
        for index in range(count):
            request = self._request(state, order, fleet_id) if order.market == "spot" else None
            shown = 0 if order.market == "spot" and cloud.spot_index_zero else index
            machines.append(self.born(state, order, shown, reservation, fleet_id, request))
        return machines

    def _request(self, state: RegionState, order: Order, fleet_id: str) -> SpotRequest:
        until = order.spot.get("ValidUntil")
        usual = self.cloud.on_demand_usd(order.type, state.name)
        request = SpotRequest(
            f"sir-{secrets.token_hex(4)}",
            order,
            self.cloud.now(),
            float(order.spot.get("MaxPrice") or usual),
            until.timestamp() if until else None,
            fleet_id=fleet_id,
        )
        state.requests[request.id] = request
        backend = self.cloud.backend(state.name)
        backend.tags[request.id].update(order.tags.get("spot-instances-request", {}))
        if request.valid_until:
            self.cloud.later(request.valid_until, lambda: self._expire(state, request))
        return request

    def born(
        self,
        state: RegionState,
        order: Order,
        index: int,
        reservation: str,
        fleet_id: str,
        request: SpotRequest | None,
        tagged: bool = True,
    ) -> Machine:
        cloud, now = self.cloud, self.cloud.now()
        backend = cloud.backend(state.name)
        machine = Machine(new_id("i"), backend, order, now)
        machine.reservation_id, machine.launch_index, machine.fleet_id, machine.request = (
            reservation,
            index,
            fleet_id,
            request,
        )
        machine.password = secrets.token_hex(10)
        state.machines[machine.id] = machine
        cloud.show_to_moto(machine)
        mine = dict(order.tags.get("instance", {})) if tagged else {}
        if order.template:
            mine |= {"aws:ec2launchtemplate:id": order.template[0], "aws:ec2launchtemplate:version": order.template[1]}
        if fleet_id:
            mine["aws:ec2:fleet-id"] = fleet_id
        backend.tags[machine.id].update(mine)
        birth.connect(self.cloud, state, machine)
        birth.disks(self.cloud, machine)
        cloud.market.take(machine)
        if request:
            request.become(now, "active", "fulfilled", "Your Spot request is fulfilled.", machine.id)
        self.boot(machine)
        if not keys.may_use(cloud, state.name, order):
            self.terminate(machine, keys.REFUSED, "")
        return machine

    # ---- states

    def said(self, by: str, now: float) -> str:
        return f"{by} ({iso(now).replace('T', ' ').replace('Z', ' GMT')})"

    def changed(self, machine: Machine, name: str) -> None:
        self.cloud.bus.state_changed(machine, name)

    def has_stopped(self, machine: Machine) -> None:
        for eni in machine.nics.values():
            eni.stop()
        machine.rebalance_at = None

    def terminating(self, machine: Machine, by: str) -> None:
        if machine.request:
            self._terminated_request(machine, machine.request, by)

    def has_ended(self, machine: Machine) -> None:
        machine.had = dict(machine.nics), dict(machine.block_device_mapping)
        for eni in list(machine.nics.values()):
            birth.unplug(machine, eni)
        machine.nics = {}
        birth.discard_disks(machine)

    def start(self, machine: Machine) -> None:
        """A stopped one again, if there is room."""
        cloud = self.cloud
        state = cloud.regions[region_of(machine.order.zone)]
        request = machine.request
        cloud.market.within_quota(state, machine.order.type, machine.market, 1, [request.id] if request else ())
        if not cloud.market.holds(machine.pool):
            raise AwsError(
                "InsufficientInstanceCapacity", NO_ROOM.format(kind=machine.order.type, zone=machine.order.zone)
            )
        cloud.market.take(machine)
        for eni in machine.nics.values():
            eni.start()
        self.become(machine, "pending")
        if request:
            request.become(cloud.now(), "active", "fulfilled", "Your Spot request is fulfilled.", machine.id)
        self.boot(machine)

    # ---- spot requests

    def _terminated_request(self, machine: Machine, request: SpotRequest, by: str) -> None:
        now = self.cloud.now()
        if request.state not in ("active", "disabled") or request.instance_id != machine.id:
            return
        if request.persistent:
            request.become(
                now,
                "open",
                "pending-evaluation",
                "Your Spot request has been submitted for review, and is pending evaluation.",
                "",
            )
            request.looks_at = now + self.cloud.retry_s
        else:
            request.become(
                now,
                "closed",
                "instance-terminated-by-user",
                "Spot Instance terminated due to user-initiated termination.",
            )

    def cancel(self, request: SpotRequest) -> None:
        now = self.cloud.now()
        if request.state in ("cancelled", "closed", "failed"):
            return
        machine = self.cloud.find(request.instance_id)
        if machine is None or not machine.living:
            request.become(
                now,
                "cancelled",
                "canceled-before-fulfillment",
                "Your Spot request is canceled before it was fulfilled.",
            )
        elif machine.state in ("stopped", "stopping"):
            request.become(
                now,
                "cancelled",
                "instance-terminated-by-user"
                if machine.state == "stopped"
                else "request-canceled-and-instance-running",
            )
            self.terminate(machine, USER, "User initiated")
        else:
            request.become(
                now,
                "cancelled",
                "request-canceled-and-instance-running",
                "Your Spot request is canceled, but your instance is still running.",
            )

    def _expire(self, state: RegionState, request: SpotRequest) -> None:
        """Nobody says what becomes of a stopped instance: it stays."""
        if request.live and request.id in state.requests:
            request.become(self.cloud.now(), "cancelled", "schedule-expired", "The request's ValidUntil has passed.")

    def interrupt(self, machine: Machine, notice_s: float | None, room: int | None) -> None:
        """EC2 wants the place back, after `notice_s`; None: without a notice."""
        cloud, now = self.cloud, self.cloud.now()
        request = machine.request
        if request is None or machine.state not in ("pending", "running"):
            raise AssertionError(f"{machine.id} is no running spot instance")
        stops = machine.order.behavior == "stop" and request.live
        if stops:
            request.become(now, "active", "marked-for-stop", "Your Spot Instance is marked for stopping.")
        elif request.live and request.persistent:
            request.become(now, "open", "instance-terminated-no-capacity")
            request.looks_at = now + (notice_s or 0.0)
        elif request.live:
            request.become(
                now,
                "closed",
                "instance-terminated-no-capacity",
                "There is not enough Spot capacity available for your instance.",
            )
        self.reclaim(machine, notice_s, room, "stop" if stops else "terminate", lambda: self._taken(machine, stops),
                     lambda: cloud.bus.warned(machine))

    def _taken(self, machine: Machine, stops: bool) -> None:
        request = machine.request
        assert request is not None
        if not stops or not request.live:  # cancelled since: nothing to come back to
            self.terminate(machine, SPOT_END, "Server.SpotInstanceTermination")
            return

        def stopped() -> None:
            if request.live:
                request.become(
                    self.cloud.now(),
                    "disabled",
                    "instance-stopped-no-capacity",
                    "Your Spot Instance was stopped because there was no Spot capacity.",
                )
                request.looks_at = self.cloud.now() + self.cloud.retry_s

        self.stop(machine, SPOT_STOP, "Server.SpotInstanceShutdown", stopped)

    def stop_by_user(self, machine: Machine, reason: tuple[str, str] = USER) -> None:
        request = machine.request
        if request and not request.persistent:
            raise AwsError(
                "UnsupportedOperation",
                f"You can't stop the Spot Instance '{machine.id}' because it is associated "
                "with a one-time Spot Instance request. You can only stop Spot Instances associated with persistent "
                "Spot Instance requests.",
            )

        def stopped() -> None:
            if request and request.live:
                request.become(
                    self.cloud.now(),
                    "disabled",
                    "instance-stopped-by-user",
                    "The Spot Instance was stopped by the user.",
                )
            elif request:  # cancelled while it ran: it cannot be started again
                self.terminate(machine, reason, "User initiated")

        self.stop(machine, reason, "User initiated", stopped)

    def start_by_user(self, machine: Machine) -> None:
        if machine.state in ("running", "pending"):
            return
        if machine.state != "stopped":
            raise AwsError(
                "IncorrectInstanceState", f"The instance '{machine.id}' is not in a state from which it can be started."
            )
        request = machine.request
        if request and request.now.code != "instance-stopped-by-user":
            raise AwsError(
                "IncorrectSpotRequestState",
                f"The Spot Instance request is not in a state from which the instance '{machine.id}' can be started.",
            )
        self.start(machine)

    def guest_shutdown(self, machine: Machine) -> None:
        """As the guest's `shutdown -h`: of a one-time spot instance that may only be stopped, EC2 learns nothing."""
        if machine.state != "running":
            return
        if machine.order.shutdown == "terminate":
            self.terminate(machine, GUEST, "User initiated")
        elif not machine.request or machine.request.persistent:
            self.stop_by_user(machine, GUEST)
        else:
            self.cloud.order_runner("stop", machine)
