"""What this Google Cloud has: regions, zones, machine types, accelerators, disks, images and prices.

Names, sizes and numbers of GPUs are those of the documentation ("GPU machine types", "General-purpose machine family");
prices are near the public ones and no more. Not every zone has every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

PROJECT, NUMBER = "acme-training", "123456789012"
REGIONS = {
    "us-central1": ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f"),
    "us-east4": ("us-east4-a", "us-east4-b", "us-east4-c"),
    "europe-west4": ("europe-west4-a", "europe-west4-b", "europe-west4-c"),
}
ZONES = {zone: region for region, zones in REGIONS.items() for zone in zones}
GIB = 1024


@dataclass(frozen=True)
class Accelerator:
    name: str
    text: str
    metric: str  # its quota
    counts: tuple[int, ...]  # that an N1 machine may have; () for GPUs that come with a machine type
    spot_usd: float
    usd: float
    zones: tuple[str, ...]
    sku: str  # in the price list
    listed: bool = True  # among the quotas of `regions.get`


T4, L4, V100 = "nvidia-tesla-t4", "nvidia-l4", "nvidia-tesla-v100"
A100, A100_80, H100 = "nvidia-tesla-a100", "nvidia-a100-80gb", "nvidia-h100-80gb"
H100_MEGA, H200, B200 = "nvidia-h100-mega-80gb", "nvidia-h200-141gb", "nvidia-b200"
ACCELERATORS = {a.name: a for a in (
    Accelerator(T4, "NVIDIA T4", "NVIDIA_T4_GPUS", (1, 2, 4), 0.119, 0.35,
                ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "us-east4-a", "us-east4-b",
                 "us-east4-c", "europe-west4-a", "europe-west4-b", "europe-west4-c"), "Nvidia Tesla T4"),
    Accelerator(V100, "NVIDIA V100", "NVIDIA_V100_GPUS", (1, 2, 4, 8), 0.74, 2.48,
                ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "europe-west4-a",
                 "europe-west4-b", "europe-west4-c"), "Nvidia Tesla V100"),
    Accelerator(L4, "NVIDIA L4", "NVIDIA_L4_GPUS", (), 0.168, 0.56,
                ("us-central1-a", "us-central1-b", "us-central1-c", "us-east4-a", "us-east4-c", "europe-west4-a",
                 "europe-west4-b", "europe-west4-c"), "Nvidia L4"),
    Accelerator(A100, "NVIDIA A100 40GB", "NVIDIA_A100_GPUS", (), 0.88, 2.93,
                ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f", "europe-west4-a",
                 "europe-west4-b"), "Nvidia Tesla A100"),
    Accelerator(A100_80, "NVIDIA A100 80GB", "NVIDIA_A100_80GB_GPUS", (), 1.18, 3.93,
                ("us-central1-a", "us-central1-c", "us-east4-c", "europe-west4-a"), "Nvidia Tesla A100 80GB"),
    Accelerator(H100, "NVIDIA H100 80GB", "NVIDIA_H100_GPUS", (), 2.25, 9.80,
                ("us-central1-a", "us-central1-b", "us-central1-c", "us-east4-a", "us-east4-b", "europe-west4-b",
                 "europe-west4-c"), "Nvidia H100 80GB", listed=False),
    Accelerator(H100_MEGA, "NVIDIA H100 80GB MEGA", "NVIDIA_H100_MEGA_GPUS", (), 2.40, 10.20,
                ("us-central1-a", "us-central1-b", "us-central1-c", "us-east4-b", "europe-west4-b"),
                "Nvidia H100 80GB Plus", listed=False),
    Accelerator(H200, "NVIDIA H200 141GB", "NVIDIA_H200_GPUS", (), 3.70, 10.60, ("us-central1-b", "us-east4-b"),
                "H200 141GB", listed=False),
    Accelerator(B200, "NVIDIA B200", "NVIDIA_B200_GPUS", (), 8.00, 16.00, ("us-central1-b",), "B200", listed=False),
)}  # fmt: skip


@dataclass(frozen=True)
class Type:
    name: str
    cpus: int
    memory_mb: int
    accelerator: str = ""  # that comes with it
    gpus: int = 0
    ssds: tuple[int, ...] = ()  # numbers of local SSDs that it may have
    bundled_ssds: int = 0  # that it always has
    shared: bool = False
    attaches_gpus: bool = False

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]

    @property
    def optimized(self) -> bool:
        """Its GPUs come with it."""
        return bool(self.accelerator)


N1_SSDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 24)
N2_SSDS = {2: (0, 1, 2, 4, 8, 16, 24), 16: (0, 2, 4, 8, 16, 24), 32: (0, 4, 8, 16, 24), 64: (0, 8, 16, 24)}


def _types() -> list[Type]:
    found = [Type("e2-micro", 2, GIB, shared=True), Type("e2-small", 2, 2 * GIB, shared=True),
             Type("e2-medium", 2, 4 * GIB, shared=True)]
    found += [Type(f"e2-standard-{n}", n, 4 * n * GIB) for n in (2, 4, 8, 16, 32)]
    found += [Type(f"n2-standard-{n}", n, 4 * n * GIB, ssds=N2_SSDS[max(k for k in N2_SSDS if k <= n)])
              for n in (2, 4, 8, 16, 32, 64)]
    for n in (1, 2, 4, 8, 16, 32, 64, 96):
        found += [Type(f"n1-standard-{n}", n, 3840 * n, ssds=N1_SSDS, attaches_gpus=True)]
        found += [Type(f"n1-highmem-{n}", n, 6656 * n, ssds=N1_SSDS, attaches_gpus=True)] if n > 1 else []
    for cpus, gpus, ssds in ((4, 1, 1), (8, 1, 1), (12, 1, 1), (16, 1, 1), (24, 2, 2), (32, 1, 1), (48, 4, 4),
                             (96, 8, 8)):
        found.append(Type(f"g2-standard-{cpus}", cpus, 4 * cpus * GIB, L4, gpus, (0, ssds)))
    for gpus, cpus, ssds in ((1, 12, (0, 1, 2, 4, 8)), (2, 24, (0, 2, 4, 8)), (4, 48, (0, 4, 8)), (8, 96, (0, 8))):
        found.append(Type(f"a2-highgpu-{gpus}g", cpus, 85 * gpus * GIB, A100, gpus, ssds))
        found.append(Type(f"a2-ultragpu-{gpus}g", cpus, 170 * gpus * GIB, A100_80, gpus, (gpus,), gpus))
    for gpus, cpus in ((1, 26), (2, 52), (4, 104), (8, 208)):
        found.append(Type(f"a3-highgpu-{gpus}g", cpus, 234 * gpus * GIB, H100, gpus, (2 * gpus,), 2 * gpus))
    found.append(Type("a3-megagpu-8g", 208, 1872 * GIB, H100_MEGA, 8, (16,), 16))
    found.append(Type("a3-ultragpu-8g", 224, 2952 * GIB, H200, 8, (32,), 32))
    found.append(Type("a4-highgpu-8g", 224, 3968 * GIB, B200, 8, (32,), 32))
    return found


TYPES = {t.name: t for t in _types()}
# per core and per GiB, in dollars an hour: (on demand, spot)
PARTS = {"e2": ((0.02181159, 0.00292353), (0.00654, 0.00088)), "n1": ((0.031611, 0.004237), (0.0095, 0.00127)),
         "n2": ((0.031611, 0.004237), (0.0076, 0.00102)), "g2": ((0.024988, 0.002927), (0.0099, 0.00116)),
         "a2": ((0.031611, 0.004237), (0.0126, 0.0017)), "a3": ((0.02933, 0.00255), (0.0117, 0.001)),
         "a4": ((0.03, 0.003), (0.012, 0.0012))}  # fmt: skip
SHARED = {"e2-micro": 0.25, "e2-small": 0.5, "e2-medium": 1.0}  # cores that are billed
# N1 with GPUs: the most vCPUs by number of cards
N1_MOST_CPUS = {T4: {1: 48, 2: 48, 4: 96}, V100: {1: 12, 2: 24, 4: 48, 8: 96}}
LOCAL_SSD_GB = 375
DISK_USD_GB_MONTH = {"pd-standard": 0.04, "pd-balanced": 0.10, "pd-ssd": 0.17, "local-ssd": 0.08,
                     "hyperdisk-balanced": 0.08, "pd-extreme": 0.125}  # fmt: skip
HYPERDISK_ONLY = ("a4",)  # families that boot from Hyperdisk alone


def in_zone(kind: Type, zone: str) -> bool:
    return not kind.accelerator or zone in ACCELERATORS[kind.accelerator].zones


def usd_h(kind: str, spot: bool, accelerator: str = "", gpus: int = 0, region: str = "us-central1") -> float:
    """Dollars per hour of a machine without its disks; Europe costs a tenth more."""
    found = TYPES[kind]
    core, gib = PARTS[found.family][spot]
    cards = (found.accelerator, found.gpus) if found.accelerator else (accelerator, gpus)
    per_gpu = (ACCELERATORS[cards[0]].spot_usd if spot else ACCELERATORS[cards[0]].usd) if cards[0] else 0.0
    total = core * SHARED.get(kind, found.cpus) + gib * found.memory_mb / GIB + per_gpu * cards[1]
    return round(total * (1.1 if region.startswith("europe") else 1.0), 6)


@dataclass(frozen=True)
class Image:
    project: str
    name: str
    family: str
    size_gb: int
    driver: bool  # has the NVIDIA driver
    architecture: str = "X86_64"
    user: str = "ubuntu"
    labels: tuple[tuple[str, str], ...] = ()
    made: str = "2026-11-01T00:00:00.000-07:00"


IMAGES = (
    Image("ubuntu-os-cloud", "ubuntu-2204-jammy-v20261101", "ubuntu-2204-lts", 10, False),
    Image("ubuntu-os-cloud", "ubuntu-2404-noble-amd64-v20261101", "ubuntu-2404-lts-amd64", 10, False),
    Image("ubuntu-os-cloud", "ubuntu-2404-noble-arm64-v20261101", "ubuntu-2404-lts-arm64", 10, False, "ARM64"),
    Image("debian-cloud", "debian-12-bookworm-v20261101", "debian-12", 10, False),
    Image("ubuntu-os-accelerator-images", "ubuntu-accelerator-2404-amd64-with-nvidia-580-v20261101",
          "ubuntu-accelerator-2404-amd64-with-nvidia-580", 20, True),
    Image("deeplearning-platform-release", "common-cu129-ubuntu-2204-nvidia-580-v20261101",
          "common-cu129-ubuntu-2204-nvidia-580", 50, True),
    Image("deeplearning-platform-release", "common-cu129-ubuntu-2404-nvidia-580-v20261101",
          "common-cu129-ubuntu-2404-nvidia-580", 50, True),
    Image("deeplearning-platform-release", "pytorch-2-9-cu129-ubuntu-2404-nvidia-580-v20261101",
          "pytorch-2-9-cu129-ubuntu-2404-nvidia-580", 100, True),
)
SERVICES = ("compute.googleapis.com", "serviceusage.googleapis.com", "cloudresourcemanager.googleapis.com",
            "iam.googleapis.com", "storage.googleapis.com", "cloudbilling.googleapis.com", "cloudquotas.googleapis.com")
