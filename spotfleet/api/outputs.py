"""Download of the files that workers wrote to their output folders: while a job runs, or from the archive."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from spotfleet.api import transfers
from spotfleet.api.home import FleetDir
from spotfleet.api.transfers import Progress
from spotfleet.bundle import extract
from spotfleet.codec import from_json
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.protocol.archive import RefusedFile
from spotfleet.protocol.messages import NOT_COLLECTED
from spotfleet.storage import atomic, locks, names
from spotfleet.transport.client import DispatcherClient


@dataclass(frozen=True)
class DownloadedOutputs:
    files: int
    bytes: int


def living(client: DispatcherClient, job: str, into: Path, progress: Progress) -> DownloadedOutputs:
    """Download all files of `job` that the dispatcher has collected so far, each complete; other files in `into`
    stay. Files of an earlier or interrupted call are not copied again."""
    under, draft = f"jobs/{job}/outputs/", into / f".spotfleet-{quote(job, safe='')}.part"
    with _made(into), locks.alone(draft.with_suffix(".lock"), f"copying outputs of {job} to {into}"):
        found = transfers.fetch(client, draft, progress, f"copying outputs of {job}", outputs=job,
                                seed=lambda key: into / key.removeprefix(under))
        if found is None:
            return _packed(client, job, into, progress)
        moved = _moved(found.files / under, into, progress)
        for file in found.refused:
            (into / names.ASIDE).mkdir(exist_ok=True)
            atomic.rename(found.files / file.at, into / file.at, sync=False)
            _report(file, under, progress)
        moved = replace(moved, files=moved.files + len(found.refused))
        shutil.rmtree(draft)
    client.outputs_fetched(job, found.at)
    return moved


def _packed(client: DispatcherClient, job: str, into: Path, progress: Progress) -> DownloadedOutputs:
    """Download them as .tar.gz, from a dispatcher of an earlier release."""
    with _beside(into) as draft:
        packed, files = draft / "outputs.tar.gz", draft / "files"
        with packed.open("wb") as out:
            client.outputs(job, out)
        try:
            refused: list[tuple[str, str, str]] = []
            extract(packed, files, refused=refused)
        except ValueError as error:
            raise SpotfleetError(f"outputs of {job} cannot be unpacked: {error}", hint="try again") from None
        for name, at, why in refused:
            progress(f"{name} is {at} here: {why}")
        return _moved(files, into, progress)


def archived(folder: FleetDir, job: str, into: Path, progress: Progress) -> DownloadedOutputs:
    """Copy the output files of `job` from the archive that `down` has fetched."""
    under = f"jobs/{job}/outputs/"
    home = folder.archive / under
    if not (folder.archive / "jobs" / job).is_dir():
        there = ", ".join(sorted(p.name for p in (folder.archive / "jobs").glob("*")))
        raise SpotfleetError(f"the archive holds no job '{job}'", hint=f"jobs in the archive: {there or 'none'}")
    with _beside(into) as draft:
        if home.is_dir():
            shutil.copytree(home, draft, dirs_exist_ok=True)
        aside = [file for file in _refused(folder.archive, progress) if file.name.startswith(under)]
        for file in aside:
            if file.at and (folder.archive / file.at).is_file():
                (draft / names.ASIDE).mkdir(exist_ok=True)
                shutil.copyfile(folder.archive / file.at, draft / file.at)
        moved = _moved(draft, into, progress)
    for file in aside:
        _report(file, under, progress)
    return moved


def _refused(archive: Path, progress: Progress) -> list[RefusedFile]:
    """Return the files that are not in the archive under their names."""
    path = archive / NOT_COLLECTED
    if not path.is_file():
        return []
    try:
        listed = from_json(tuple[RefusedFile, ...], json.loads(path.read_text()).get("refused", ()))
    except (ValueError, AttributeError, RecursionError) as error:
        progress(f"{path} cannot be read, so files in {archive / names.ASIDE} have no names: {error}")
        return []
    return [file for file in listed if file.at in ("", names.aside(file.name))]  # a dispatcher wrote it: no other path


def _report(file: RefusedFile, under: str, progress: Progress) -> None:
    progress(f"{file.name.removeprefix(under)} is {file.at or 'not'} here: {file.why}")


@contextmanager
def _beside(into: Path) -> Iterator[Path]:
    """Make a temporary folder on the same disk as `into`, which is made for the files if need be."""
    with _made(into), tempfile.TemporaryDirectory(prefix=".spotfleet-", dir=into) as draft:
        yield Path(draft)


@contextmanager
def _made(into: Path) -> Iterator[None]:
    """Make the folder `into` if need be; remove it again if nothing is in it at the end."""
    if into.exists() and not into.is_dir():
        raise UsageError(f"{into} is no folder", hint="name one; it is made if need be")
    made = not into.exists()
    into.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if made and not any(into.iterdir()):
            into.rmdir()


def _moved(draft: Path, into: Path, progress: Progress) -> DownloadedOutputs:
    files = [p for p in sorted(draft.rglob("*")) if p.is_file()]
    size = sum(p.stat().st_size for p in files)
    for path in files:
        name = str(path.relative_to(draft))
        try:
            try:
                _move(path, into / name)
            except OSError as error:
                if not names.refuses_name(error):
                    raise
                _move(path, into / names.aside(name))
                progress(f"{name} is {names.aside(name)} here: {error.strerror}")
        except OSError as error:
            raise UsageError(f"{into / name} cannot be written: {error.strerror}", hint="name an empty folder"
                             ) from None
    return DownloadedOutputs(len(files), size)


def _move(path: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    atomic.rename(path, place, sync=False)  # they stay at the fleet
