"""Choice of a machine's image: the user's, or the one in an SSM parameter of AWS or Ubuntu."""

from __future__ import annotations

from dataclasses import dataclass

from spotfleet.errors import NeedsPerson
from spotfleet.model import Offer, Role
from spotfleet.providers.aws.session import Account

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
DEEP_LEARNING = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
LATEST_S = 3600.0  # a new image appears every few weeks; hosts launched within an hour should be alike
FACTS_S = 24 * 3600.0


@dataclass(frozen=True)
class Image:
    id: str
    root_device: str
    disk_gib: int  # minimum size of the root volume


def wanted(account: Account, role: Role, offer: Offer) -> str:
    """Return "ami-..." or the name of an SSM parameter."""
    spec = account.settings.spec
    if role is Role.DISPATCHER:
        return spec.dispatcher_image or UBUNTU
    return spec.image or (DEEP_LEARNING if offer.accelerator else UBUNTU)


def image(account: Account, region: str, name: str) -> Image:
    """Return the image's facts. Raises NeedsPerson if it is missing, or has no root volume on EBS."""
    return _facts(account, region, name if name.startswith("ami-") else _parameter(account, region, name), name)


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
