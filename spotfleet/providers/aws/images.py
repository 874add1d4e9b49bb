"""Choice of a machine's image: the user's, the one in an SSM parameter of AWS or Ubuntu, or one of
`spotfleet image build`; list and removal of the latter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Offer, Role
from spotfleet.providers import MachineImage
from spotfleet.providers.aws.mapping import errors
from spotfleet.providers.aws.session import Account
from spotfleet.providers.kit import images as kit

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
DEEP_LEARNING = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
BASES = {  # kind of an image of ours -> name and owner of the image that it is built on: what the parameters name
    kit.GPU: ("Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *", "amazon"),
    kit.CPU: ("ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-*", "099720109477"),
}
LATEST_S = 3600.0  # a new image appears every few weeks; hosts launched within an hour should be alike
FACTS_S = 24 * 3600.0
GONE = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidSnapshot.NotFound")


@dataclass(frozen=True)
class Image:
    id: str
    root_device: str
    disk_gib: int  # minimum size of the root volume


def wanted(account: Account, role: Role, offer: Offer) -> str:
    """Return "ami-...", the name of an SSM parameter, or OURS and a kind."""
    spec = account.settings.spec
    if role is Role.DISPATCHER:
        return _of_kind(spec.dispatcher_image, False) or UBUNTU
    return _of_kind(spec.image, bool(offer.accelerator)) or (DEEP_LEARNING if offer.accelerator else UBUNTU)


def _of_kind(name: str, gpus: bool) -> str:
    return f"{kit.OURS}-{kit.kind(gpus)}" if name == kit.OURS else name


def image(account: Account, region: str, name: str) -> Image:
    """Return the image's facts. Raises NeedsPerson if it is missing, or has no root volume on EBS."""
    if name.startswith("ami-"):
        return _facts(account, region, name, name)
    if name.startswith(kit.OURS):
        return _facts(account, region, ours(account, region, name.partition("-")[2] or kit.GPU).id, name)
    return _facts(account, region, _parameter(account, region, name), name)


def ours(account: Account, region: str, kind: str) -> MachineImage:
    """Return the newest image of this kind that `spotfleet image build` made here. Raises NeedsPerson without one."""
    return account.cached(("our images", region, kind), LATEST_S,
                          lambda: kit.newest(_listed(account, region), kind, "aws", region))


def listed(account: Account) -> list[MachineImage]:
    """List these images of all regions of the configuration, newest first."""
    found = [image for region in account.regions for image in _listed(account, region)]
    return sorted(found, key=lambda image: -image.since)


def _listed(account: Account, region: str) -> Iterator[MachineImage]:
    found = account.client("ec2", region).describe_images(Owners=["self"], Filters=[
        {"Name": "tag-key", "Values": [kit.KIND]}, {"Name": "state", "Values": ["available"]}])
    for image in found.get("Images") or ():
        tags = {t["Key"]: t["Value"] for t in image.get("Tags") or ()}
        yield MachineImage(image["ImageId"], image.get("Name", ""), region, tags.get(kit.KIND, ""),
                           tags.get(kit.RECIPE, ""), tags.get(kit.VERSION, ""),
                           datetime.fromisoformat(image["CreationDate"]).timestamp(),
                           max((d["Ebs"].get("VolumeSize", 0) for d in _disks(image)), default=0))


def _disks(image: dict[str, Any]) -> list[dict[str, Any]]:
    return [d for d in image.get("BlockDeviceMappings") or () if "Ebs" in d]


def delete(account: Account, image: MachineImage) -> None:
    """Remove the image, and then its snapshots, which EC2 keeps while an image has them."""
    ec2 = account.client("ec2", image.region)
    try:
        found = ec2.describe_images(ImageIds=[image.id]).get("Images") or []
        ec2.deregister_image(ImageId=image.id)
        for snapshot in [d["Ebs"].get("SnapshotId") for i in found for d in _disks(i)]:
            if snapshot:
                ec2.delete_snapshot(SnapshotId=snapshot)
    except SpotfleetError as error:
        if errors.code(error) not in GONE:
            raise


def report(account: Account, progress: Callable[[str], None]) -> None:
    """Report those of our images that the fleet would use and that are outdated."""
    spec = account.settings.spec
    for region in account.regions if kit.OURS in (spec.image, spec.dispatcher_image) else ():
        for remark in kit.remarks(_listed(account, region)):
            progress(f"aws {region}: {remark}")


def _parameter(account: Account, region: str, name: str) -> str:
    def ask() -> str:
        return account.client("ssm", region).get_parameter(Name=name)["Parameter"]["Value"]

    return account.cached(("image", region, name), LATEST_S, ask)


def _facts(account: Account, region: str, ami: str, name: str) -> Image:
    def ask() -> Image:
        found = account.client("ec2", region).describe_images(ImageIds=[ami]).get("Images") or []
        if not found:
            raise NeedsPerson(f"aws {region}: image {ami} is not there, or not shared with this account",
                              hint="name another under `aws.image`, or copy it to this region")
        root = found[0].get("RootDeviceName") or ""
        disks = {m.get("DeviceName"): m["Ebs"] for m in found[0].get("BlockDeviceMappings") or () if "Ebs" in m}
        if found[0].get("RootDeviceType", "ebs") != "ebs" or not root:
            raise NeedsPerson(f"aws {region}: image {ami} has no root volume on EBS",
                              hint=f"name another than {name} under `aws.image`")
        return Image(ami, root, int(disks.get(root, {}).get("VolumeSize") or 0))

    return account.cached(("image facts", region, ami), FACTS_S, ask)
