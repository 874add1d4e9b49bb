"""A client of the bootstrap store in the form that torch accepts: process groups need a `dist.Store`."""

from __future__ import annotations

import torch.distributed as dist

from spotfleet.worker.store import StoreClient


class TorchStore(StoreClient, dist.Store):  # type: ignore[misc]  # torch's stub has no constructor
    """`StoreClient` for torch, whose C++ code calls `set`, `get` and `wait`."""
