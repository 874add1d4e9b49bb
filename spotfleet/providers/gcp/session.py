"""Access to Google Cloud: settings, clients, credentials. The SDK is imported on first use.

One GcpAccount exists per configuration and process; everything it caches can be requested again. Requests go through
the SDK's REST clients and answer as dicts with the SDK's names of fields. Operations are waited for with our own
client: the SDK's `result()` would ask the default endpoint, whatever endpoint the request went to.

Credentials are Application Default Credentials: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default
login`, or the metadata server of a machine of Google Cloud.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.plugins import Sdk
from spotfleet.providers.gcp.mapping import errors, names
from spotfleet.providers.gcp.spec import GcpSpec, spec_in, unreadable
from spotfleet.providers.kit import images
from spotfleet.providers.kit.cache import AnswerCache
from spotfleet.providers.kit.mapping.errors import ASKED_AGAIN
from spotfleet.providers.kit.requests import Paces
from spotfleet.providers.kit.settings import CloudSettings, read_settings
from spotfleet.providers.kit.userdata import MachineSetup
from spotfleet.version import install

ENDPOINT = "SPOTFLEET_GCP_ENDPOINT"  # another server for all of Google's services
PROJECTS = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
PRODUCT = "/sys/class/dmi/id/product_name"  # "Google Compute Engine" on its machines
INSTALL = install("gcp")
ASK_S = 30.0
LAUNCH_S = 60.0  # for a launch and its operation, on the laptop
MOMENT_S = 5.0  # the same on the dispatcher, whose tick handles no notice meanwhile
POLL_S = 1.0
SDK = Sdk(("gcp",), ("google.cloud.compute_v1",))
ATTEMPTS, PAUSE_S = 3, 0.5  # for requests that change nothing
WAIT_S = 300.0  # for an operation; one that takes longer is asked for again by the next tick
ZONES_S = 24 * 3600.0
CHANGES_PER_S, CHANGES_AT_ONCE = 10.0, 20  # Compute Engine takes 1500 changes a minute and region
PASSING = ("429", "500", "502", "503", "504", "rateLimitExceeded", "userRateLimitExceeded", "backendError",
           "internalError")

UNREACHABLE = "UNREACHABLE"  # a scope of an aggregated list that does not answer

T = TypeVar("T")


@dataclass(frozen=True)
class GcpSettings(CloudSettings):
    """The configuration of provider gcp, parsed."""

    spec: GcpSpec = field(default_factory=GcpSpec)

    @property
    def machine(self) -> MachineSetup:
        """Return what user data of a machine holds besides its launch request."""
        return MachineSetup(images.environment(self.environment, self.spec.image),
                            bool(self.spec.image) and not self.spec.dispatcher_image,
                            self.spec.dispatcher_image == images.OURS, self.public_key, self.secret, self.spec.user,
                            False, names.METADATA_URL, *self.sdks(SDK))


def settings_of(config: Mapping[str, Any]) -> GcpSettings:
    """Parse the configuration. Raises UsageError for an invalid value."""
    return read_settings(GcpSettings, spec_in(config), config, config.get("environment"), unreadable)


def lacking(scopes: Sequence[str]) -> SpotfleetError:
    return SpotfleetError(f"gcp: the list lacks {', '.join(map(names.last, scopes))}", hint=ASKED_AGAIN)


def project_of(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in PROJECTS if environ.get(name)), "")


def may_have_credentials(environ: Mapping[str, str]) -> bool:
    """Check environment, files and this machine: without credentials the SDK would wait seconds for a metadata server,
    which machines elsewhere lack."""
    home = environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud"
    file = os.path.expanduser(os.path.join(home, "application_default_credentials.json"))
    if environ.get("GOOGLE_APPLICATION_CREDENTIALS") or environ.get("GCE_METADATA_HOST") or os.path.isfile(file):
        return True
    if environ.get("NO_GCE_CHECK", "").lower() == "true":
        return False
    try:
        return Path(PRODUCT).read_text().startswith("Google")
    except OSError:
        return False


class GcpAccount(AnswerCache):
    """A project of Google Cloud under one configuration."""

    def __init__(self, settings: GcpSettings) -> None:
        super().__init__()
        self.settings = settings
        self._lock = threading.RLock()
        self._credentials: tuple[Any, str] | None = None
        self._clients: dict[str, Any] = {}
        self._paces = Paces(CHANGES_AT_ONCE, CHANGES_PER_S)
        self._listed: dict[str, dict[str, list[dict[str, Any]]]] = {}  # what is listed -> its last list, by scope

    # ---- the project

    @property
    def project(self) -> str:
        """Return the project's id. Raises NeedsPerson if nothing names one."""
        found = self.settings.spec.project or project_of(os.environ) or self._found_credentials()[1]
        if not found:
            raise NeedsPerson("gcp: no project is named", hint="write `gcp: {project: ID}`, or `gcloud auth "
                              "application-default set-quota-project ID`; `gcloud projects list` shows the ids")
        return found

    @property
    def regions(self) -> tuple[str, ...]:
        """Return the regions for launches: those of the configuration, or else all of the project's."""
        return self.settings.spec.regions or self.all_regions()

    def zones(self) -> tuple[str, ...]:
        """List the project's zones that are up, sorted."""
        def ask() -> tuple[str, ...]:
            return tuple(sorted(z["name"] for page in self.pages("zones", "list") for z in page.get("items") or ()
                                if z.get("status", "UP") == "UP"))

        return self.cached("zones", ZONES_S, ask)

    def all_regions(self) -> tuple[str, ...]:
        return tuple(sorted({names.region_of(zone) for zone in self.zones()} - {""}))

    def pace(self, what: str, region: str) -> None:
        """Wait until another one of `what` ("launch" or "end") is due in `region`."""
        self._paces.wait((what, region))

    # ---- Compute Engine

    def ask(self, service: str, method: str, where: str = "", *, limit_s: float = ASK_S,
            **fields: Any) -> dict[str, Any]:
        """Send a request that changes nothing; what passes by itself is tried again."""
        return self._patiently(lambda: self._call(service, method, where, limit_s, fields))

    def change(self, service: str, method: str, where: str = "", *, limit_s: float = ASK_S,
               **fields: Any) -> dict[str, Any]:
        """Send a request that changes something, once; return its operation."""
        return self._call(service, f"{method}_unary", where, limit_s, fields)

    def pages(self, service: str, method: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list."""
        token = ""
        while True:
            page = self.ask(service, method, **fields, **({"page_token": token} if token else {}))
            yield page
            token = page.get("next_page_token", "")
            if not token:
                return

    def everywhere(self, service: str, key: str, *, memory: str = "", zones: Collection[str] = (),
                   **fields: Any) -> list[dict[str, Any]]:
        """List the things of all zones and regions. A machine that is missing from a list counts as ended, so a zone
        that does not answer has the things of the last list with the same `memory`. Raises SpotfleetError without one.
        Zones other than `zones` need not answer, where these are given."""
        found, silent = self.scopes(service, key, zones=zones, **fields)
        known = self._listed.get(memory, {})
        if missing := [s for s in silent if s not in known]:
            raise lacking(missing)
        found |= {scope: known[scope] for scope in silent if scope in known}
        if memory:
            self._listed[memory] = found
        return [thing for things in found.values() for thing in things]

    def scopes(self, service: str, key: str, *, zones: Collection[str] = (),
               **fields: Any) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
        """List the things by their scope, as "zones/us-central1-a"; and name the scopes that do not answer, of zones
        only `zones` where these are given."""
        found: dict[str, list[dict[str, Any]]] = {}
        silent: set[str] = set()
        for page in self.pages(service, "aggregated_list", **fields):
            silent |= {"/".join(link.split("/")[-2:]) for link in page.get("unreachables") or ()}
            for scope, of in (page.get("items") or {}).items():
                found.setdefault(scope, []).extend(of.get(key) or ())
                if (of.get("warning") or {}).get("code") == UNREACHABLE:
                    silent.add(scope)
        matters = {s for s in silent if not (zones and s.startswith("zones/") and names.last(s) not in zones)}
        return {s: things for s, things in found.items() if s not in silent}, sorted(matters)

    def wait(self, operation: Mapping[str, Any], name: str, where: str = "", limit_s: float = WAIT_S) -> None:
        """Wait for an operation. Raises its error, or SpotfleetError after `limit_s`.

        `name`: the request's, as "instances.insert".
        """
        if not self.ended(operation, name, where, limit_s):
            raise SpotfleetError(f"{self._where(where)}: {name} has not ended within {limit_s:.0f} s", hint=ASKED_AGAIN)

    def ended(self, operation: Mapping[str, Any], name: str, where: str, limit_s: float) -> bool:
        """Return whether an operation ends within `limit_s`. Raises its error.

        The operation is polled: the request `wait` of Compute Engine would hold us for up to two minutes.
        """
        deadline, found = time.monotonic() + limit_s, dict(operation)
        while found.get("status") != "DONE":
            service, place = self._place(found)
            found = self.ask(service, "get", where, operation=found["name"], **place)
            left_s = deadline - time.monotonic()
            if found.get("status") != "DONE":
                if left_s <= 0:
                    return False
                time.sleep(min(POLL_S, left_s))
        if error := self.failure(found, name, where):
            raise error
        return True

    def failure(self, operation: Mapping[str, Any], name: str, where: str) -> SpotfleetError | None:
        """Return the error of an operation that has ended, if it has one."""
        return errors.of_operation(self._where(where), operation, name, project=self._named_project(),
                                   laptop=self.settings.laptop)

    @staticmethod
    def _place(operation: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
        if operation.get("zone"):
            return "zone_operations", {"zone": names.last(operation["zone"])}
        if operation.get("region"):
            return "region_operations", {"region": names.last(operation["region"])}
        return "global_operations", {}

    def _patiently(self, call: Callable[[], T]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except SpotfleetError as error:
                passing = errors.code(error) in PASSING or getattr(error, "cut_off", False)
                if attempt == ATTEMPTS - 1 or not passing:
                    raise
            time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError

    def _call(self, service: str, method: str, where: str, limit_s: float, fields: Mapping[str, Any]) -> dict[str, Any]:
        client, project = self._client(service), self.project
        operation = f"{_camel(service)}.{_camel(method.removesuffix('_unary'))}"
        call = getattr(client, method)
        with _Translated(self, self._where(where), operation):
            answer = call(request={"project": project, **fields}, retry=None, timeout=limit_s)
            if hasattr(answer, "pages"):
                answer = next(iter(answer.pages))
            return type(answer).to_dict(answer, preserving_proto_field_name=True, use_integers_for_enums=False,
                                        always_print_fields_with_no_presence=False)

    def _client(self, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                compute, credentials = _sdk(), self._found_credentials()[0]
                from google.api_core.client_options import ClientOptions

                made = getattr(compute, "".join(w.capitalize() for w in service.split("_")) + "Client")
                endpoint = self.settings.endpoint_url
                self._clients[service] = made(credentials=credentials, client_options=ClientOptions(
                    api_endpoint=endpoint) if endpoint else None)
            return self._clients[service]

    def _where(self, where: str) -> str:
        return f"gcp {where or self._named_project()}".rstrip()

    def _named_project(self) -> str:
        return self.settings.spec.project or project_of(os.environ)

    # ---- credentials, and services besides Compute Engine

    def rest(self, service: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], float]:
        """Ask another service of Google's, as "cloudresourcemanager": GET, or POST with a body. Return the answer and
        the time that it names."""
        _sdk()
        credentials = self._found_credentials()[0]
        from google.auth.transport.requests import AuthorizedSession

        base = self.settings.endpoint_url or f"https://{service}.googleapis.com"
        with _Translated(self, self._where(""), service):
            with AuthorizedSession(credentials) as session:
                answer = session.request("POST" if body is not None else "GET", f"{base}{path}", json=body,
                                         timeout=ASK_S)
            if answer.status_code >= 400:
                from google.api_core.exceptions import from_http_response

                raise from_http_response(answer)
            at = parsedate_to_datetime(answer.headers.get("Date", "")).timestamp()
            return answer.json(), at

    def time(self) -> float:
        """Return Google's time, to the second."""
        return self.rest("compute", f"/compute/v1/projects/{self.project}/zones?maxResults=1")[1]

    def credentials_name(self) -> str:
        """Return the service account or kind of the credentials, for messages."""
        found = self._found_credentials()[0]
        return str(getattr(found, "service_account_email", "") or type(found).__module__.rpartition(".")[2])

    def _found_credentials(self) -> tuple[Any, str]:
        with self._lock:
            if self._credentials is None:
                _sdk()
                if key := self.settings.credentials.get("key"):
                    from google.oauth2 import service_account

                    info = json.loads(key)
                    self._credentials = service_account.Credentials.from_service_account_info(
                        info, scopes=[SCOPE]), info.get("project_id", "")
                    return self._credentials
                if not may_have_credentials(os.environ):
                    raise NeedsPerson(f"{self._where('')}: no credentials", hint=errors.LOGIN)
                import google.auth

                with _Translated(self, "gcp", "credentials"):
                    found, project = google.auth.default(scopes=[SCOPE])
                self._credentials = found, project or ""
            return self._credentials

    def renew(self) -> None:
        """Make the next call search for credentials as a new process would."""
        with self._lock:
            self._credentials, self._clients = None, {}


class _Translated:
    """Translator of the SDK's exceptions into ours."""

    def __init__(self, account: GcpAccount, where: str, operation: str) -> None:
        self._account, self._where, self._operation = account, where, operation

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            return
        from google.api_core.exceptions import GoogleAPICallError, RetryError
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
        from requests.exceptions import RequestException

        match error:
            case GoogleAPICallError():
                raise self._refused(error) from error
            case DefaultCredentialsError():
                raise NeedsPerson(f"{self._where}: no credentials: {_line(error)}",
                                  hint=self._login()) from error
            case TransportError() | RequestException() | RetryError() | OSError():
                found = SpotfleetError(f"{self._where}: {self._operation} was not answered: {_line(error)}",
                                       hint=ASKED_AGAIN)
                found.cut_off = True  # type: ignore[attr-defined]
                raise found from error
            case GoogleAuthError():
                self._account.renew()
                raise NeedsPerson(f"{self._where}: the credentials are refused: {_line(error)}",
                                  hint=self._login()) from error
            case ValueError() | TypeError():
                raise SpotfleetError(f"{self._where}: {self._operation}: {_line(error)}",
                                     hint="install google-cloud-compute again: " + INSTALL) from error

    def _refused(self, error: Any) -> SpotfleetError:
        reasons = [e.get("reason", "") for e in error.errors or () if isinstance(e, dict)]
        reason = next((r for r in reasons if r), "") or str(int(error.code or 0))
        message = str(error.message or "").partition(": ")[2] or str(error.message or "")
        if reason == "required" and error.code != 401:  # a missing field, and no missing login
            reason = "invalid"
        if reason in ("required", "authError", "401"):
            self._account.renew()
        return errors.refusal(self._where, reason, message, self._operation, project=self._account._named_project(),
                              laptop=self._account.settings.laptop)

    def _login(self) -> str:
        return errors.LOGIN if self._account.settings.laptop else "give the dispatcher's machine a service account"


def _sdk() -> Any:
    try:
        from google.cloud import compute_v1
    except ImportError as error:
        raise NeedsPerson(f"provider gcp needs google-cloud-compute: {error}", hint=INSTALL) from error
    return compute_v1


def _camel(name: str) -> str:
    first, *more = name.split("_")
    return first + "".join(word.capitalize() for word in more)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


@lru_cache(maxsize=64)
def _account(config: str) -> GcpAccount:
    return GcpAccount(settings_of(json.loads(config)))


def account_of(config: Mapping[str, Any]) -> GcpAccount:
    """Return the GcpAccount of this configuration; the same one as long as the process lives."""
    return _account(json.dumps(config, sort_keys=True))


def reset() -> None:
    """Forget every GcpAccount of this process, as a new process would begin; those in use stay usable."""
    _account.cache_clear()
