"""The promises of `DurableStore`, kept by each of its backends."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from spotfleet.storage import object_store, s3
from spotfleet.storage.folder import FolderStore
from spotfleet.storage.object_store import ObjectStore
from spotfleet.storage.store import DurableStore, UnsafeKey
from tests.support.fakes import cloud_storage
from tests.support.fakes.cloud_storage import CloudStorage

DATA = b"0123456789"


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudStorage]:
    """Google Cloud Storage with a bucket `spot`, in the environment as a worker finds it."""
    pytest.importorskip("obstore")
    with CloudStorage(["spot"]) as cloud:
        for name, value in cloud.environ().items():
            monkeypatch.setenv(name, value)
        yield cloud


@pytest.fixture(params=["folder", "memory://root", "memory://root/a/prefix", "file://", "gs://spot", "gs://spot/a/b"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DurableStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path)
        return
    pytest.importorskip("obstore")
    if request.param.startswith("gs://"):
        request.getfixturevalue("google")
    yield ObjectStore(f"file://{tmp_path}" if request.param == "file://" else request.param)
    object_store.reset()


def test_content_is_read_whole_and_by_ranges(store: DurableStore):
    assert store.put("jobs/a/b", [DATA[:4], DATA[4:]]) == hashlib.sha256(DATA).hexdigest()
    assert b"".join(store.get("jobs/a/b")) == DATA
    assert b"".join(store.get("jobs/a/b", start=3, end=7)) == b"3456"
    assert b"".join(store.get("jobs/a/b", start=8)) == b"89"
    for start, end in ((8, 12), (0, 100), (10, 12), (50, 60), (10, None), (50, None), (7, 7)):
        assert b"".join(store.get("jobs/a/b", start=start, end=end)) == DATA[start:end]  # what is there of it
    store.put("jobs/a/b", [b"other"], size=5)
    assert b"".join(store.get("jobs/a/b")) == b"other"


def test_keys_are_listed_in_order_below_a_folder(store: DurableStore):
    for key in ("b", "a/2", "a/1", "ab"):
        store.put(key, [DATA])
    assert [(e.key, e.bytes) for e in store.list()] == [(key, 10) for key in ("a/1", "a/2", "ab", "b")]
    assert [e.key for e in store.list("a")] == ["a/1", "a/2"] and all(e.mtime > 0 for e in store.list())
    assert [(e.key, e.bytes) for e in store.list("a/1")] == [("a/1", 10)]  # the key itself
    assert list(store.list("none")) == []


def test_a_deleted_key_is_gone_and_may_be_deleted_again(store: DurableStore):
    store.put("a", [DATA])
    for _ in range(2):
        store.delete("a")
        assert list(store.list()) == []
    for end in (None, 3):
        with pytest.raises(FileNotFoundError):
            list(store.get("a", end=end))


def test_content_that_breaks_off_or_has_another_size_is_not_stored(store: DurableStore):
    store.put("a", [b"old"])

    def broken() -> Iterator[bytes]:
        yield DATA
        raise OSError("the disk of the sender")

    for put in (lambda: store.put("a", broken()), lambda: store.put("a", [DATA], size=11)):
        with pytest.raises(OSError):
            put()
    assert b"".join(store.get("a")) == b"old" and [e.key for e in store.list()] == ["a"]


def test_no_key_leads_out_of_a_store(store: DurableStore):
    for key in ("", "/a", "../a", "a/../../b", "a//b", "./a"):
        for act in (lambda key=key: store.put(key, [DATA]), lambda key=key: list(store.get(key)),
                    lambda key=key: store.delete(key)):
            with pytest.raises(UnsafeKey):
                act()


def test_a_large_object_goes_to_google_in_parts_and_one_that_breaks_off_leaves_none(google: CloudStorage):
    store, block = ObjectStore("gs://spot/runs"), bytes(1 << 20)
    assert store.put("whole", [block] * 9) == hashlib.sha256(block * 9).hexdigest()
    assert sorted(url.partition("?")[2].partition("&")[0] for method, url in google.requests if method == "PUT") == [
        "partNumber=1", "partNumber=2"]
    with pytest.raises(OSError, match="instead of 10"):
        store.put("broken", [block] * 9, size=10)
    store.put("empty", [])
    assert {key: len(held.content) for key, held in google.objects.items()} == {
        ("spot", "runs/whole"): 9 << 20, ("spot", "runs/empty"): 0}
    assert google.uploads == {}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a kilobyte, for us and for the fake."""
    for module, name in ((object_store, "PART_BYTES"), (object_store, "MIB"), (cloud_storage, "LEAST_PART_BYTES")):
        monkeypatch.setattr(module, name, 1 << 10)


