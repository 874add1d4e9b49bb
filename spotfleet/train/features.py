"""Features of this build under Horovod's names, which scripts ask before they choose an option."""

from __future__ import annotations

import torch
import torch.distributed as dist


def mpi_built() -> bool:
    return False


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    return False


def gloo_built() -> bool:
    return dist.is_gloo_available()


def gloo_enabled() -> bool:
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return the version as Horovod does, 22907 for 2.29.7; 0 without NCCL."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return major * 10000 + minor * 100 + patch


def nccl_version() -> str:
    """Return the version of the NCCL that is loaded, "2.29.7"; "" for a torch without it. Needs no GPU."""
    return ".".join(map(str, torch.cuda.nccl.version()[:3])) if dist.is_nccl_available() else ""


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None
