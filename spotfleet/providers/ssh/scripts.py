"""Shell scripts run on a machine; they take no input and answer in lines `KEY VALUE`. Texts only.

A host's folder holds, besides the files of `spotfleet.bootstrap`:

    tags.json, notice.json      see `interruptions/folder.py`
    ending                      removal or interruption in progress: its processes may be gone already
    taken                       `AT WHY`: it was interrupted, and nothing of it runs
    revived                     the boot id of the machine in which it was restarted
    take.sh                     script that interrupts it
"""

from __future__ import annotations

import shlex

from spotfleet.bootstrap import MARK, script
from spotfleet.interruptions.folder import NOTICE, TAGS

DEAD_CLAIM_MIN = 2  # age of a claim without a listing at which its launcher must have died
LISTED_MIN = 1  # age of a listing without a state at which its writer must have died before the start
REMOVE_S = 5  # time to wait; a longer removal goes on in the background

_BEGIN = r"""umask 077
LC_ALL=C; export LC_ALL
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin; export PATH
say() { printf '%s %s\n' "$1" "$2"; }
now() { t=$(date +%s.%N 2>/dev/null); case $t in *[!0-9.]*|'') date +%s;; *) printf '%s\n' "$t";; esac; }
boot() { cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo -; }
"""

# One host: its listing, its true state, and the reason of an interruption. A host whose processes ended with its
# machine is restarted, once per boot of the machine.
_SHOW = r"""show() {
  d=$root/$1
  say host "$1"; printf 'listing '; cat "$d/listing.json"; echo
  if [ -f "$d/taken" ]; then say taken "$(head -n 1 "$d/taken")"; return; fi
  [ -f "$d/ending" ] && say ending yes
  was=$(head -n 1 "$d/state" 2>/dev/null)
  if [ -z "$was" ]; then
    [ -n "$(find "$d/listing.json" -mmin +@LISTED_MIN@ 2>/dev/null)" ] && say unstarted yes
    return
  fi
  is=$(bash "$d/bootstrap.sh" look 2>/dev/null)
  case $was/$is in running*/failed*)
    if [ ! -f "$d/ending" ] && [ "$(cat "$d/revived" 2>/dev/null)" != "$(boot)" ]; then
      boot >"$d/revived" && bash "$d/bootstrap.sh" start </dev/null >/dev/null 2>&1 &&
        is=$(bash "$d/bootstrap.sh" look 2>/dev/null)
    fi;;
  esac
  say state "${is:-$was}"
}
""".replace("@LISTED_MIN@", str(LISTED_MIN))

_PROBE = r"""say time "$(now)"
[ -d "$root" ] || exit 0
for f in "$root"/*/listing.json; do
  [ -f "$f" ] || continue
  f=${f%/listing.json}; show "${f##*/}"
done
say claim "$(cat "$root/claim" 2>/dev/null)"
say root "$(cd "$root" && pwd)"
"""

_PYTHON = r"""tried=""
for py in "$python" python3.14 python3.13 python3.12 python3.11; do
  case $py in "~/"*) py=$HOME/${py#"~/"};; esac
  v=$("$py" -c 'import sys; print("%d.%d" % sys.version_info[:2], int(sys.version_info >= (3, 11)))' 2>/dev/null)
  case $v in *' 1') break;; esac
  tried=${tried:-${v% 0}}; v=
  [ "$python" = python3 ] || break
done
[ -n "$v" ] || { say python "$tried"; exit 0; }
"""

_CLAIM = r"""mkdir -p "$root" || exit 1
if [ -f "$root/$id/listing.json" ]; then say present yes; exit 0; fi
for try in 1 2; do
  printf '%s\n' "$id" >"$root/.claim.$$" || { s=$?; rm -f "$root/.claim.$$"; rmdir "$root" 2>/dev/null; exit $s; }
  ln "$root/.claim.$$" "$root/claim" 2>/dev/null
  rm -f "$root/.claim.$$"
  has=$(cat "$root/claim" 2>/dev/null)
  [ "$has" = "$id" ] && break
  if [ -f "$root/$has/listing.json" ]; then say held "$has"; show "$has"; exit 0; fi
  [ -n "$(find "$root/claim" -mmin +@DEAD_CLAIM_MIN@ 2>/dev/null)" ] || { say launching "$has"; exit 0; }
  mv "$root/claim" "$root/.dead.$$" 2>/dev/null || continue
  if [ "$(cat "$root/.dead.$$")" = "$has" ]; then rm -rf "${root:?}/${has:-.nobody}"
  else ln "$root/.dead.$$" "$root/claim"; fi
  rm -f "$root/.dead.$$"
done
[ "$has" = "$id" ] || { say launching "$has"; exit 0; }
mkdir -p "$root/$id/wheel" || { s=$?; rm -f "$root/claim"; exit $s; }
c=${SSH_CONNECTION:-}; c=${c% *}
say address "${c##* }"
say port "$("$py" -c 'import socket
s = socket.socket()
s.bind(("", 0))
print(s.getsockname()[1])')"
say folder "$(cd "$root/$id" && pwd)"
say time "$(now)"
""".replace("@DEAD_CLAIM_MIN@", str(DEAD_CLAIM_MIN))

