"""Wheel of the running code.

In a checkout its metadata is made from the pyproject.toml beside the package, since that of an editable installation is
as old as its last `pip install`. Elsewhere it is the unchanged metadata of the installed distribution. So a machine
that runs such a wheel builds the same wheel, byte for byte. Nothing is compressed: compressors differ.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tomllib
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

from spotfleet import bootstrap
from spotfleet.bootstrap import Wheel
from spotfleet.errors import UsageError
from spotfleet.version import install

NAME = "spotfleet"
BORN = (1980, 1, 1, 0, 0, 0)  # the oldest instant that a zip file can name
WHEEL = "Wheel-Version: 1.0\nGenerator: spotfleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
LEFT_OUT = (".pyc", ".pyo", "~")


def running() -> Wheel:
    """Return the wheel that this machine was made a host with, byte for byte; on a laptop, one that is built here."""
    path = os.environ.get(bootstrap.WHEEL, "")
    return _read(path) if path else build()


@cache
def _read(path: str) -> Wheel:
    data = Path(path).read_bytes()
    return Wheel(Path(path).name, hashlib.sha256(data).hexdigest(), data)


@cache
def build() -> Wheel:
    """Built once per process. UsageError if this code has no metadata to be found."""
    return build_from(Path(bootstrap.__file__).parent.parent)


def build_from(package: Path) -> Wheel:
    """Build a wheel of the package in this folder, with the metadata that belongs to it."""
    pyproject = package.parent / "pyproject.toml"
    about, entry_points = _declared(pyproject) or _installed()
    version = next(line.removeprefix("Version: ") for line in about.splitlines() if line.startswith("Version: "))
    info = f"{NAME}-{version}.dist-info"
    files = {f"{package.name}/{p.relative_to(package).as_posix()}": p.read_bytes() for p in _sources(package)}
    files |= {f"{info}/METADATA": about.encode(), f"{info}/WHEEL": WHEEL.encode(),
              f"{info}/entry_points.txt": entry_points.encode(), f"{info}/top_level.txt": f"{NAME}\n".encode()}
    record = "".join(f"{name},{_hash(data)},{len(data)}\n" for name, data in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    data = _zip(files)
    return Wheel(f"{NAME}-{version}-py3-none-any.whl", hashlib.sha256(data).hexdigest(), data)


def _sources(package: Path) -> list[Path]:
    def wanted(path: Path) -> bool:
        parts = path.relative_to(package).parts
        return (path.is_file() and "__pycache__" not in parts and not path.name.endswith(LEFT_OUT)
                and not any(part.startswith(".") for part in parts))

    return sorted(p for p in package.rglob("*") if wanted(p))


def _declared(pyproject: Path) -> tuple[str, str] | None:
    """Return METADATA and entry_points.txt as the file declares them; None if the file is not ours."""
    project = tomllib.loads(pyproject.read_text("utf-8")).get("project", {}) if pyproject.is_file() else {}
    if project.get("name") != NAME:
        return None
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}",
             f"Summary: {project['description']}", f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    for extra, requirements in sorted(project["optional-dependencies"].items()):
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {_for_extra(requirement, extra)}" for requirement in requirements]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    sections = (f"[{group}]\n" + "".join(f"{name} = {what}\n" for name, what in sorted(entries.items()))
                for group, entries in sorted(groups.items()))
    return "\n".join(lines) + "\n", "\n".join(sections)


def _for_extra(requirement: str, extra: str) -> str:
    what, _, marker = requirement.partition(";")
    return f'{what.strip()}; ({marker.strip()}) and extra == "{extra}"' if marker else f'{what}; extra == "{extra}"'


def _installed() -> tuple[str, str]:
    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise UsageError(f"the {NAME} that runs here was not installed: it has no metadata to make a wheel of",
                         hint=install()) from None
    about = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    return about, found.read_text("entry_points.txt") or ""


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, BORN)
            entry.create_system = 3  # Unix; the next line sets its modes
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return out.getvalue()