@pytest.mark.usefixtures("small_parts")
def test_a_large_object_has_parts_so_large_that_their_number_is_allowed(google: CloudStorage, monkeypatch):
    google.most_parts = 3
    monkeypatch.setattr(object_store, "MOST_PARTS", 3)
    store = ObjectStore("gs://spot/runs")
    store.put("whole", [b"content!"] * 512, size=1 << 12)  # four parts of the usual size
    assert google.objects["spot", "runs/whole"].content == b"content!" * 512


def test_84_gb_of_one_rank_go_in_fewer_than_10000_parts():
    for size in (0, 1, 8 << 20, 80_000 << 20, (80_000 << 20) + 1, 84 * 10**9, 5 << 40, 48 << 40):
        part = object_store.part_bytes(size)
        assert 5 << 20 <= part <= 5 << 30 and -(-size // part) <= 10_000
    assert object_store.part_bytes(None) == object_store.part_bytes(1) == object_store.PART_BYTES


@pytest.mark.usefixtures("small_parts")
def test_an_upload_whose_last_answer_is_lost_is_stored_and_an_older_object_is_not_taken_for_it(google: CloudStorage):
    store, content = ObjectStore("gs://spot/runs"), [b"content!"] * 200
    google.lose("POST", "uploadId")
    assert store.put("whole", content) == hashlib.sha256(b"".join(content)).hexdigest()
    assert google.objects["spot", "runs/whole"].content == b"".join(content)

    def ended_by_a_rule() -> Iterator[bytes]:
        yield from [b"another!"] * 200
        google.uploads.clear()

    with pytest.raises(OSError, match="not found"):
        store.put("whole", ended_by_a_rule())
    assert b"".join(store.get("whole")) == b"".join(content)


def test_a_small_object_is_one_request(google: CloudStorage):
    store = ObjectStore("gs://spot/runs")
    store.put("small", [DATA])
    assert [method for method, url in google.requests if url.endswith("small")] == ["PUT"]
    google.requests.clear()
    assert b"".join(store.get("small")) == DATA
    assert [method for method, _ in google.requests] == ["GET"]


def test_a_large_object_comes_in_pieces_none_of_which_takes_longer_than_a_request_may(google, monkeypatch):
    """obstore's limit of time holds for a whole answer, and for all its repetitions together."""
    monkeypatch.setattr(object_store, "PIECE_BYTES", 1 << 12)
    content = hashlib.shake_128(b"content").digest((1 << 16) + 5)
    google.put("spot", "runs/large", content)
    google.breaks_after = 1 << 12
    store = ObjectStore("gs://spot/runs")
    assert b"".join(store.get("large")) == content
    assert b"".join(store.get("large", start=5000, end=60_000)) == content[5000:60_000]
    assert len(google.requests) == 17 + 14


def test_an_object_that_is_replaced_while_it_is_read_gives_no_mixture(google: CloudStorage, monkeypatch):
    monkeypatch.setattr(object_store, "PIECE_BYTES", 4)
    monkeypatch.setattr(object_store, "STREAMS", 1)
    google.put("spot", "runs/a", DATA)
    reading = ObjectStore("gs://spot/runs").get("a")
    assert next(reading) == b"0123"
    google.put("spot", "runs/a", b"abcdefghij")
    with pytest.raises(OSError, match="was changed while it was read"):
        list(reading)


ACTS = {"put": lambda store: store.put("a", [DATA]), "get": lambda store: [*store.get("a")],
        "list": lambda store: [*store.list()], "delete": lambda store: store.delete("a")}


@pytest.mark.parametrize("act", ACTS)
def test_what_google_refuses_names_the_bucket_or_the_credentials(google: CloudStorage, monkeypatch, act: str):
    def refused(url: str) -> str:
        with pytest.raises(OSError) as error:
            ACTS[act](ObjectStore(url))
        return str(error.value)

    denied = ("access is denied: these credentials may not use gs://spot/a (GOOGLE_SERVICE_ACCOUNT_KEY, or the "
              "machine's role)")
    google.allowed = False
    assert refused("gs://spot/a") == denied
    google.allowed = True
    for name, value in google.environ(account="somebody@else").items():
        monkeypatch.setenv(name, value)
    assert refused("gs://spot/a") == denied


def test_a_bucket_that_google_has_not_is_named(google: CloudStorage):
    for act in ("put", "list"):
        with pytest.raises(OSError, match=r"^there is no bucket 'other' "):
            ACTS[act](ObjectStore("gs://other/a"))


S3_REFUSES = {
    "Received redirect without LOCATION, this normally indicates an incorrectly configured region":
        "bucket 'b' is in region eu-west-1, not in us-west-2: set AWS_REGION to the bucket's region under `envs`",
    "400 Bad Request: <Error><Code>AuthorizationHeaderMalformed</Code><Message>the region 'us-west-2' is wrong":
        "bucket 'b' is in region eu-west-1, not in us-west-2: set AWS_REGION to the bucket's region under `envs`",
    "400 Bad Request: <Error><Code>ExpiredToken</Code>": "the credentials have expired: ",
    "403 Forbidden: <Error><Code>AccessDenied</Code><Message>User: arn:aws:sts::1:assumed-role/x/i-1 is not authorized "
    "to perform: kms:GenerateDataKey on resource: arn:aws:kms:us-east-1:1:key/x":
        "the KMS key that encrypts s3://b/p cannot be used (kms:GenerateDataKey): ",
    "400 Bad Request: <Error><Code>KMS.DisabledException</Code>":
        "the KMS key that encrypts s3://b/p cannot be used (KMS.DisabledException): ",
    "403 Forbidden: <Error><Code>InvalidObjectState</Code>": "the object at s3://b/p is archived (Glacier): ",
    "400 Bad Request: <Error><Code>InvalidRequest</Code><Message>Content-MD5 OR x-amz-checksum- HTTP header is required"
    " for Put Object requests with Object Lock parameters": "the bucket of s3://b/p has Object Lock, ",
    "403 Forbidden: <Error><Code>AccessDenied</Code>": "access is denied: ",
    "503 Service Unavailable: <Error><Code>SlowDown</Code>": "",
}


@pytest.mark.parametrize("text", S3_REFUSES)
def test_what_s3_refuses_is_explained_by_its_reason(monkeypatch, text: str):
    monkeypatch.setattr(s3, "region_of", lambda bucket: "eu-west-1")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    found = object_store.refusal("s3://b/p", PermissionError(text) if "403" in text else OSError(text))
    assert found.startswith(S3_REFUSES[text]) and bool(found) == bool(S3_REFUSES[text])


@pytest.fixture
def s3_anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """S3 as it answers to anybody, in the environment of a machine that has no settings."""
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            status, region = {"/here": (403, "us-east-1"), "/far.away": (301, "eu-west-1")}.get(self.path, (404, ""))
            self.send_response(status)
            if region:
                self.send_header("x-amz-bucket-region", region)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for name in (*s3.REGION, *s3.ENDPOINT):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.005,))
        thread.start()
        monkeypatch.setattr(s3, "ANYWHERE", f"http://127.0.0.1:{server.server_port}")
        yield asked
        server.shutdown()
        thread.join()