# The files become a host in one atomic step; the caller that makes this step starts the host.
_FINISH = r"""cd "$root/$id" || exit 1
[ "$(cat ../claim 2>/dev/null)" = "$id" ] || { say lost "$(cat ../claim 2>/dev/null)"; exit 0; }
ln "$part" listing.json 2>/dev/null && first=yes || first=""
rm -f "$part"
if [ -z "$first" ]; then say present yes; exit 0; fi
@START@ </dev/null >/dev/null || exit 1
say started yes
"""

_REMOVE = r"""d=$root/$id
[ ! -d "$d" ] || : 2>/dev/null >"$d/ending"
t=$(mktemp "${TMPDIR:-/tmp}/spotfleet-remove.XXXXXX") || exit 1
cat >"$t" <<'END_OF_REMOVE'
@TEXT@
END_OF_REMOVE
( trap '' HUP; @COMMAND@ <"$t" >/dev/null 2>"$t.err"; echo $? >"$t.done" ) </dev/null >/dev/null 2>&1 &
n=0
while [ ! -s "$t.done" ] && [ $n -lt @TENTHS@ ]; do sleep 0.1; n=$((n + 1)); done
if [ -s "$t.done" ]; then
  if [ "$(cat "$t.done")" = 0 ]; then say gone yes; else say left "$(tail -n 1 "$t.err")"; fi
  rm -f "$t" "$t.err" "$t.done"
else
  say going yes
  ( trap '' HUP; n=0; while [ -e "$t" ] && [ ! -s "$t.done" ] && [ $n -lt 300 ]; do sleep 1; n=$((n + 1)); done
    rm -f "$t" "$t.err" "$t.done" ) </dev/null >/dev/null 2>&1 &
fi
say time "$(now)"
"""

# Waits with the host's mark, so that the host's removal ends it too; acts without, or it would find itself.
_TAKE = r"""when=$1 why=$2 notice=$3
if [ "$when" != now ]; then
  sleep "$when"
  [ "$(cat "$d/@NOTICE@" 2>/dev/null)" = "$notice" ] || exit 0  # withdrawn, or another has taken its place
  exec env -u @MARK@ sh "$0" now "$why" ""
fi
: >"$d/ending" || exit 0
unit=spotfleet-$id.service
if command -v systemctl >/dev/null; then
  if [ "$(id -u)" = 0 ]; then
    [ ! -e "/etc/systemd/system/$unit" ] || timeout 10 systemctl stop --no-block "$unit"
  else
    XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}; export XDG_RUNTIME_DIR
    [ ! -e "$HOME/.config/systemd/user/$unit" ] || timeout 10 systemctl --user stop --no-block "$unit"
  fi
fi
n=0
while [ $n -lt 100 ]; do
  pids=$(grep -lszxF "@MARK@=$id" /proc/[0-9]*/environ | sed 's#^/proc/##; s#/environ$##')
  [ -n "$pids" ] || break
  kill -9 $pids 2>/dev/null
  sleep 0.05; n=$((n + 1))
done
printf 'off %s %s\n' "$(date +%s)" "$why" >"$d/.taken.$$" && mv -f "$d/.taken.$$" "$d/state"
printf '%s %s\n' "$(now)" "$why" >"$d/.taken.$$" && mv -f "$d/.taken.$$" "$d/taken"
rm -f "$d/ending"
""".replace("@MARK@", MARK).replace("@NOTICE@", NOTICE)

_INTERRUPT = r"""d=$root/$id
[ -f "$d/listing.json" ] || { say unknown yes; exit 0; }
cat >"$d/take.sh" <<'END_OF_TAKE' || exit 1
@TAKE@
END_OF_TAKE
take() { setsid "$@" </dev/null >/dev/null 2>&1 & }
if [ "$after_s" = 0 ]; then
  take sh "$d/take.sh" now "$why" ""
  n=0
  while [ ! -f "$d/taken" ] && [ $n -lt 50 ]; do sleep 0.1; n=$((n + 1)); done
else
  ends=$(awk -v t="$(now)" -v s="$after_s" 'BEGIN { printf "%.3f", t + s }')
  notice="{\"ends_at\": $ends}"
  printf '%s\n' "$notice" >"$d/.notice.$$" && mv -f "$d/.notice.$$" "$d/@NOTICE@" || exit 1
  take env "@MARK@=$id" sh "$d/take.sh" "$after_s" "$why" "$notice"
fi
say interrupted yes
""".replace("@NOTICE@", NOTICE).replace("@MARK@", MARK)

