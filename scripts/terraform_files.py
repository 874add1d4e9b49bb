"""Generated parts of the Terraform modules: `python scripts/terraform_files.py [--check]` writes or compares them.

    terraform/*/README.md          tables of inputs and outputs, between the markers of terraform-docs
    terraform/gcp/data/roles.json  permissions that `spotfleet check gcp --policy` prints
    terraform/azure/data/gpus.json kind of GPU -> the smallest size of the catalog that has it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[1]
sys.path.insert(0, str(TOP))
BEGIN, END = "<!-- BEGIN_TF_DOCS -->", "<!-- END_TF_DOCS -->"
BLOCK = re.compile(r'^(variable|output) "(\w+)" \{\n(.*?)^\}', re.M | re.S)
ARGUMENT = r"^  {name} += (.*?)(?=^  \w|\Z)"  # up to the next argument of the block


@dataclass(frozen=True)
class Entry:
    """One variable or output."""

    kind: str
    name: str
    description: str
    type: str
    default: str  # "" where a value is required


def entries(folder: Path) -> list[Entry]:
    """Return variables and outputs of a module, by name."""
    found = []
    for file in sorted(folder.glob("*.tf")):
        for kind, name, body in BLOCK.findall(file.read_text()):
            description = json.loads(_argument(body, "description").replace("$${", "${") or '""')
            found.append(Entry(kind, name, description, _argument(body, "type"), _argument(body, "default")))
    return sorted(found, key=lambda e: e.name)


def _argument(body: str, name: str) -> str:
    found = re.search(ARGUMENT.format(name=name), body, re.M | re.S)
    return re.sub(r"\s+", " ", found[1]).strip() if found else ""


def tables(folder: Path) -> str:
    """Return the part of a README that is generated."""
    known = entries(folder)
    rows = ["## Inputs", "", "| name | description | type | default |", "|---|---|---|---|"]
    rows += [f"| {e.name} | {_cell(e.description)} | `{_kind(e.type)}` | "
             f"{f'`{e.default}`' if e.default else 'required'} |" for e in known if e.kind == "variable"]
    rows += ["", "## Outputs", "", "| name | description |", "|---|---|"]
    rows += [f"| {e.name} | {_cell(e.description)} |" for e in known if e.kind == "output"]
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _kind(text: str) -> str:
    return "object" if text.startswith("object(") else text


def readme(folder: Path) -> str:
    """Return a module's README with its tables as they should be."""
    text = (folder / "README.md").read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{folder.name}/README.md: write {BEGIN} and {END} where the tables belong")
    return f"{before}{BEGIN}\n{tables(folder)}\n{END}{after}"


def gcp_roles() -> str:
    """Return the lists of permissions. `act_as` is granted on single service accounts, so it stands apart, too."""
    from spotfleet.providers.gcp.mapping import roles

    lists = {name: roles.document(name)["includedPermissions"] for name in ("dispatcher", "host", "laptop")}
    return json.dumps(lists | {"act_as": ["iam.serviceAccounts.actAs"]}, indent=2, sort_keys=True) + "\n"


def azure_gpus() -> str:
    """Return the smallest size for each kind of GPU. GB200 is left out: the default image does not run on ARM."""
    from spotfleet.catalog.store import Store

    part = Store().part("azure", packaged=True)
    assert part is not None and part.catalog is not None
    sizes = sorted((m.accelerator, m.count, m.vcpus, m.name) for m in part.catalog.machines.values()
                   if m.accelerator and not m.accelerator.startswith("GB"))
    smallest: dict[str, str] = {}
    for gpu, _, _, name in sizes:
        smallest.setdefault(gpu, name)
    return json.dumps(smallest, indent=2, sort_keys=True) + "\n"


def generated() -> Iterator[tuple[Path, str]]:
    """Yield each generated file and its text."""
    for file in sorted(TOP.glob("terraform/*/README.md")):
        yield file, readme(file.parent)
    yield TOP / "terraform" / "gcp" / "data" / "roles.json", gcp_roles()
    yield TOP / "terraform" / "azure" / "data" / "gpus.json", azure_gpus()


def main(words: list[str]) -> int:
    stale = [(file, text) for file, text in generated() if not file.exists() or file.read_text() != text]
    for file, text in stale:
        if "--check" in words:
            print(f"{file.relative_to(TOP)} is not up to date: run `python scripts/terraform_files.py`")
        else:
            file.write_text(text)
            print(f"wrote {file.relative_to(TOP)}")
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
