"""The fault behind a CUDA error: the user's kernel, or a device that is lost. Pure.

After most of these errors the process cannot use the device any more. An error that a script alone can cause counts as
the user's: the script would otherwise restart for ever. All others (ECC, the bus, an unspecified launch failure) are
the device's, and its host gets the blame.

torch gives the number since 2.10; before, the first line of the text decides. The further lines are the same in each
text, and mention assertions.
"""

from __future__ import annotations

USERS = {  # cudaError_t, and how the driver describes it
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",  # in a forked process
    9: "invalid configuration argument",
    98: "invalid device function",
    101: "invalid device ordinal",
    209: "no kernel image is available",
    400: "invalid resource handle",
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


def is_lost(error: BaseException) -> bool:
    """Return whether the error shows a lost device."""
    return is_of_device(error) and not is_users(error)
