"""A fake of Google Cloud Storage's XML API over loopback, as far as obstore calls it.

    with CloudStorage(["spot"]) as cloud:          # its buckets
        os.environ.update(cloud.environ())         # obstore, and so `ObjectStore("gs://spot/runs")`, comes here
        cloud.objects["spot", "runs/a"].content

A request needs a token that the account's key has signed; `cloud.allowed = False` takes the account's rights, and
`cloud.permitted` limits them to these permissions; those that were needed are in `cloud.used`. Pages of a listing have
two keys at most. `cloud.lose("POST", "uploadId")` loses the answer to the next such request, which takes effect;
`cloud.breaks_after` is the size at which an answer breaks off, as one that takes longer than a request may, and
`cloud.most_parts` limits the parts of an upload. Sources:
https://cloud.google.com/storage/docs/xml-api/reference-methods and
https://cloud.google.com/storage/docs/access-control/iam-xml.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ACCOUNT = "hosts@project.iam.gserviceaccount.com"
PAGE, XML = 2, b"<?xml version='1.0' encoding='UTF-8'?>"
LEAST_PART_BYTES, MOST_PARTS = 5 << 20, 10_000  # all parts but the last; numbers of parts
SCOPE = re.compile(r"https://www\.googleapis\.com/auth/(devstorage\.(read_write|full_control)|cloud-platform)")
QUERIES = {"list-type", "prefix", "delimiter", "continuation-token", "start-after", "max-keys", "uploads", "uploadId",
           "partNumber", "generation"}
# (method, subresource) -> permissions; a PUT over an existing object needs the right to delete it, too
NEEDED = {
    ("GET", "bucket"): {"storage.objects.list"}, ("GET", "object"): {"storage.objects.get"},
    ("HEAD", "object"): {"storage.objects.get"}, ("PUT", "object"): {"storage.objects.create"},
    ("DELETE", "object"): {"storage.objects.delete"},
    ("POST", "upload"): {"storage.multipartUploads.create", "storage.objects.create"},
    ("PUT", "upload"): {"storage.multipartUploads.create", "storage.objects.create"},
    ("DELETE", "upload"): {"storage.multipartUploads.abort"},
}
Answer = tuple[int, dict[str, str], bytes]


class StorageRefusal(Exception):
    """A status and a code of the API."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status


@dataclass(frozen=True)
class StoredObject:
    content: bytes
    generation: int
    at: float

    @property
    def etag(self) -> str:
        return _etag(self.content)

    def headers(self) -> dict[str, str]:
        return {"ETag": self.etag, "Last-Modified": formatdate(self.at, usegmt=True), "x-goog-metageneration": "1",
                "x-goog-generation": str(self.generation), "x-goog-stored-content-length": str(len(self.content))}


