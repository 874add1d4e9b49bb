"""Error table of a cloud: its codes, and what each means for a fleet. Pure.

    POOL, TYPE, QUOTA, REGION   NoCapacity of that scope: others are tried, this one cools down
    PERSON                      NeedsPerson: only somebody with an account can help
    AGAIN                       SpotfleetError: repeat the same call later, under the same token
    GONE                        SpotfleetError: the thing does not exist; callers that expect this check `code`

A cloud writes one `ErrorTable` and calls `refusal` wherever its SDK reports an error: an exception, an entry of a
partial success, or an operation that failed after it was accepted. An error keeps its code, which `code` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError

ASKED_AGAIN = "it is asked again"


class Reach(Enum):
    """Scope of an error, in the order in which one of several wins: the widest last."""

    GONE = "gone"
    POOL = "pool"
    TYPE = "type"
    QUOTA = "quota"  # one family and market in the region
    REGION = "region"
    AGAIN = "again"
    PERSON = "person"


@dataclass(frozen=True)
class Reaction:
    """Scope, text and hint for one error code."""

    reach: Reach
    what: str = ""  # short text; empty: the cloud's message
    hint: str = ""  # words in braces are filled in
    there: str = ""  # the hint on a machine of the fleet, if it differs
    enough: bool = False  # the cloud's message adds nothing to `what`


GONE = Reaction(Reach.GONE)
PRESENT = Reaction(Reach.AGAIN, "somebody else made it at the same time", ASKED_AGAIN)


def rows(reach: Reach, what: str, hint: str, *codes: str, there: str = "", enough: bool = False,
         ) -> dict[str, Reaction]:
    """Return one table entry for several codes."""
    return dict.fromkeys(codes, Reaction(reach, what, hint, there, enough))


@dataclass(frozen=True)
class ErrorTable:
    """Codes of one cloud.

    An unknown code of a launch refuses the pool: another place may work, and the message holds the cloud's own text.
    An unknown code of another call is repeated.
    """

    known: Mapping[str, Reaction]
    unknown: Reaction = Reaction(Reach.POOL, "", "other pools are tried")
    launches: Collection[str] = ("",)  # operations that launch machines; "": the operation is not known
    reference: str = "the cloud's reference of {operation} may say more"
    # A code with another meaning under some message: code, a piece of the message, the code that applies.
    other_meanings: tuple[tuple[str, str, str], ...] = ()
    # A row by the shape of a code that is not in the table, such as "*.NotFound"; None: it has none.
    by_shape: Callable[[str], Reaction | None] = field(default=lambda _code: None)

    def reaction(self, code: str, message: str = "") -> Reaction:
        """Return the row of the cloud's code and message."""
        for known, piece, means in self.other_meanings:
            if code == known and piece in message:
                return self.known[means]
        return self.known.get(code) or self.by_shape(code) or self.unknown

    def refusal(self, where: str, code: str, message: str, operation: str = "", *, laptop: bool = True,
                fill: Mapping[str, str] | None = None) -> SpotfleetError:
        """Make the exception for the cloud's answer.

        `where` begins the text: "aws us-east-1 us-east-1a g5.xlarge spot". `fill`: values of the words in hints.
        """
        row = self.reaction(code, message)
        if row is self.unknown and operation not in self.launches:
            row = Reaction(Reach.AGAIN, "", self.reference.replace("{operation}", operation))
        detail = "" if row.enough else short(message)
        what = f"{row.what}: {detail}" if row.what and detail else row.what or detail
        hint = row.hint if laptop or not row.there else row.there
        for word, value in (fill or {}).items():
            hint = hint.replace(word, value)
        return _error(code, row.reach, f"{where}: {what} ({code})", hint)


def code(error: BaseException | None, of_sdk: Callable[[BaseException], str] = lambda _error: "") -> str:
    """Return the cloud's code behind `error`: of an exception of its SDK, or of one made from it; "" without any."""
    while error is not None:
        if found := of_sdk(error) or getattr(error, "cloud_code", ""):
            return str(found)
        error = error.__cause__
    return ""


def worst(refusals: Iterable[SpotfleetError]) -> SpotfleetError:
    """Return the refusal with the widest scope; the first of several."""
    order = list(Reach)
    return max(refusals, key=lambda e: order.index(getattr(e, "cloud_reach", Reach.POOL)))


def short(message: str) -> str:
    """Return one line of at most 300 characters; empty for a web page, which a proxy before the cloud may send."""
    line = " ".join(message.split()) if not message.lstrip().lower().startswith(("<!doctype", "<html")) else ""
    return line if len(line) <= 300 else line[:297] + "..."


def _error(code: str, reach: Reach, text: str, hint: str) -> SpotfleetError:
    if reach is Reach.PERSON:
        error: SpotfleetError = NeedsPerson(text, hint=hint)
    elif reach in (Reach.AGAIN, Reach.GONE):
        error = SpotfleetError(text, hint=hint)
    else:
        error = NoCapacity(text, hint=hint, scope=reach.value)
    error.cloud_code, error.cloud_reach = code, reach  # type: ignore[attr-defined]
    return error
