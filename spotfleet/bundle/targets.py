"""Targets of `file_mounts` outside the working directory: `/data`, `~/data`. Pure.

Such files travel in the working directory, under FOLDER. On each host, before `setup`, a link at the target leads to
them. The links are made by shell code in front of the job's setup, on its first line, so that the line numbers of its
messages stay. A target that exists there and is no link is left alone, and the job fails with its name: a link replaces
nothing but a link or an empty folder.

A bucket that is to be mounted, for writing too, is mounted at its target by the host's own tool: TOOLS. The tool gets a
session of its own, so that it outlives the shell of the setup.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

FOLDER = ".file_mounts"
WORKDIR = "~/sky_workdir/"  # SkyPilot's working directory on a host: ours, whatever it is called
TOOLS = {"s3": "mount-s3", "gs": "gcsfuse"}  # rclone, where the tool of the store is missing

_LINK = r"""
_sf_run() { "$@" 2>/dev/null || sudo -n -- "$@" 2>/dev/null; };
_sf_no() { echo "file_mounts: $1" >&2; return 1; };
_sf_link() {
 _sf_run mkdir -p -- "$(dirname -- "$1")" || { _sf_no "$1: its folder cannot be made by $(id -un)"; return 1; };
 if [ -e "$1" ] && [ ! -L "$1" ] && ! _sf_run rmdir -- "$1"; then
 _sf_no "$1 exists on this host, and is left as it is: choose another target"; return 1; fi;
 _sf_run ln -sfn -- "$PWD/$2" "$1" || _sf_no "$1 cannot be made by $(id -un)"; };
"""
_MOUNT = r"""
_sf_stay() { if command -v setsid >/dev/null; then setsid -w "$@"; else "$@"; fi; };
_sf_mount() {
 if mountpoint -q -- "$1"; then return 0; fi;
 _sf_run mkdir -p -- "$1" && _sf_run chown "$(id -u)" "$1" || { _sf_no "$1 cannot be made by $(id -un)"; return 1; };
 _sf_bucket=${3%%/*}; _sf_prefix=${3#"$_sf_bucket"}; _sf_prefix=${_sf_prefix#/};
 if command -v "$4" >/dev/null; then case $4 in
 mount-s3) _sf_stay mount-s3 --allow-delete --allow-overwrite \
${_sf_prefix:+--prefix "$_sf_prefix/"} "$_sf_bucket" "$1" ;;
 gcsfuse) _sf_stay gcsfuse --implicit-dirs ${_sf_prefix:+--only-dir "$_sf_prefix"} "$_sf_bucket" "$1" ;; esac;
 elif command -v rclone >/dev/null; then case $2 in
 s3) _sf_remote=:s3,provider=AWS,env_auth=true: ;; gs) _sf_remote=:gcs,env_auth=true: ;;
 *) _sf_remote=:azureblob,env_auth=true: ;; esac;
 _sf_stay rclone mount --daemon --vfs-cache-mode writes "$_sf_remote$3" "$1";
 else _sf_no "$1: mounting $2://$3 needs ${4:+$4 or }rclone on the hosts: use an image that has it, or mode: COPY, \
which reads only"; fi; };
"""


def name_of(target: str) -> str:
    """Return the name in the working directory of what is wanted at `target`."""
    target = target.removeprefix(WORKDIR)
    if target.startswith("~/"):
        return f"{FOLDER}/home/{target.removeprefix('~/')}"
    return f"{FOLDER}/root{target}" if target.startswith("/") else target


def with_targets(setup: str, files: Sequence[str], mounted: Mapping[str, str]) -> str:
    """Return the job's setup with the code that makes the targets `files` and mounts the buckets of `mounted`."""
    outside = [target for target in files if name_of(target) != target.removeprefix(WORKDIR)]
    steps = [f"_sf_link {_path(target)} {shlex.quote(name_of(target))} || exit 1; " for target in outside]
    for target, url in mounted.items():
        scheme, _, bucket = url.partition("://")
        steps.append(f"_sf_mount {_path(target)} {scheme} {shlex.quote(bucket)} "
                     f"{shlex.quote(TOOLS.get(scheme, ''))} || exit 1; ")
    if not steps:
        return setup
    code = _LINK + (_MOUNT if mounted else "")
    return "".join(line.lstrip("\n") for line in code.replace("\\\n", "").splitlines()) + "".join(steps) + setup


def _path(target: str) -> str:
    """Quote a target for the shell, which puts in the home directory."""
    inside = target.removeprefix(WORKDIR)
    if inside != target:
        return f'"$PWD"/{shlex.quote(inside)}'
    return f'"$HOME"/{shlex.quote(target[2:])}' if target.startswith("~/") else shlex.quote(target)
