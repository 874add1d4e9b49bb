"""Write the recorded schemas again: `python -m tests.terraform.schema.extract PROVIDER SOURCE`.

    aws      the folder of the provider's binary mirror: `terraform providers schema -json` is asked
    google   the unpacked npm package @cdktf/provider-google: `npm pack @cdktf/provider-google@16.12.1`
    azurerm  the unpacked npm package @cdktf/provider-azurerm: `npm pack @cdktf/provider-azurerm@14.23.1`

Only the resources and data sources that `terraform/` uses are kept. The npm packages are generated from the provider's
own schema. They do not show which optional attributes are computed, too, nor a provider's checks of values.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.terraform.schema import used

HERE = Path(__file__).parent
SIMPLE: dict[str, Any] = {
    "string": "string", "number": "number", "boolean": "bool", "stringList": ["list", "string"],
    "numberList": ["list", "number"], "booleanList": ["list", "bool"], "stringMap": ["map", "string"],
    "numberMap": ["map", "number"], "booleanMap": ["map", "bool"]}
GETTERS: dict[str, Any] = {
    "getStringAttribute": "string", "getNumberAttribute": "number", "getBooleanAttribute": "bool",
    "getListAttribute": ["list", "string"], "getNumberListAttribute": ["list", "number"],
    "getStringMapAttribute": ["map", "string"]}
FLAGS = ("required", "optional", "computed")
CONFIGURATION = """terraform {
  required_providers {
    %s = { source = "hashicorp/%s" }
  }
}
"""
SETTINGS = """provider_installation {
  filesystem_mirror {
    path = "%s"
  }
}
"""
ENTRY = re.compile(r'(\w+): \{\s+value: (.*),\s+isBlock: (true|false),\s+type: "(\w+)",\s+storageClassType: "(\w+)",')
COMPUTED = re.compile(r"// (\w+) - computed: true, optional: false, required: false\n\s+get \w+\(\) \{\n(.*?)\n    \}",
                      re.S)


class CdktfFile:
    """One resource's JavaScript and its types."""

    def __init__(self, folder: Path) -> None:
        self.script = (folder / "index.js").read_text()
        self.types = (folder / "index.d.ts").read_text()

    def root(self) -> dict[str, Any]:
        """Return the block of the resource itself."""
        entries = self.script.rpartition("synthesizeHclAttributes() {")[2]
        name = re.findall(r"class (\w+) extends cdktf\.Terraform(?:Resource|DataSource|Provider)", self.script)[0]
        body = self.script.partition(f"class {name} extends cdktf.Terraform")[2]
        block = self._block(entries, f"{name}Config")
        for found, getter in COMPUTED.findall(body):
            block["attributes"].setdefault(found, {"type": _got(getter), "computed": True})
        if "id" in block["attributes"]:
            block["attributes"]["id"] = {"type": "string", "optional": True, "computed": True}
        block["attributes"].pop("alias", None)  # Terraform's own, of each provider's block
        return block

    def version(self) -> str:
        return re.findall(r"providerVersion: '([\d.]+)'", self.script)[0]

    def _block(self, entries: str, interface: str) -> dict[str, Any]:
        required = self._required(interface)
        block: dict[str, Any] = {"attributes": {}, "block_types": {}}
        for name, value, nested, kind, storage in ENTRY.findall(entries.partition("// remove undefined")[0]):
            if nested == "false":
                wanted: Any = SIMPLE.get(storage, "dynamic")
                if kind == "set" and isinstance(wanted, list):
                    wanted = ["set", wanted[1]]
                block["attributes"][name] = {"type": wanted, "required" if name in required else "optional": True}
                continue
            function = re.findall(r"(\w+)ToHclTerraform", value)[0]
            inner = self._block(self.script.partition(f"function {function}ToHclTerraform(struct) {{")[2],
                                function[0].upper() + function[1:])
            many = "MapperHcl" in value
            block["block_types"][name] = {
                "nesting_mode": "single" if kind == "struct" else kind, "block": inner,
                **({"min_items": 1} if name in required and kind != "struct" else {}),
                **({"max_items": 1} if not many and kind in ("list", "set") else {})}
        return block

    def _required(self, interface: str) -> set[str]:
        body = self.types.partition(f"export interface {interface} ")[2].partition("\n}")[0]
        return {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in re.findall(r"readonly (\w+):", body)}


