"""The command `check`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

from spotfleet import providers
from spotfleet.api.check import CheckSection, needs_person, sections
from spotfleet.api.home import Home
from spotfleet.api.policies import document, with_policies
from spotfleet.cli.commands.write import base_of
from spotfleet.cli.console import print_message
from spotfleet.codec import to_json
from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.providers import Finding
from spotfleet.words import counted, harmless

MARKS = {"ok": "ok", "warning": "warning", "blocker": "BLOCKER", "absent": "-"}
WIDTH = 15  # the column with a line's subject


def check(words: list[str], *, policy: bool, as_json: bool, from_terraform: str = "", discover: str = "") -> None:
    if policy:
        _policy(words, from_terraform, discover)
        return
    provider, file = _split(words, providers.names())
    found: list[tuple[CheckSection, list[Finding]]] = []
    for section in sections(Home(), provider, file, base_of(from_terraform, discover, file)):
        if not as_json:
            print(f"{section.provider}:" + (f" for fleet {section.fleet}" if section.fleet else ""), flush=True)
        found.append((section, [_print_finding(f, as_json) for f in _with_progress(section)]))
    if as_json:
        print(json.dumps([{"provider": s.provider, "fleet": s.fleet, "findings": to_json(f)} for s, f in found],
                         indent=1))
    _print_summary(found)


def _print_summary(found: list[tuple[CheckSection, list[Finding]]]) -> None:
    """Print the numbers of problems and warnings; exit code 3 if a person must act."""
    everything = [f for _section, findings in found for f in findings]
    blockers, warnings = (sum(f.level == level for f in everything) for level in ("blocker", "warning"))
    known = f"; {counted(warnings, 'warning')}" if warnings else ""
    if needs_person(everything):
        print_message(f"{counted(blockers, 'problem')} to solve before a fleet can be made{known}")
        raise typer.Exit(NeedsPerson.exit_code)
    print_message(f"no problem found{known}")


def _split(words: list[str], names: Iterable[str]) -> tuple[str, Path | None]:
    """Return PROVIDER and FILE, given in any order. Raises UsageError for a word that is neither."""
    provider, file = "", None
    for word in words:
        if word in names and not provider:
            provider = word
        elif file is None and (Path(word).exists() or Path(word).suffix in (".yaml", ".yml")):
            file = Path(word)
        else:
            raise UsageError(f"'{word}' is neither a provider nor a fleet file",
                             hint=f"providers: {', '.join(names)}; or the path of a file (YAML)")
    return provider, file


def _with_progress(section: CheckSection) -> Iterator[Finding]:
    """Yield the findings; on a terminal the last line shows the provider that is being asked."""
    tty = sys.stderr.isatty()
    findings = iter(section.findings)
    while True:
        if tty:
            print(f"  {section.provider} is being asked ...", end="", file=sys.stderr, flush=True)
        finding = next(findings, None)
        if tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if finding is None:
            return
        yield finding


def _print_finding(finding: Finding, as_json: bool) -> Finding:
    if not as_json:
        print(harmless(f"  {MARKS[finding.level]:8} {finding.about:{WIDTH}} {finding.what}"), flush=True)
        for i, line in enumerate(finding.fix.splitlines() if finding.level != "ok" else []):
            print(harmless(f"  {'':8} {'' if i else 'do this:':>{WIDTH}} {line}"), flush=True)
    return finding


def _policy(words: list[str], from_terraform: str, discover: str) -> None:
    """Print a policy document, on AWS ready for `aws iam create-policy --policy-document file://...`."""
    able = with_policies()
    roles = {role for plugin in able if plugin.policies for role in plugin.policies.roles}
    role = next((w for w in words if w in roles), "")
    provider, file = _split([w for w in words if w != role], [plugin.name for plugin in able])
    base = base_of(from_terraform, discover, file)
    print(json.dumps(document(Home(), provider, role, file, base), indent=2))
