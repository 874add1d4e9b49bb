"""What training code may catch. Both are raised inside the user's function and handled by `elastic.run`.

They are RuntimeErrors, as in Elastic Horovod, and no SpotfleetErrors: the CLI never sees them.
"""

from __future__ import annotations


class CommBroken(RuntimeError):
    """A collective failed because a peer was lost or this worker was fenced; its tensors are whole."""

    blame_peer = True


class MembershipChanged(RuntimeError):
    """All ranks agreed to leave this generation at this point; no applied step will be repeated."""

    blame_peer = True


class StateLost(RuntimeError):
    """Nobody in the generation holds a whole copy of the training state and there is no checkpoint."""

    blame_peer = True


HorovodInternalError = CommBroken
HostsUpdatedInterrupt = MembershipChanged
