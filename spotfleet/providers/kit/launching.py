"""Launch of one host, or of several at once, as steps that any process may repeat.

    exists? --yes--> complete
       |no
    begin --> prepare --> ask --accepted--> served
                 ^         |
                 |         +--NoCapacity, NeedsPerson--> explained, cleaned up, raised: no host exists
                 '--pause--+--not known yet
                           '--any other error--> raised: unknown; everything stays, and a retry sends the same request

A listed host is never requested again, in whatever state: clouds forget tokens after some time.
"""

from __future__ import annotations

import time
from typing import Protocol

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError

VISIBLE_S, PAUSE_S = 30.0, 0.5  # until a cloud knows what has just been made, and between two attempts


class LaunchSteps(Protocol):
    """Steps of a launch, in the cloud's own calls. Each is idempotent: its process may end before and after it.

    A cloud has `exists` and `ask`, and the others as far as it needs them.
    """

    def exists(self) -> bool:
        """Return whether the host is listed, also as ended. Hosts launched together exist together."""

    def ask(self) -> None:
        """Request the machine under the host's token; return once the cloud has accepted.

        A cloud that refuses an accepted request later is waited for here, as long as that takes seconds.
        """

    def begin(self) -> None:
        """Read what the request needs. The host does not exist yet; a refusal here leaves nothing."""

    def prepare(self) -> None:
        """Make what the request names: a template, an interface. What an earlier call made stays."""

    def complete(self) -> None:
        """Finish a host of an earlier call, such as tags that this call could not set."""

    def not_known_yet(self, error: SpotfleetError) -> bool:
        """Return whether `ask` failed because the cloud does not know yet what `prepare` made."""
        return False

    def explained(self, error: NoCapacity | NeedsPerson) -> SpotfleetError:
        """Return the refusal with what only another call to the cloud can tell."""
        return error

    def clean_up(self, refusal: SpotfleetError) -> None:
        """Remove everything left of a refused launch. An error counts as an unknown launch, which is repeated."""

    def served(self) -> None:
        """Remove what an existing host needs no longer. Raises nothing: the host exists, and `down` tries again."""


def launch(steps: LaunchSteps) -> None:
    """Launch; see the module."""
    if steps.exists():
        steps.served()
        return steps.complete()
    steps.begin()
    deadline = time.monotonic() + VISIBLE_S
    while True:
        steps.prepare()
        try:
            steps.ask()
            break
        except (NoCapacity, NeedsPerson) as error:
            explained = steps.explained(error)
            steps.clean_up(explained)
            raise explained from explained.__cause__
        except SpotfleetError as error:
            if not steps.not_known_yet(error) or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)
        if steps.exists():  # another caller launched the same host first
            steps.complete()
            break
    steps.served()