_TAG = r"""d=$root/$id
[ -f "$d/listing.json" ] || { say unknown yes; exit 0; }
printf '%s\n' "$tags" >"$d/.tags.$$" && mv -f "$d/.tags.$$" "$d/@TAGS@" || exit 1
say tagged yes
""".replace("@TAGS@", TAGS)

# authorized_keys is written as a copy and renamed, so that half a file locks nobody out; one writer at a time.
_KEYS = r"""ssh=$HOME/.ssh lock=$HOME/.ssh/.spotfleet-lock
[ -n "$line" ] || [ -e "$ssh/authorized_keys" ] || { say keys done; exit 0; }
mkdir -p "$ssh" || exit 1
n=0
until mkdir "$lock" 2>/dev/null; do
  [ -z "$(find "$lock" -prune -mmin +1 2>/dev/null)" ] || rmdir "$lock" 2>/dev/null
  [ $n -lt 50 ] || { mkdir "$lock"; exit 1; }
  sleep 0.1; n=$((n + 1))
done
keys=$(readlink -f "$ssh/authorized_keys" 2>/dev/null) || keys=$ssh/authorized_keys
new=$keys.spotfleet
finish() { rm -f "$new"; rmdir "$lock" 2>/dev/null; rmdir "$ssh" 2>/dev/null; }
trap finish EXIT
if [ -e "$keys" ]; then
  if [ -n "$line" ]; then grep -qxF "$line" "$keys" && { say keys done; exit 0; }
  else awk -v m="$mark" '$NF == m { found = 1 } END { exit !found }' "$keys" || { say keys done; exit 0; }
  fi
  cp -p "$keys" "$new" && awk -v m="$mark" '$NF != m' "$keys" >"$new" || exit 1
else
  : >"$new" || exit 1
fi
if [ -n "$line" ]; then printf '%s\n' "$line" >>"$new" || exit 1; fi
if [ -s "$new" ]; then mv -f "$new" "$keys" || exit 1; else rm -f "$keys" || exit 1; fi
say keys done
"""


def _with(**values: str) -> str:
    """Return the common beginning and these variables; `root` may begin with ~/."""
    root = f"root={script.shell_path(values.pop('root'))}\n" if "root" in values else ""
    return _BEGIN + root + "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def probe(root: str) -> str:
    """Report the machine's state: `time`, each host, `claim`, and the full path of `root`."""
    return _with(root=root) + _SHOW + _PROBE


def claim(root: str, request_id: str, python: str) -> str:
    """Claim the machine.

    Answers `present`; `python VERSION` if no suitable one exists; `held HOST` and the host; `launching HOST` for
    another launch in progress; or `folder`, `address`, `port`, `time` of our claim.
    """
    return _with(root=root, id=request_id, python=python) + _PYTHON + _SHOW + _CLAIM


def finish(root: str, request_id: str, part: str) -> str:
    """Finish the launch. Answers `started`; `present` if another caller was first; `lost` if the claim is not ours."""
    start = script.start(root, request_id)
    return _with(root=root, id=request_id, part=part) + _FINISH.replace("@START@", start)


def remove(root: str, request_id: str) -> str:
    """Remove a host. Answers `gone`; `left WHAT`; or `going`, if it takes longer. "" removes what no host uses."""
    work = _REMOVE.replace("@TENTHS@", str(REMOVE_S * 10)).replace("@COMMAND@", script.removal(root, request_id))
    return _with(root=root, id=request_id or ".nobody") + work.replace("@TEXT@", script.text("remove.sh"))


def interrupt(root: str, request_id: str, after_s: float, why: str) -> str:
    """Interrupt a host. Answers `unknown` or `interrupted`; with `after_s` 0 the host is gone on return."""
    values = {"root": root, "id": request_id, "after_s": f"{after_s:g}", "why": why}
    take = "#!/bin/sh\n" + _with(root=root, id=request_id) + 'd=$root/$id\n' + _TAKE
    return _with(**values) + _INTERRUPT.replace("@TAKE@", take)


def withdraw(root: str, request_id: str) -> str:
    """Withdraw the current notice."""
    return _with(root=root, id=request_id) + f'rm -f "$root/$id/{NOTICE}"\n'


def tag(root: str, request_id: str, tags: str) -> str:
    """Replace tags.json. Answers `unknown` or `tagged`."""
    return _with(root=root, id=request_id, tags=tags) + _TAG


def install_key(line: str, mark: str) -> str:
    """Install `line`, whose last word is `mark`, in authorized_keys, in place of an older line of that mark."""
    return _with(line=line, mark=mark) + _KEYS


def remove_key(mark: str) -> str:
    """Remove all lines that end in `mark` from authorized_keys."""
    return _with(line="", mark=mark) + _KEYS
