from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ssh_provider.sshd_machines import Machines, why_not


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A machine for the dispatcher and one for workers, or as many as the module's WORKERS says."""
    if missing := why_not():
        pytest.skip(missing)
    workers = [f"w{n}" for n in range(getattr(request.module, "WORKERS", 1))]
    with Path(tempfile.gettempdir(), f"spotfleet-ssh-tests-{os.getuid()}").open("w") as lock:
        # All these machines are this one. A host is ended by its name in the environment of its processes, and these
        # files name their hosts alike: one file at a time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with Machines(tmp_path_factory.mktemp("ssh") / "machines", ["head", *workers]) as made:
            yield made


@pytest.fixture
def machines(running: Machines) -> Iterator[Machines]:
    """The module's machines, which the fleet's key opens; those who change one need not change it back."""
    running.admit()
    yield running
    running.renew()
