"""Errors that training code may catch. They are raised inside the user's function and handled by `elastic.run`.

The first two are no Exceptions, as KeyboardInterrupt is none: `except RuntimeError` around a batch, which skips one
that does not fit, must not catch a change of membership. They are no SpotfleetErrors: they never reach the CLI.
"""

from __future__ import annotations


class CommBroken(BaseException):
    """Failure of a collective because a peer was lost or this worker was fenced; its tensors are whole."""

    blame_peer = True


class MembershipChanged(BaseException):
    """Agreement of all ranks to leave this generation at this point; no applied step will be repeated."""

    blame_peer = True


class StateLost(RuntimeError):
    """Loss of the training state: no member of the generation holds a whole copy, and there is no checkpoint."""

    blame_peer = True


class PlaceDiffers(RuntimeError):
    """End of a joiner whose script has read another rank or size, before it trained, than the worker would have."""

    blame_peer = True


class StateDiverged(StateLost):
    """Difference between ranks that should hold equal states: none of them is trained on."""


HorovodInternalError = CommBroken
HostsUpdatedInterrupt = MembershipChanged
