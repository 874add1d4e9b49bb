"""The fault behind a CUDA error: the user's kernel, or a device that is lost. Pure.

After each of these errors the process cannot use the device any more. An error that a kernel alone can cause counts as
the user's: its script would otherwise restart for ever. All others (ECC, the bus, an unspecified launch failure) are
the device's.

torch gives the number since 2.10; before, the first line of the text decides. The further lines are the same in each
text, and mention assertions.
"""

from __future__ import annotations

USERS = {  # cudaError_t, and how the driver describes it
    1: "invalid argument",
    2: "out of memory",
    9: "invalid configuration argument",
    98: "invalid device function",
    209: "no kernel image is available",
    700: "an illegal memory access was encountered",
    701: "too many resources requested for launch",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
}


def is_of_device(error: BaseException) -> bool:
    """Return whether a device reported the error, the user's kernel or not."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def is_users(error: BaseException) -> bool:
    """Return whether a CUDA error is the fault of a kernel of the user."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return code in USERS
    first = str(error).partition("\n")[0]
    return any(text in first for text in USERS.values())
