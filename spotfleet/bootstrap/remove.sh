#!/bin/sh
# Remove a host from this machine: its unit, every process with its mark, its folder, unused environments, its claim,
# and the root folder when it is empty.
#   remove.sh [--keep-environments] [ROOT REQUEST_ID]    default: the host in this file's folder
# Idempotent, also when killed half-way; needs no disk space. Leftovers are listed on stderr, status 1.
set -u
[ -z "${SPOTFLEET_HOST_MARK:-}" ] || [ ! -f "$0" ] || exec env -u SPOTFLEET_HOST_MARK sh "$0" "$@" # not to end itself
TERM_S=5 KILL_S=10 SYSTEMD_S=25 LOCK_S=10 RM_S=60
left=""

marked() { # pids of the host's processes
  grep -lszxF "SPOTFLEET_HOST_MARK=$id" /proc/[0-9]*/environ | sed 's#^/proc/##; s#/environ$##'
}

with_children() { # PIDS: and their children, which may have cleaned their environment
  for pid in "$@"; do
    echo "$pid"
    # shellcheck disable=SC2046
    with_children $(cat "/proc/$pid/task/"*/children 2>/dev/null)
  done
}

signal_all() { # SIGNAL: status 1 without any process
  # shellcheck disable=SC2046
  set -- "$1" $(with_children $(marked) | sort -un)
  [ $# -gt 1 ] || return 1
  kill "-$@" 2>/dev/null || :
}

end_processes() {
  signal_all TERM || return 0
  tenths=0
  while [ $tenths -lt $((TERM_S * 10)) ] && [ -n "$(marked)" ]; do
    sleep 0.1
    tenths=$((tenths + 1))
  done
  tenths=0
  while signal_all KILL; do
    [ $tenths -lt $((KILL_S * 10)) ] || { left="$left processes $(marked | tr '\n' ' ')"; return 0; }
    sleep 0.1
    tenths=$((tenths + 1))
  done
}

remove_unit() {
  unit=spotfleet-$id.service
  if [ "$(id -u)" = 0 ]; then
    units=/etc/systemd/system user=""
  else
    units=$HOME/.config/systemd/user user=--user
    XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
    export XDG_RUNTIME_DIR
  fi
  [ -e "$units/$unit" ] || return 0
  for command in disable stop; do
    timeout "$SYSTEMD_S" systemctl $user "$command" "$unit" >/dev/null 2>&1
  done
  rm -f "$units/$unit" "$units"/*.target.wants/"$unit"
  timeout "$SYSTEMD_S" systemctl $user daemon-reload >/dev/null 2>&1
  timeout "$SYSTEMD_S" systemctl $user reset-failed "$unit" >/dev/null 2>&1
  [ -z "$user" ] || rmdir "$units/default.target.wants" "$units" "${units%/*}" "$HOME/.config" 2>/dev/null
  [ ! -e "$units/$unit" ] || left="$left $units/$unit"
}

remove_folder() { # FOLDER
  [ -n "$1" ] && [ -e "$1" ] || return 0
  timeout "$RM_S" rm -rf "$1" 2>/dev/null || timeout "$RM_S" rm -rf "$1" # files written meanwhile
  [ ! -e "$1" ] || left="$left $1"
}

others() { # FILE: that of every other host here
  for other in "$root"/*/"$1"; do
    [ "$other" = "$root/$id/$1" ] || [ ! -e "$other" ] || echo "$other"
  done
}

remove_host() {
  remove_unit
  end_processes
  lingers=""
  [ ! -e "$root/$id/linger" ] || [ -n "$(others linger)" ] || lingers=yes
  remove_folder "$root/$id"
  [ -z "$lingers" ] || timeout "$SYSTEMD_S" loginctl disable-linger "$(id -un)" || left="$left linger"
}

remove_environments() { # unused ones, and only ours: the given folder may hold the user's too
  [ -d "$root/envs" ] || return 0
  kept=""
  for environment in "$root/envs"/*; do
    name=${environment##*/}
    case $name in *[!0-9a-f]*) continue ;; esac
    [ ${#name} = 24 ] || continue
    if [ -z "$(others settings.sh | while read -r file; do grep -xF "ENVIRONMENT=$name" "$file"; done)" ]; then
      remove_folder "$environment"
    else
      kept=yes
    fi
  done
  [ -n "$kept" ] || remove_folder "$root/.spotfleet-cache"
  rmdir "$root/envs" 2>/dev/null
}

remove_claim() { # last: while it exists, no other host comes here
  holder=$(cat "$root/claim" 2>/dev/null)
  if [ "$holder" = "$id" ] || { [ -z "$holder" ] && [ -z "$(others settings.sh)" ]; }; then
    rm -f "$root/claim"
  fi
}

remove_parts() { # of claims whose writers were killed; a living one has its own for a moment
  find "$root" -maxdepth 1 \( -name '.claim.*' -o -name '.dead.*' \) -mmin +1 -exec rm -f {} + 2>/dev/null
}

main() {
  keep=""
  if [ "${1:-}" = --keep-environments ]; then
    keep=yes
    shift
  fi
  if [ $# = 2 ]; then
    root=$1 id=$2
  else
    here=$(cd "$(dirname "$0")" && pwd -P) root=${here%/*} id=${here##*/}
  fi
  case $id in */* | . | ..) echo "remove.sh: $id is no host" >&2 && exit 2 ;; esac
  [ -d "$root" ] || [ -n "$id" ] || exit 0
  [ -z "$id" ] || remove_host
  if [ -z "$left" ]; then
    if [ ! -e "$root/lock" ] || { exec 8<"$root/lock" && flock -w "$LOCK_S" 8; }; then
      [ -n "$keep" ] || remove_environments
      [ -z "$id" ] || remove_claim
      [ -n "$keep" ] || [ -n "$(others settings.sh)" ] || rm -f "$root/lock" # a waiting script makes a new one
      remove_parts
      rmdir "$root" 2>/dev/null
    else # another host makes an environment here, and removes unused ones when it ends
      remove_claim
    fi
  fi
  [ -z "$left" ] || { echo "left on $(uname -n):$left" >&2 && exit 1; }
}

main "$@" </dev/null