class CloudStorage:
    """The buckets. Only whole objects are in `objects`; `uploads` are those that were neither completed nor aborted."""

    def __init__(self, buckets: Iterable[str]) -> None:
        self.buckets, self.allowed = set(buckets), True
        self.objects: dict[tuple[str, str], StoredObject] = {}
        self.uploads: dict[str, tuple[tuple[str, str], dict[int, bytes]]] = {}
        self.requests: list[tuple[str, str]] = []
        self.most_parts, self.breaks_after = MOST_PARTS, 1 << 40
        self._lost: list[tuple[str, str]] = []
        self.permitted: frozenset[str] | None = None  # None: all
        self.used: set[str] = set()
        self._lock, self._count = threading.Lock(), itertools.count(1)

    def __enter__(self) -> CloudStorage:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.005,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environ(self, account: str = ACCOUNT) -> dict[str, str]:
        """Return a worker's environment, with the JSON key of the account; another one's tokens are refused."""
        url = "http://{}:{}".format(*self._server.server_address)
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({
            "type": "service_account", "client_email": account, "private_key_id": "1", "gcs_base_url": url,
            "private_key": _key().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()})}

    def lose(self, method: str, word: str) -> None:
        """Lose the answer to the next request with that word in its URL."""
        self._lost.append((method, word))

    def is_lost(self, method: str, url: str) -> bool:
        with self._lock:
            found = next((rule for rule in self._lost if rule[0] == method and rule[1] in url), None)
            if found:
                self._lost.remove(found)
            return found is not None

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        with self._lock:
            self.requests.append((method, url))
            try:
                return self._answer(method, url, headers, body)
            except StorageRefusal as error:
                text = f"<Error><Code>{error}</Code></Error>"
                return error.status, {"Content-Type": "application/xml; charset=UTF-8"}, XML + text.encode()

    def _answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        _check_token(headers.get("authorization", ""))
        parts = urlsplit(url)
        bucket, _, name = (unquote(text) for text in parts.path[1:].partition("/"))
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.used |= self._needed(method, (bucket, name), query)
        if not self.allowed or (self.permitted is not None
                                and not self.permitted >= self._needed(method, (bucket, name), query)):
            raise StorageRefusal(403, "AccessDenied")
        if bucket not in self.buckets:
            raise StorageRefusal(404, "NoSuchBucket")
        if unknown := query.keys() - QUERIES:
            raise StorageRefusal(400, f"InvalidArgument: the fake does not know {unknown}")
        if len(name.encode()) > 1024 or name in (".", "..") or "\r" in name or "\n" in name:
            raise StorageRefusal(400, "InvalidObjectName")
        if method in ("PUT", "POST") and "content-length" not in headers:
            raise StorageRefusal(411, "MissingContentLength")
        if not name and method == "GET":
            return self._list(bucket, query)
        if "uploads" in query or "uploadId" in query:
            return self._multipart(method, (bucket, name), query, body)
        held = self.objects.get((bucket, name))
        wanted = headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (held.generation if held else 0):
            raise StorageRefusal(412, "PreconditionFailed")
        if method == "PUT":
            return 200, self._store((bucket, name), body).headers(), b""
        if held is None or query.get("generation", str(held.generation)) != str(held.generation):
            raise StorageRefusal(404, "NoSuchKey")
        if method == "DELETE":
            del self.objects[bucket, name]
            return 204, {}, b""
        return _read(held, headers)

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Make an object as another program would, under any name."""
        with self._lock:
            self._store((bucket, name), content)

    def _store(self, key: tuple[str, str], content: bytes) -> StoredObject:
        self.objects[key] = made = StoredObject(content, next(self._count), time.time())
        return made

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        if query.get("list-type") != "2":
            raise StorageRefusal(400, "InvalidArgument: the fake has version 2 of listings alone")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        try:
            token = base64.b64decode(query.get("continuation-token", ""), validate=True).decode()
        except ValueError:
            raise StorageRefusal(400, "InvalidArgument") from None
        rows: dict[str, str] = {}
        for name in sorted((n for b, n in self.objects if b == bucket and n.startswith(prefix)), key=str.encode):
            folder, cut, _ = name[len(prefix):].partition(delimiter) if delimiter else ("", "", "")
            row, held = prefix + folder + cut if cut else name, self.objects[bucket, name]
            if row <= max(token, query.get("start-after", "")):
                continue
            at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(held.at))
            rows[row] = (f"<CommonPrefixes><Prefix>{escape(row)}</Prefix></CommonPrefixes>" if cut else
                         f"<Contents><Key>{escape(name)}</Key><Generation>{held.generation}</Generation>"
                         f"<MetaGeneration>1</MetaGeneration><LastModified>{at}</LastModified>"
                         f"<ETag>{held.etag}</ETag><Size>{len(held.content)}</Size></Contents>")
        shown = [*rows][:min(PAGE, int(query.get("max-keys", PAGE)))]
        more = len(shown) < len(rows)
        following = base64.b64encode(shown[-1].encode()).decode() if more else ""
        return _xml("ListBucketResult", f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
                    f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(shown)}</KeyCount>"
                    + (f"<NextContinuationToken>{following}</NextContinuationToken>" if more else "")
                    + "".join(rows[row] for row in shown))

    def _needed(self, method: str, key: tuple[str, str], query: Mapping[str, str]) -> set[str]:
        """Return the permissions that a request needs."""
        of_upload = "uploads" in query or "uploadId" in query
        needed = NEEDED.get((method, "bucket" if not key[1] else "upload" if of_upload else "object"), set())
        writes = (method == "PUT" and not of_upload) or (method == "POST" and "uploadId" in query)
        return needed | {"storage.objects.delete"} if writes and key in self.objects else needed

    def _multipart(self, method: str, key: tuple[str, str], query: Mapping[str, str], body: bytes) -> Answer:
        named = f"<Bucket>{key[0]}</Bucket><Key>{escape(key[1])}</Key>"
        if "uploads" in query:
            made = f"upload-{next(self._count)}"
            self.uploads[made] = key, {}
            return _xml("InitiateMultipartUploadResult", f"{named}<UploadId>{made}</UploadId>")
        of, parts = self.uploads.get(query["uploadId"], (None, {}))
        if of != key:
            raise StorageRefusal(404, "NoSuchUpload")
        if method == "PUT":
            if not 1 <= int(query["partNumber"]) <= self.most_parts:
                raise StorageRefusal(400, "InvalidArgument")
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": _etag(body)}, b""
        if method == "POST":
            stored = self._store(key, _whole(parts, body))
        del self.uploads[query["uploadId"]]
        if method == "DELETE":
            return 204, {}, b""
        status, headers, text = _xml("CompleteMultipartUploadResult", f"{named}<ETag>{stored.etag}</ETag>")
        return status, headers | {"x-goog-generation": str(stored.generation)}, text


def _whole(parts: Mapping[int, bytes], body: bytes) -> bytes:
    """Return the content of the parts that a request to complete an upload names."""
    named = [(int(part.findtext("{*}PartNumber") or 0), part.findtext("{*}ETag") or "")
             for part in ElementTree.fromstring(body).iterfind("{*}Part")]
    if not named:
        raise StorageRefusal(400, "MalformedCompleteMultipartUploadRequest")
    if [number for number, _ in named] != sorted({number for number, _ in named}):
        raise StorageRefusal(400, "InvalidPartOrder")
    if any(number not in parts or _etag(parts[number]) != etag for number, etag in named):
        raise StorageRefusal(400, "InvalidPart")
    if any(len(parts[number]) < LEAST_PART_BYTES for number, _ in named[:-1]):
        raise StorageRefusal(400, "EntityTooSmall")
    return b"".join(parts[number] for number, _ in named)


def _read(held: StoredObject, headers: Mapping[str, str]) -> Answer:
    if headers.get("if-match", held.etag) != held.etag:
        raise StorageRefusal(412, "PreconditionFailed")
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
    if asked is None:
        return 200, held.headers(), held.content
    size = len(held.content)
    first, last = asked[1], asked[2]
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= size:
        raise StorageRefusal(416, "InvalidRange")
    return 206, held.headers() | {"Content-Range": f"bytes {start}-{end - 1}/{size}"}, held.content[start:end]


def _check_token(authorization: str) -> None:
    """Refuse a token that the account has not signed for itself, or not for this service, or that is over."""
    try:
        signed, _, signature = authorization.removeprefix("Bearer ").rpartition(".")
        _key().public_key().verify(_base64url(signature), signed.encode(), padding.PKCS1v15(), SHA256())
    except (InvalidSignature, ValueError):
        raise StorageRefusal(401, "AuthenticationRequired") from None
    claims = json.loads(_base64url(signed.partition(".")[2]))
    if claims["iss"] != ACCOUNT or not SCOPE.search(claims["scope"]) or claims["exp"] < time.time():
        raise StorageRefusal(401, "AuthenticationRequired")


def _base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _xml(root: str, inside: str) -> Answer:
    text = f"<{root} xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>{inside}</{root}>"
    return 200, {"Content-Type": "application/xml; charset=UTF-8"}, XML + text.encode()


@cache
def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _handler(cloud: CloudStorage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            lowered = {name.lower(): value for name, value in self.headers.items()}
            status, headers, answer = cloud.answer(self.command, self.path, lowered, body)
            if cloud.is_lost(self.command, self.path):
                self.close_connection = True
                return
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            with contextlib.suppress(ConnectionError):  # the caller may have gone
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else answer[:cloud.breaks_after])
                self.close_connection |= len(answer) > cloud.breaks_after

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
