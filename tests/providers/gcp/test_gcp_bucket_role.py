"""The role of hosts on their bucket, `spotfleet check gcp --policy host`, on a fake that asks for its permissions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfleet.providers.gcp.mapping import roles
from spotfleet.storage.object_store import ObjectStore
from tests.support.fakes.cloud_storage import CloudStorage


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStorage]:
    pytest.importorskip("obstore")
    with CloudStorage(["spot"]) as cloud:
        for name, value in cloud.environ().items():
            monkeypatch.setenv(name, value)
        yield cloud


def test_a_hosts_role_has_what_checkpoints_need_and_no_more(bucket):
    bucket.permitted = frozenset(roles.document("host")["includedPermissions"])
    store, block = ObjectStore("gs://spot/runs"), bytes(1 << 20)
    store.put("small", [b"x"])
    store.put("large", [block] * 12)  # in parts
    store.put("large", [block] * 12)
    with pytest.raises(OSError, match="instead of 7"):
        store.put("broken", [block] * 12, size=7)  # its upload is aborted
    assert b"".join(store.get("small")) == b"x" and sorted(e.key for e in store.list()) == ["large", "small"]
    store.delete("small")
    assert bucket.used == bucket.permitted and bucket.uploads == {}
