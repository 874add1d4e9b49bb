"""Part `surface`: the card, torch and NCCL as they are, and each name of torch that train/comm/nccl.py uses.

Beyond names: forming, aborting and memory at world size 1 (alone.py), CUDA in a forked process, bandwidth of copies.
"""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spotfleet.train.comm import nccl
from spotfleet.train.comm.nccl_environment import untested

Row = dict[str, Any]
# Names in nccl.py whose attributes are torch's, and the classes or modules that must have them.
OWNERS = {"dist": "torch.distributed", "comm": "ProcessGroupNCCL", "made": "ProcessGroup",
          "options": "ProcessGroupNCCL.Options", "self._comm": "ProcessGroupNCCL"}
FORKED = '''
import os, sys, torch, torch._dynamo
import spotfleet.train.elastic, spotfleet.train.checkpoint.writer
pid = os.fork()
if pid == 0:
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
        os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
'''


def used() -> set[tuple[str, str]]:
    """Return (owner, attribute) for all of torch's process-group API that nccl.py names."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(Path(nccl.__file__).read_text())):
        if isinstance(node, ast.Attribute) and (owner := OWNERS.get(ast.unparse(node.value))):
            found.add((owner, node.attr))
    return found


def missing() -> list[str]:
    """Return the names that this torch lacks. A CUDA build without a device has them all, a CPU build does not."""
    absent = []
    for owner, name in sorted(used()):
        place: Any = dist
        for part in owner.split(".") if owner != "torch.distributed" else []:
            place = getattr(place, part, None)
        if place is not None and owner.endswith("Options"):
            place = place()  # its fields belong to an instance
        if place is None or not hasattr(place, name):
            absent.append(f"{owner}.{name}")
    return absent


def has_nccl() -> bool:
    return dist.is_nccl_available() and hasattr(dist, "ProcessGroupNCCL")


def versions(device: str) -> Row:
    row: Row = {"row": "versions", "ok": True, "python": platform.python_version(), "torch": torch.__version__,
                "cores": os.cpu_count(), "remark": untested(torch.__version__)}
    if device == "cuda":
        smi = subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_mode",
                              "--format=csv,noheader"], capture_output=True, text=True, check=False)
        row |= {"card": torch.cuda.get_device_name(), "cards": torch.cuda.device_count(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())), "nvidia_smi": smi.stdout.strip()}
    return row


def names() -> Row:
    if not has_nccl():
        return {"row": "names", "ok": True, "skipped": "this build of torch has no NCCL"}
    absent = missing()
    return {"row": "names", "ok": not absent, "missing": absent, "checked": len(used())}


def forked() -> Row:
    """Report whether CUDA works in a process that was forked after the imports of the agent's zygote."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100, check=False)
    return {"row": "forked", "ok": done.returncode == 0, "why": (done.stdout + done.stderr)[-300:]}


def copies(device: str, short: bool) -> Row:
    """Measure GB/s of copies between host and device, and on the device."""
    size = (1 << 20) if short else (1 << 28)
    host = torch.ones(size, dtype=torch.uint8)
    kinds = {"host to host": (host, host.clone())}
    if device == "cuda":
        there, pinned = torch.empty_like(host, device=device), host.clone().pin_memory()
        kinds |= {"host to device": (host, there), "pinned to device": (pinned, there),
                  "device to pinned": (there, pinned), "device to device": (there, there.clone())}
    row: Row = {"row": "copies", "ok": True, "mib": size >> 20}
    for name, (source, target) in kinds.items():
        best = 0.0
        for _ in range(5):
            began = time.perf_counter()
            target.copy_(source)
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, size / (time.perf_counter() - began) / 1e9)
        row[name] = round(best, 2)
    return row


def part(device: str, short: bool, folder: Path) -> Iterator[Row]:
    yield versions(device)
    yield names()
    yield copies(device, short)
    if device == "cpu":
        return
    yield forked()
    import alone  # it needs a CUDA device

    found = alone.reform(Namespace(times=5 if short else 30))
    yield {"row": "reform", "ok": found["lost_mib"] < 64, **found}
    found = alone.spin(Namespace())
    yield {"row": "spin", "ok": found["wait_failed"] and found["works_after"] and found["abort_call_ms"] < 100, **found}
