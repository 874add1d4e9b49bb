"""Ignore rules of `.gitignore` and `.spotfleetignore`, matched byte for byte as git does.

The rules are those of git's dir.c and wildmatch.c; `tests/bundle/test_ignore_rules.py` compares them with the real `git
check-ignore`. A later line wins, `.spotfleetignore` comes after `.gitignore`, deeper folders after higher ones.
`.git/info/exclude`, `core.excludesFile` and ignore files above the shipped folder are not read: with them, another
machine or another user would ship something else.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

IGNORE_FILES = (".gitignore", ".spotfleetignore")
LARGEST_BYTES = 4 << 20  # limit for one ignore file; the rest is not read
SPECIAL = re.compile(rb"[*?\[\\]")
NEVER = b"(?!)"

Matcher = re.Pattern[bytes]


@dataclass(frozen=True)
class _Rule:
    pattern: Matcher
    by_name: bool  # matched against the last part of a path; otherwise against the path from the ignore file's folder
    folders_only: bool
    keep: bool


@dataclass(frozen=True)
class Rules:
    """Rules of one ignore file; `prefix` is the path of its folder with a slash at its end, or empty."""

    prefix: bytes
    rules: tuple[_Rule, ...]
    any_name: Matcher  # fast path: no rule matches most names
    any_path: Matcher


def read(folder: str, prefix: bytes) -> list[Rules]:
    """Return the rules of the ignore files in `folder`. A link is not followed, as in git."""
    found = []
    for name in IGNORE_FILES:
        try:
            with open(os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                text = file.read(LARGEST_BYTES)
        except OSError:
            continue  # missing, a link, or not readable for us
        found += [rules] if (rules := parse(text, prefix)).rules else []
    return found


def parse(text: bytes, prefix: bytes = b"") -> Rules:
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    found = (_rule(line.removesuffix(b"\r").partition(b"\0")[0]) for line in lines)
    rules = tuple(rule for rule in found if rule is not None)
    return Rules(prefix, rules, _any(r for r in rules if r.by_name), _any(r for r in rules if not r.by_name))


def ignored(name: bytes, is_folder: bool, all_rules: Sequence[Rules]) -> bool:
    """Return whether the last matching rule leaves out `name`, a path from the top. Names in a folder that is left out
    are not passed to this function."""
    last = name.rpartition(b"/")[2]
    for rules in reversed(all_rules):
        path = name[len(rules.prefix):]
        if not (rules.any_name.fullmatch(last) or rules.any_path.fullmatch(path)):
            continue
        for rule in reversed(rules.rules):
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(last if rule.by_name else path):
                return not rule.keep
    return False


def _any(rules) -> Matcher:
    return re.compile(b"|".join(rule.pattern.pattern for rule in rules) or NEVER, re.DOTALL)


def _rule(line: bytes) -> _Rule | None:
    if line.startswith(b"#"):
        return None
    text = _without_spaces_at_end(line)
    keep = text.startswith(b"!")
    text = text[keep:]
    folders_only = text.endswith(b"/")
    text = text[:len(text) - folders_only]
    if not text:
        return None
    by_name = b"/" not in text
    if not by_name and text.startswith(b"/"):
        text = text[1:]
    special = SPECIAL.search(text)
    literal = special.start() if special else len(text)
    # The literal beginning is compared first, and the rest as if it stood alone: git reads `a**/b` this way.
    body = re.escape(text[:literal]) + _regex(text[literal:], paths=not by_name)
    return _Rule(re.compile(b"(?:" + body + b")", re.DOTALL), by_name, folders_only, keep)


def _without_spaces_at_end(line: bytes) -> bytes:
    """Strip spaces at the end, except a space after a backslash."""
    stripped = line.rstrip(b" ")
    backslashes = len(stripped) - len(stripped.rstrip(b"\\"))
    return stripped + (b" " if backslashes % 2 and len(stripped) < len(line) else b"")


def _regex(pattern: bytes, *, paths: bool) -> bytes:
    """Translate a pattern as wildmatch does: with `paths`, only `**` matches a slash."""
    out, at = b"", 0
    while at < len(pattern):
        char = pattern[at:at + 1]
        if char == b"*":
            begin = at
            while pattern[at:at + 1] == b"*":
                at += 1
            body, at = _stars(pattern, begin, at, paths)
            out += body
        elif char == b"[":
            body, at = _bracket(pattern, at + 1, paths)
            if at < 0:
                return NEVER
            out += body
        elif char == b"?":
            out, at = out + (b"[^/]" if paths else b"."), at + 1
        else:
            if char == b"\\":
                at += 1
                if at == len(pattern):
                    return NEVER
            out, at = out + re.escape(pattern[at:at + 1]), at + 1
    return out


def _stars(pattern: bytes, begin: int, end: int, paths: bool) -> tuple[bytes, int]:
    """Translate the stars from `begin` to `end`; return the regex and the position to continue from."""
    if not paths:
        return b".*", end
    rest = pattern[end:]
    whole_part = (begin == 0 or pattern[begin - 1:begin] == b"/") and (not rest or rest.startswith((b"/", b"\\/")))
    if end - begin == 1 or not whole_part:
        return b"[^/]*", end
    return (b"(?:.*/)?", end + 1) if rest.startswith(b"/") else (b".*", end)


CLASSES: dict[bytes, bytes] = {
    b"alnum": (string.ascii_letters + string.digits).encode(), b"alpha": string.ascii_letters.encode(),
    b"blank": b" \t", b"cntrl": bytes([*range(32), 127]), b"digit": string.digits.encode(),
    b"graph": bytes(range(33, 127)), b"lower": string.ascii_lowercase.encode(), b"print": bytes(range(32, 127)),
    b"punct": string.punctuation.encode(), b"space": b" \t\n\v\f\r", b"upper": string.ascii_uppercase.encode(),
    b"xdigit": string.hexdigits.encode(),
}


def _bracket(pattern: bytes, at: int, paths: bool) -> tuple[bytes, int]:
    """Translate a set from after its `[`; return the regex and the next position, or -1 for a set without end, which
    matches nothing."""
    negated = pattern[at:at + 1] in (b"!", b"^")
    at += negated
    chars: set[int] = set()
    before, first = -1, True
    while first or pattern[at:at + 1] != b"]":
        first = False
        if at >= len(pattern):
            return b"", -1
        at, before = _one_of_set(pattern, at, before, chars)
        if at < 0:
            return b"", -1
    matched = set(range(1, 256)) - chars if negated else chars
    if paths:
        matched -= {ord("/")}
    return (b"[" + b"".join(b"\\x%02x" % c for c in sorted(matched)) + b"]") if matched else NEVER, at + 1


def _one_of_set(pattern: bytes, at: int, before: int, chars: set[int]) -> tuple[int, int]:
    """Add the element at `at` to `chars`; return the next position, and the start of a range if a `-` follows."""
    char, after = pattern[at], pattern[at + 1:at + 2]
    if char == ord("-") and before >= 0 and after not in (b"", b"]"):
        at += 1 + (after == b"\\")
        if at >= len(pattern):
            return -1, -1
        chars.update(range(before, pattern[at] + 1))
        return at + 1, -1
    if char == ord("[") and after == b":":
        end = pattern.find(b"]", at + 2)
        if end < 0:
            return -1, -1
        if end > at + 2 and pattern[end - 1] == ord(":"):
            known = CLASSES.get(pattern[at + 2:end - 1])
            if known is None:
                return -1, -1
            chars.update(known)
            return end + 1, -1
    if char == ord("\\"):
        at += 1
        if at >= len(pattern):
            return -1, -1
    chars.add(pattern[at])
    return at + 1, pattern[at]
