"""Permission documents that `check --policy` prints, for the user, a dispatcher or hosts. Sends no request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spotfleet import config, names
from spotfleet.api.home import Home
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec
from spotfleet.plugins import JOINED, Base
from spotfleet.providers.plugin import CloudPlugin, Policies, usable
from spotfleet.providers.several import for_part


def with_policies() -> list[CloudPlugin]:
    """List the plugins of clouds whose documents can be printed."""
    return [plugin for plugin in usable() if plugin.policies is not None]


def document(home: Home, provider: str, role: str, file: Path | None, base: Base | None = None) -> dict[str, Any]:
    """Return the policy of `role` for any fleet; exactly for the fleet of `file`, on `base` if there is one, or for the
    only fleet there is.

    `provider`: "" for the one of `file`, or for the only one with policies. Of a fleet on several clouds each has its
    own. `role`: "" for the provider's first. Raises
    UsageError where the policy depends on a fleet and there is none.
    """
    spec = config.load(file, given=config.Given(base=base)).spec if file is not None else None
    if spec is not None and provider in (parts := spec.provider.split(JOINED)) and len(parts) > 1:
        spec = for_part(spec, provider)
    able = {plugin.name: plugin.policies for plugin in with_policies()}
    name = provider or (spec.provider if spec else next(iter(able)) if len(able) == 1 else "")
    if spec is not None and JOINED in spec.provider:
        words = " ".join(word for word in (spec.provider.partition(JOINED)[0], "--policy", role, str(file)) if word)
        raise UsageError(f"{file} is of {spec.provider.replace(JOINED, ' and ')}: say whose policy",
                         hint=f"spotfleet check {words}")
    if spec is not None and (spec.provider not in able or spec.provider != name):
        raise UsageError(f"{file} is of provider {spec.provider}" + ("" if spec.provider in able else
                                                                     ", which has no policies"),
                         hint=f"name a fleet file with `provider: {' or '.join([provider] if provider else able)}`")
    policies: Policies | None = able.get(name)
    if policies is None:
        raise UsageError(f"say whose policy: {', '.join(able)}", hint="spotfleet check PROVIDER --policy")
    return policies.document(role or policies.roles[0], *_fleet(home, name, spec))


def _fleet(home: Home, provider: str, spec: FleetSpec | None) -> tuple[FleetSpec | None, str]:
    """Return the fleet's spec, and its name in the cloud or a pattern of all names that it may get there."""
    if spec is not None:
        return spec, names.any_life(spec.name)
    found = [f for f in home.living() if f.readable and f.record.spec.provider == provider]
    return (found[0].record.spec, found[0].record.cloud_name) if len(found) == 1 else (None, "")
