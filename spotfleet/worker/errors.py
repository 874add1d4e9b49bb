"""Errors that training code may catch. They are raised inside the user's function and handled by `elastic.run`.

They are RuntimeErrors, as in Elastic Horovod, and no SpotfleetErrors: they never reach the CLI.
"""

from __future__ import annotations


class CommBroken(RuntimeError):
    """Failure of a collective because a peer was lost or this worker was fenced; its tensors are whole."""

    blame_peer = True


class MembershipChanged(RuntimeError):
    """Agreement of all ranks to leave this generation at this point; no applied step will be repeated."""

    blame_peer = True


class StateLost(RuntimeError):
    """Loss of the training state: no member of the generation holds a whole copy, and there is no checkpoint."""

    blame_peer = True


class StateDiverged(StateLost):
    """Difference between ranks that should hold equal states: none of them is trained on."""


HorovodInternalError = CommBroken
HostsUpdatedInterrupt = MembershipChanged
