"""Meaning of an engine's error messages: what a user reads, and whether another host would fail as well. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 600


@dataclass(frozen=True)
class Refusal:
    """Failure of a container. `sure`: another host would get the same error."""

    text: str
    sure: bool = False


# The first match counts: a registry also refuses an image that does not exist, and then names both reasons.
_RULES = (
    (r"could not select device driver|nvidia-container-cli|unknown or invalid runtime name: nvidia"
     r"|unresolvable CDI devices|exec: \"nvidia-container-runtime\"",
     "this host has GPUs, but {engine} cannot give them to a container: install nvidia-container-toolkit on the host, "
     "then run {configure}", False),
    (r"permission denied while trying to connect|dial unix .*permission denied",
     "the agent's user may not use {engine}: add it to group docker, or install Podman, which needs no rights", False),
    (r"Cannot connect to the Docker daemon|Is the docker daemon running|failed to connect to the docker API",
     "the Docker daemon of this host does not run: start it (systemctl enable --now docker)", False),
    (r"toomanyrequests|rate limit", "the registry limits how often this address may fetch {image}: give the "
     "credentials of an account ({login})", False),
    (r"unauthorized|authentication required|no basic auth credentials|incorrect username or password"
     r"|access forbidden|requested access to the resource is denied|\b403\b|denied: ",
     "the registry refuses to give {image}: it does not exist, or needs other credentials ({login})", True),
    (r"exec: \\?\"sh\\?\"|\bsh\b.*(no such file|not found in \$PATH)",
     "the image {image} has no shell: jobs need `sh` in it", True),
    (r"manifest unknown|manifest for .* not found|name unknown|not found|repository does not exist",
     "there is no image {image}: check its name and tag", True),
    (r"no matching manifest|exec format error",
     "the image {image} is not made for this host's processor", True),
    (r"no space left on device", "this host's disk is full: {image} does not fit; set a larger `disk_size`", False),
    (r"no such host|i/o timeout|connection refused|TLS handshake|failure in name resolution|deadline exceeded",
     "the registry of {image} cannot be reached from this host", False),
)
_CONFIGURE = {"docker": "`nvidia-ctk runtime configure --runtime=docker` and restart Docker",
              "podman": "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"}
_LOGIN = ("secrets SKYPILOT_DOCKER_USERNAME, SKYPILOT_DOCKER_PASSWORD and, for a registry other than Docker Hub, "
          "SKYPILOT_DOCKER_SERVER")


def meaning(engine: str, image: str, output: str) -> Refusal:
    """Return the meaning of what an engine has printed before it failed, with the end of that text."""
    for pattern, text, sure in _RULES:
        if re.search(pattern, output, re.IGNORECASE):
            reason = text.format(engine=engine, image=image, login=_LOGIN,
                                 configure=_CONFIGURE.get(engine, "nvidia-ctk"))
            return Refusal(f"container: {reason}{_quoted(engine, output)}", sure)
    return Refusal(f"container: {engine} cannot run {image}{_quoted(engine, output)}")


def _quoted(engine: str, output: str) -> str:
    text = " ".join(output.split())
    return f"\n  {engine}: {text[-LONGEST:]}" if text else ""
