"""Choice of a machine's image: the user's, the newest of a family of Google's, or one of `spotfleet image build`; list
and removal of the latter."""

from __future__ import annotations

from collections.abc import Callable

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Offer, Role
from spotfleet.providers import MachineImage
from spotfleet.providers.gcp.mapping import errors, listing
from spotfleet.providers.gcp.session import GcpAccount
from spotfleet.providers.kit import images as kit

UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
DEEP_LEARNING = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
FAMILY = "spotfleet-"  # begins the families of images that `spotfleet image build` makes; a kind follows
LATEST_S = 3600.0  # a new image appears every few weeks; hosts launched within an hour should be alike


def wanted(account: GcpAccount, role: Role, offer: Offer) -> str:
    """Return projects/PROJECT/global/images/NAME, or .../family/FAMILY."""
    spec = account.settings.spec
    if role is Role.DISPATCHER:
        return _of_kind(account, spec.dispatcher_image, False) or UBUNTU
    return _of_kind(account, spec.image, bool(offer.accelerator)) or (DEEP_LEARNING if offer.accelerator else UBUNTU)


def _of_kind(account: GcpAccount, name: str, gpus: bool) -> str:
    return f"projects/{account.project}/global/images/family/{FAMILY}{kit.kind(gpus)}" if name == kit.OURS else name


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
            if parts[-1].startswith(FAMILY):
                raise kit.missing("gcp", parts[-1].removeprefix(FAMILY)) from error
            raise NeedsPerson(f"gcp: image {path} is not there", hint="correct `gcp.image`; `gcloud compute images "
                              f"list --project {project}` shows those that are") from error
        return f"projects/{project}/global/images/{found['name']}"

    return account.cached(("image", path), LATEST_S, ask)


def listed(account: GcpAccount) -> list[MachineImage]:
    """List the images that `spotfleet image build` made in the project, newest first."""
    found = []
    for page in account.pages("images", "list", project=account.project, filter=f"labels.{kit.KIND}:*"):
        for image in page.get("items") or ():
            labels = image.get("labels") or {}
            if kit.KIND in labels:
                found.append(MachineImage(
                    image["name"], image["name"], "", labels[kit.KIND], labels.get(kit.RECIPE, ""),
                    labels.get(kit.VERSION, "").replace("-", "."), listing.instant(image["creation_timestamp"]),
                    int(image.get("disk_size_gb") or 0)))
    return sorted(found, key=lambda image: -image.since)


def delete(account: GcpAccount, image: MachineImage) -> None:
    try:
        account.wait(account.change("images", "delete", project=account.project, image=image.id), "images.delete")
    except SpotfleetError as error:
        if not errors.gone(error):
            raise


def report(account: GcpAccount, progress: Callable[[str], None]) -> None:
    """Report those of our images that the fleet would use and that are outdated."""
    if kit.OURS in (account.settings.spec.image, account.settings.spec.dispatcher_image):
        for remark in kit.remarks(listed(account)):
            progress(f"gcp: {remark}")
