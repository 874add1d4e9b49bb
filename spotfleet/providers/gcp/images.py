"""Choice of a machine's image: the user's, or the newest of a family of Google's."""

from __future__ import annotations

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Offer, Role
from spotfleet.providers.gcp.mapping import errors
from spotfleet.providers.gcp.session import GcpAccount

UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
DEEP_LEARNING = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
LATEST_S = 3600.0  # a new image appears every few weeks; hosts launched within an hour should be alike


def wanted(account: GcpAccount, role: Role, offer: Offer) -> str:
    """Return projects/PROJECT/global/images/NAME, or .../family/FAMILY."""
    spec = account.settings.spec
    if role is Role.DISPATCHER:
        return spec.dispatcher_image or UBUNTU
    return spec.image or (DEEP_LEARNING if offer.accelerator else UBUNTU)


def image(account: GcpAccount, role: Role, offer: Offer) -> str:
    """Return the path of the image itself. Raises NeedsPerson if it is missing, or may not be read."""
    return named(account, wanted(account, role, offer))


def named(account: GcpAccount, path: str) -> str:
    _, project, _, _, *parts = path.split("/")
    family = parts[0] == "family"

    def ask() -> str:
        method, key = ("get_from_family", "family") if family else ("get", "image")
        try:
            found = account.ask("images", method, project=project, **{key: parts[-1]})
        except SpotfleetError as error:
            if not errors.gone(error):
                raise
            raise NeedsPerson(f"gcp: image {path} is not there", hint="correct `gcp.image`; `gcloud compute images "
                              f"list --project {project}` shows those that are") from error
        return f"projects/{project}/global/images/{found['name']}"

    return account.cached(("image", path), LATEST_S, ask)
