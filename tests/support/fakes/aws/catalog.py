"""What this cloud sells: regions, zones, instance types, images, and their prices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

ACCOUNT = "123456789012"
REGIONS = {"us-east-1": "use1", "us-west-2": "usw2", "eu-west-1": "euw1"}  # name -> beginning of its zones' ids
NOT_OPTED_IN = ("me-south-1",)
ZONES = "abc"
DEARER = {"us-east-1": 1.0, "us-west-2": 1.0, "eu-west-1": 1.12}  # on-demand prices against us-east-1
SPOT_SHARE = {"a": 0.35, "b": 0.31, "c": 0.40}  # share of the on-demand price, at first
UBUNTU = "ami-0aaaaaaaaaaaa2404"
DEEP_LEARNING = "ami-0bbbbbbbbbbbb2404"
PYTORCH = "ami-0dddddddddddd2404"
AMAZON_LINUX = "ami-0cccccccccccc2023"
PARAMETERS = {
    "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id": UBUNTU,
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id": DEEP_LEARNING,
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id": DEEP_LEARNING,
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id": PYTORCH,
    "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64": AMAZON_LINUX,
}
FAMILIES = ("G", "P", "P5", "Standard")
QUOTAS = {  # (family, market) -> code, name
    ("G", "spot"): ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    ("P", "spot"): ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    ("P5", "spot"): ("L-C4BD4855", "All P5 Spot Instance Requests"),
    ("Standard", "spot"): ("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
    ("G", "on-demand"): ("L-DB2E81BA", "Running On-Demand G and VT instances"),
    ("P", "on-demand"): ("L-417A185B", "Running On-Demand P instances"),
    ("Standard", "on-demand"): ("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
}
ENDLESS_QUOTA = 100000


@dataclass(frozen=True)
class Type:
    name: str
    usd: float  # on demand, per hour, in us-east-1
    zones: str = ZONES  # where it is sold, in every region
    regions: tuple[str, ...] = tuple(REGIONS)

    @property
    def family(self) -> str:
        begin = self.name.partition(".")[0]
        if begin.startswith("p5"):
            return "P5"
        if begin.startswith("gr") or (begin[0] in "gp" and begin[1].isdigit()):
            return begin[0].upper()
        return "Standard"

    @property
    def facts(self) -> dict[str, Any]:
        """As describe_instance_types has it."""
        return _facts(self.name)

    @property
    def vcpus(self) -> int:
        return self.facts["VCpuInfo"]["DefaultVCpus"]

    @property
    def architecture(self) -> str:
        return self.facts["ProcessorInfo"]["SupportedArchitectures"][-1]


TYPES = {
    t.name: t
    for t in (
        Type("t3.micro", 0.0104),
        Type("t3.small", 0.0208),
        Type("t3.medium", 0.0416),
        Type("t3a.small", 0.0188),
        Type("t3a.medium", 0.0376),
        Type("t4g.small", 0.0168),
        Type("m5.large", 0.096),
        Type("m5.xlarge", 0.192),
        Type("m6i.large", 0.096),
        Type("m7i.large", 0.1008),
        Type("c5.large", 0.085),
        Type("c5.2xlarge", 0.34),
        Type("c5n.18xlarge", 3.888),
        Type("g4dn.xlarge", 0.526),
        Type("g4dn.12xlarge", 3.912),
        Type("g5.xlarge", 1.006),
        Type("g5.2xlarge", 1.212),
        Type("g5.12xlarge", 5.672),
        Type("g5.48xlarge", 16.288),
        Type("g6.xlarge", 0.8048, "bc"),
        Type("p3.2xlarge", 3.06),
        Type("g4ad.xlarge", 0.37853, "a"),
        Type("g6f.large", 0.202, "b"),
        Type("gr6.4xlarge", 1.5392, "bc"),
        Type("p4d.24xlarge", 32.7726, "ab", ("us-east-1", "us-west-2")),
        Type("p5.48xlarge", 98.32, "a", ("us-east-1",)),
        Type("p6-b300.48xlarge", 142.42, "b", ("us-west-2",)),
    )
}


@dataclass(frozen=True)
class Image:
    id: str
    name: str
    owner: str = "amazon"
    architecture: str = "x86_64"
    root: str = "/dev/sda1"
    size_gib: int = 8
    made: str = "2026-11-01T00:00:00.000Z"
    tags: tuple[tuple[str, str], ...] = ()


IMAGES = {
    i.id: i
    for i in (
        Image(UBUNTU, "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20261101"),
        Image(DEEP_LEARNING, "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261106", size_gib=50),
        Image(PYTORCH, "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20261106", size_gib=75),
        Image(AMAZON_LINUX, "al2023-ami-2023.9.20261101.0-kernel-6.1-x86_64", root="/dev/xvda"),
    )
}


OLDER = {  # type that moto does not know -> one of the same size, and its GPU: maker, name, MiB
    "p3.2xlarge": ("g4dn.2xlarge", "NVIDIA", "V100", 16384),
    "g4ad.xlarge": ("g4dn.xlarge", "AMD", "Radeon Pro V520", 8192),
}


@cache
def _facts(name: str) -> dict[str, Any]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    if name not in OLDER:
        return dict(INSTANCE_TYPES[name])
    like, maker, gpu, mib = OLDER[name]
    device = {"Name": gpu, "Manufacturer": maker, "Count": 1, "MemoryInfo": {"SizeInMiB": mib}}
    return {
        **INSTANCE_TYPES[like],
        "InstanceType": name,
        "GpuInfo": {"Gpus": [device], "TotalGpuMemoryInMiB": mib},
    }


def zones(region: str) -> list[str]:
    return [region + z for z in ZONES]


def region_of(zone: str) -> str:
    return zone[:-1]


def zone_id(zone: str) -> str:
    return f"{REGIONS[region_of(zone)]}-az{ZONES.index(zone[-1]) + 1}"


def sold(name: str, zone: str) -> bool:
    kind = TYPES.get(name)
    return kind is not None and region_of(zone) in kind.regions and zone[-1] in kind.zones


def on_demand_usd(name: str, region: str) -> float:
    return round(TYPES[name].usd * DEARER[region], 4)
