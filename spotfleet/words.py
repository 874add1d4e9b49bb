"""Readable forms of money, instants, spans and foreign text. Everything in UTC."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
DAY_S = 86_400
# Control characters, lone surrogates, and marks that change the direction of the surrounding text.
UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
                    "\ufffe\uffff]")
_BREAKS = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


def dollars(micros: int, digits: int = 4) -> str:
    """Format $1,234.5678, -$0.5000."""
    return f"{'-' if micros < 0 else ''}${abs(micros) / 1e6:,.{digits}f}"


def exact_dollars(micros: int) -> str:
    """Format `micros` millionths of a dollar exactly: "0.000123", always six decimals."""
    sign, whole = ("-", -micros) if micros < 0 else ("", micros)
    return f"{sign}{whole // 1_000_000}.{whole % 1_000_000:06d}"


def rate(micros_h: int) -> str:
    """Format $0.123456/h, without superfluous zeros."""
    whole, _, fraction = exact_dollars(micros_h).partition(".")
    return f"${whole}.{fraction.rstrip('0').ljust(2, '0')}/h"


def money(micros: int, digits: int | None = None) -> str:
    """Format $1,234.56, $0.0123, $0.000012: with significant digits, or with exactly `digits`; a nonzero amount that
    would show as zero becomes "< $0.01"."""
    sign, whole = ("-", -micros) if micros < 0 else ("", micros)
    if digits is not None and 0 < whole < 500_000 / 10**digits:
        return f"< ${10**-digits:.{digits}f}"
    if not whole and digits is None:
        return "$0"
    return f"{sign}${whole / 1e6:,.{fitting(whole) if digits is None else digits}f}"


def fitting(micros: int) -> int:
    """Return the number of decimals for an amount of that size."""
    return 2 if micros >= 995_000 else 4 if micros >= 1_000 else 6


def percent(part: float, whole: float) -> str:
    """Format 68 %, 0.4 %, < 0.1 %, with non-breaking spaces."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "<\u00a00.1\u00a0%"
    return f"{share:.1f}\u00a0%" if abs(share) < 9.95 and share else f"{share:.0f}\u00a0%"


def span(seconds: float) -> str:
    """Format 0.6 s, 45 s, 12 min, 3 h 07 min, 3 h, 2 d 4 h, 2 d."""
    s = round(seconds)
    if seconds < 10 and s != seconds:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    if s < 60:
        return f"{s} s"
    if s < 600 and s % 60:
        return f"{s // 60} min {s % 60:02d} s"
    if s < 3600:
        return f"{s // 60} min"
    if s < DAY_S:
        return hours(s)
    return f"{s // DAY_S} d" + (f" {s % DAY_S // 3600} h" if s % DAY_S >= 3600 else "")


def hours(seconds: float) -> str:
    """Format 55 h 12 min, 48 h: for spans that are compared with each other."""
    s = round(seconds)
    return f"{s // 3600:,} h" + (f" {s % 3600 // 60:02d} min" if s % 3600 >= 60 else "")


def about(seconds: float) -> str:
    """Format 45 s, 90 min, 2.5 h."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else (
        f"{seconds / 3600:.1f} h")


def count(number: int, one: str, many: str = "") -> str:
    """Format 1 host, 3 hosts, no hosts."""
    return f"{f'{number:,}' if number else 'no'} {one if number == 1 else many or one + 's'}"


def civil(at: float) -> tuple[int, int, int]:
    """Return year, month, day of a Unix second. Source: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms"."""
    days = int(at // DAY_S) + 719_468
    era, of_era = divmod(days, 146_097)
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    return year_of_era + era * 400 + (month <= 2), month, of_year - (153 * shifted + 2) // 5 + 1


def day(at: float) -> str:
    """Format 22 Nov 2026."""
    year, month, number = civil(at)
    return f"{number} {MONTHS[month - 1]} {year}"


def clock(at: float, seconds: bool = False) -> str:
    """Format 16:54, or 16:54:07."""
    of_day = int(at % DAY_S)
    return f"{of_day // 3600:02d}:{of_day % 3600 // 60:02d}" + (f":{of_day % 60:02d}" if seconds else "")


def clock_utc(at: float) -> str:
    """Format 16:54:07 UTC."""
    return f"{clock(at, seconds=True)} UTC"


def instant(at: float) -> str:
    """Format 22 Nov 2026, 16:54."""
    return f"{day(at)}, {clock(at)}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format 1 host, 2 hosts."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def size(count: int) -> str:
    """Format 0 bytes, 812 bytes, 1.2 kB, 3.4 MB, 5.6 GB."""
    if count < 1000:
        return counted(count, "byte")
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "kB"))
    return f"{count / unit:.1f} {name}"


def speed(count: int, seconds: float) -> str:
    """Format 812 bytes/s, 3.4 MB/s, for `count` bytes."""
    return f"{size(round(count / max(seconds, 1e-3)))}/s"


def results(kind: str, count: int, job: str) -> str:
    """Format 22.0 MB of the output of train-1; a `count` of 0 means that it is not known."""
    return f"{size(count) if count else 'a part'} of the {kind} of {job}"


def are(count: int, noun: str) -> str:
    """Format 1 host is, 2 hosts are."""
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'}"


def harmless(text: str) -> str:
    """Return `text` as one line that a terminal can only show: spaces for line breaks and tabs, \\x1b for ESC."""
    return _visible(_BREAKS.sub(" ", text).replace("\t", " "))


def harmless_lines(text: str) -> str:
    """Return `text` with its line breaks and tabs, and without anything else that a terminal would carry out."""
    return _visible(_BREAKS.sub("\n", text))


def _visible(text: str) -> str:
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def did_you_mean(word: Any, known: Sequence[str]) -> str:
    """Return "; did you mean 'X'?", or "" when no known word is near."""
    near = difflib.get_close_matches(str(word), known, 1, 0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