def _got(getter: str) -> Any:
    """Return the type of a computed attribute by its getter's body; what is no plain value is dynamic."""
    found = re.findall(r"this\.(get\w+)\(", getter)
    if not found:
        return "dynamic"
    plain = GETTERS.get(found[0], "dynamic")
    return ["set", plain[1]] if "Fn.tolist" in getter and isinstance(plain, list) else plain


def from_package(provider: str, package: Path) -> dict[str, Any]:
    def folder(name: str) -> Path:
        return package / "lib" / name.removeprefix(f"{provider}_").replace("_", "-")

    root = CdktfFile(package / "lib" / "provider")
    found: dict[str, Any] = {
        "provider": root.root(), "resource_schemas": {}, "data_source_schemas": {}}
    for kind, name in used.named(f"{provider}_"):
        where = folder(name) if kind == "resource" else package / "lib" / (
            f"data-{provider}-" + name.removeprefix(f"{provider}_").replace("_", "-"))
        file = CdktfFile(where)
        found[f"{'resource' if kind == 'resource' else 'data_source'}_schemas"][name] = file.root()
    manifest = json.loads((package / "package.json").read_text())
    version = CdktfFile(folder(next(n for k, n in used.named(f"{provider}_") if k == "resource"))).version()
    return {"source": f"{manifest['name']} {manifest['version']} (npm), generated from hashicorp/{provider} {version}",
            "version": version, **found}


def from_binary(provider: str, mirror: str) -> dict[str, Any]:
    address = f"registry.terraform.io/hashicorp/{provider}"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "main.tf").write_text(CONFIGURATION % (provider, provider))
        Path(folder, "rc").write_text(SETTINGS % mirror)
        env = {**os.environ, "TF_CLI_CONFIG_FILE": f"{folder}/rc", "CHECKPOINT_DISABLE": "1"}
        subprocess.run(["terraform", f"-chdir={folder}", "init", "-input=false"], env=env, check=True,
                       stdout=subprocess.DEVNULL)
        lock = Path(folder, ".terraform.lock.hcl").read_text()
        answer = subprocess.run(["terraform", f"-chdir={folder}", "providers", "schema", "-json"], env=env, check=True,
                                capture_output=True, text=True).stdout
    [whole] = json.loads(answer)["provider_schemas"].values()
    [version] = re.findall(r'version\s+= "([\d.]+)"', lock)
    found: dict[str, Any] = {"provider": _plain(whole["provider"]["block"]), "resource_schemas": {},
                             "data_source_schemas": {}}
    for kind, name in used.named(f"{provider}_"):
        group = f"{'resource' if kind == 'resource' else 'data_source'}_schemas"
        found[group][name] = _plain(whole[group][name]["block"])
    return {"source": f"`terraform providers schema -json` of {address} {version}", "version": version, **found}


def _plain(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block without descriptions."""
    return {
        "attributes": {
            name: {"type": a.get("type", "dynamic"), **{k: True for k in FLAGS if a.get(k)}}
            for name, a in block.get("attributes", {}).items()},
        "block_types": {
            name: {"nesting_mode": t["nesting_mode"], "block": _plain(t["block"]),
                   **{k: t[k] for k in ("min_items", "max_items") if t.get(k)}}
            for name, t in block.get("block_types", {}).items()}}


def main(provider: str, source: str) -> None:
    read = from_binary(provider, source) if provider == "aws" else from_package(provider, Path(source))
    text = json.dumps(read, sort_keys=True, separators=(",", ":"))
    (HERE / f"{provider}.json").write_text(text.replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