def test_the_region_of_a_bucket_is_looked_up_once_where_no_setting_names_it(s3_anywhere: list[str], monkeypatch):
    pytest.importorskip("obstore")

    def region(url: str) -> object:
        return object_store.open_store(url)[0].config.get("region")

    assert [region("s3://far.away/runs"), region("s3://far.away/other"), region("s3://here")] == [
        "eu-west-1", "eu-west-1", "us-east-1"]
    assert region("s3://nobodys") is None
    assert s3_anywhere == ["/far.away", "/here", "/nobodys"]
    monkeypatch.setenv("AWS_REGION", "ap-south-1")
    assert region("s3://elsewhere/runs") is None  # obstore reads it
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # another server than S3
    assert region("s3://elsewhere/runs") is None and "/elsewhere" not in s3_anywhere
    assert "bucket 'far.away' is in region eu-west-1: set" in s3.other_region("s3://far.away/runs")


def test_where_s3_does_not_answer_it_is_not_asked_at_each_checkpoint(monkeypatch):
    asked: list[str] = []

    def away(_address: str, bucket: str) -> str:
        asked.append(bucket)
        raise TimeoutError

    monkeypatch.setattr(s3, "_asked", away)
    monkeypatch.setattr(s3, "_asked_next", 0.0)
    assert [s3.region_of("a"), s3.region_of("a"), s3.region_of("b")] == ["", "", ""] and asked == ["a"]


def test_a_laptop_reads_a_bucket_with_the_credentials_of_its_profile(tmp_path: Path, monkeypatch):
    pytest.importorskip("obstore")
    for name in (*s3.KEYS, *s3.FILES, "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert "credential_provider" not in s3.settings("s3://b/p")  # a machine with a role: obstore asks for it
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("".join(
        f"[{name}]\naws_access_key_id = AKIA{name}\naws_secret_access_key = s\n" for name in ("default", "lab")))
    assert s3.settings("s3://b/p")["credential_provider"]()["access_key_id"] == "AKIAdefault"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert s3.settings("s3://b/p")["credential_provider"]()["access_key_id"] == "AKIAlab"
    assert ObjectStore("s3://b/p")  # obstore takes it
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(OSError, match=r"the credentials cannot be read: .*\(nobodys\) could not be found"):
        ObjectStore("s3://b/p")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAjob")
    assert "credential_provider" not in s3.settings("s3://b/p")


def test_a_request_refused_for_this_machines_clock_may_pass_on_another():
    assert object_store.refusal("s3://b", PermissionError("403 Forbidden: <Code>RequestTimeTooSkewed</Code>")) == ""
