#!/bin/bash
# Make this machine a host of a fleet: fetch the code, make a Python environment for it, keep its process running.
#   bootstrap.sh start      begin in the background, in a session of its own
#   bootstrap.sh run        the same in the foreground, until systemd has taken over or, without systemd, for ever
#   bootstrap.sh supervise  entry point of systemd, also after a restart of the machine
#   bootstrap.sh look       print the actual `STATE AT WHY`
#   bootstrap.sh expire     wait a while, and power the machine off if the host still fails
#   bootstrap.sh unit       print systemd's unit of this host; `unit any`: one for the host that user data put here
#   bootstrap.sh prepare    make the environment alone, for an image
# Idempotent: killed at any point and run again, it goes on. The file `state` has one line with the progress.
set -u -o pipefail
umask 077
export LC_ALL=C
unset "${!PYTHON@}" PIP_USER PIP_TARGET PIP_PREFIX VIRTUAL_ENV
host=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P) || exit 1
root=$(dirname "$host")
cd "$host" || exit 1 # Python searches modules in its start folder
# shellcheck disable=SC1091
. "$host/settings.sh" || exit 1
environment=$root/envs/$ENVIRONMENT
wheel=$host/wheel/$WHEEL_NAME
log=$host/bootstrap.log
unit=spotfleet-$REQUEST_ID.service

NEEDS_PYTHON=3.11
ROOM_MIB=3000 DISPATCHER_ROOM_MIB=400 INHERIT_ROOM_MIB=48 # needed on the disk before an environment is made
WHEEL_S=900                                              # to receive or fetch the wheel
ENVIRONMENT_S=120 PACKAGES_S=1800 QUICK_S=60             # to make an empty environment; to fill it; for local steps
APT_LOCK_S=300                                           # wait for another process that installs packages
START_S=10                                               # from the start until a running process is visible
LOCK_S=2100                                              # wait for another host here that makes an environment
BACKOFFS=(0.5 1 2 4 8 15 30) STEADY_S=60                 # before the process is restarted; after STEADY_S, as new
GIVEN_UP=100                                             # failures in a row, in an hour or two: a lent machine goes off
FAILED_S=900 FAILED_LOOK_S=2                             # a failed lent machine stays on, so that a person can check
CONSOLE_BYTES=8388608
SCREEN=/dev/console                                      # a cloud keeps its output, also of a machine that is gone
GPUS_S=120 BROKEN_S=60                                   # until the driver shows all GPUs; a machine with a broken one goes off sooner
XIDS='48|62|64|74|79|95|119|120|136|140|143'             # NVIDIA's numbers of faults that do not end with the process
TRY='import importlib, importlib.util, sys
package = importlib.util.find_spec(sys.argv[1]).submodule_search_locations
importlib.import_module(sys.argv[1] + ".__main__" if package else sys.argv[1])
for needed in sys.argv[2:]:
    importlib.import_module(needed)'
WAY_OUT='import socket
for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # nothing is sent
        except OSError:
            continue
        print(probe.getsockname()[0])
        break'
HELD=200 # the status of a process that finds another one running

# --- messages -------------------------------------------------------------------------------------------------------

say() { printf '%s %s\n' "$(date -u +%FT%TZ)" "$*" || :; }

hide_passwords() { sed -u 's#://[^/@ ]*@#://***@#g'; }

state() { # WORD WHY: a reader sees the old line or the new one; space for it is reserved on a full disk
  local line=${2//[[:cntrl:]]/ } new=$host/.state.$BASHPID
  line="$1 $(date +%s) ${line:0:1500}"
  if printf '%s\n' "$line" 2>/dev/null >"$new" || { rm -f "$host/.reserve"; printf '%s\n' "$line" >"$new"; }; then
    mv -f "$new" "$host/state"
  else
    rm -f "$new"
  fi
  say "$line"
}

stage() { # NAME: when this boot of the machine reached it first, for the agent's report
  local boot up
  read -r boot </proc/sys/kernel/random/boot_id && read -r up _ </proc/uptime || return 0
  grep -qs "^$1 $boot " "$host/stages" || printf '%s %s %s\n' "$1" "$boot" "$up" 2>/dev/null >>"$host/stages" || :
}

fail() { # WHY
  state failed "$*"
  exit 1
}

free_mib() { df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print int($4 / 1024) }'; }

disk_is_full() { # TEXT
  case $1 in *"No space left on device"* | *"Errno 28"* | *"Disk quota exceeded"*) return 0 ;; esac
  local free
  free=$(free_mib)
  [ -n "$free" ] && [ "$free" -lt 4 ]
}

advice="" # prefix of the message if the next command fails
making="" # the half-made environment

fail_command() { # LINE STATUS LIMIT_S COMMAND OUTPUT
  local why="ended with status $2"
  [ "$2" != 124 ] || why="took longer than $3 s"
  if disk_is_full "$5"; then
    local free
    free=$(free_mib)
    [ -z "$making" ] || rm -rf "$making" # otherwise there would be no room for the message
    fail "the disk of $root is full ($free MiB free): make room there or set another folder. bootstrap.sh line $1: $4: ${5:-$why}"
  fi
  fail "${advice:+$advice. }bootstrap.sh line $1: $4: $why: ${5:-no output}"
}

run() { # LIMIT_S COMMAND...: its output is in the log; its failure ends the script and is reported with its last lines
  local limit_s=$1 line=${BASH_LINENO[0]} size status=0
  shift
  say "+ ${*%%$'\n'*}"
  size=$(stat -c %s "$log" 2>/dev/null || echo 0)
  # Locks belong to the script: a command that outlives it must not hold them.
  timeout -k 5 "$limit_s" "$@" </dev/null 7>&- 8>&- 9>&- || status=$?
  [ "$status" = 0 ] || fail_command "$line" "$status" "$limit_s" "${*%%$'\n'*}" \
    "$(tail -c "+$((size + 1))" "$log" 2>/dev/null | grep -v '^$' | tail -n 6 | hide_passwords | tr '\n' '|' | sed 's/|$//; s/|/ | /g')"
}

quick() { timeout -k 5 "$QUICK_S" "$@" </dev/null 9>&-; } # query an interpreter, which may lie on a slow disk

# --- locks ----------------------------------------------------------------------------------------------------------

held() { # FILE: whether its lock is held
  [ -e "$1" ] && ! flock -sn "$1" true 9>&-
}

lock_root() { # one host at a time makes or removes environments; the file may be removed while we wait for it
  local end=$((SECONDS + LOCK_S))
  while :; do
    exec 8>>"$root/lock"
    flock -w "$((end - SECONDS))" 8 || fail "another host makes an environment in $root for more than $LOCK_S s"
    [ "$root/lock" -ef /proc/self/fd/8 ] && return
  done
}

marked() { # pids of this host's processes other than this one
  local file pid
  for file in $(grep -lszxF "SPOTFLEET_HOST_MARK=$REQUEST_ID" /proc/[0-9]*/environ); do
    pid=${file#/proc/} pid=${pid%/environ}
    # Checked twice: the first check finds itself.
    [ "$pid" = $$ ] || [ "$pid" = "$BASHPID" ] || ! grep -qszxF "SPOTFLEET_HOST_MARK=$REQUEST_ID" "$file" || echo "$pid"
  done
}

end_leftovers() { # processes of an earlier, killed run: an installer that still writes, workers without their agent
  held "$host/process.lock" && return
  local pid
  for pid in $(marked); do
    say "ending process $pid, which an earlier run has left"
    kill -9 "$pid" 2>/dev/null || :
  done
}

# --- the steps ------------------------------------------------------------------------------------------------------

check_tools() {
  local tool missing=()
  for tool in awk df flock grep sed setsid stat tail timeout tr; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [ ${#missing[@]} = 0 ] || fail "this machine has no ${missing[*]}: install util-linux, coreutils, grep, sed and awk"
}

check_gpus() { # one that works for each slot; a host that joins without stops its whole generation
  [ "${GPUS:-0}" != 0 ] && ! command -v rocm-smi >/dev/null || return 0
  state installing "checks its GPUs"
  command -v nvidia-smi >/dev/null || fail "no nvidia-smi, so no driver for the $GPUS GPUs: name an image that has one (\`image\` in the cloud's section of the fleet file)"
  local said found broken slot pci xid end=$((SECONDS + GPUS_S))
  while :; do
    said=$(quick nvidia-smi --query-gpu=index,pci.bus_id,ecc.errors.uncorrected.volatile.total --format=csv,noheader 2>&1)
    found=$(grep -E '^[0-9]+, ' <<<"$said")
    [ "$(grep -c . <<<"$found")" -lt "$GPUS" ] || break
    [ $SECONDS -lt $end ] || fail_broken "nvidia-smi shows $(grep -c . <<<"$found") of $GPUS GPUs," \
      "none for slot$(for ((slot = 0; slot < GPUS; slot++)); do grep -q "^$slot, " <<<"$found" || printf ' %s' "$slot"; done): ${said:-no output}"
    sleep 2
  done
  broken=$(awk -F ', ' '$3 ~ /^[1-9]/ { print "slot " $1 ": GPU " $2 " has " $3 " uncorrected ECC errors;" }' <<<"$found")
  while read -r pci xid; do # the driver names a GPU as 0000:10:1d, nvidia-smi as 00000000:10:1D.0
    slot=$(awk -F ', ' -v pci="$pci" 'index(tolower($2), tolower(pci)) { print "slot " $1 ": " }' <<<"$found")
    broken="$broken ${slot}GPU $pci had Xid $xid;"
  done < <(dmesg 2>/dev/null | sed -nE "s/.*NVRM: Xid \(PCI:([^)]*)\): ($XIDS),(.*)/\1 \2:\3/p" | head -n 4)
  [ -z "$broken" ] || fail_broken "a GPU is broken: ${broken# }"
}

fail_broken() { # WHY: nobody can repair this machine, so that it need not stay on for long
  FAIL_S=$BROKEN_S
  fail "$@"
}

check_python() {
  state installing "searches for Python"
  local name found tried=""
  for name in "$PYTHON" $([ "$PYTHON" != python3 ] || echo python3.14 python3.13 python3.12 python3.11); do
    [ "${name#\~/}" = "$name" ] || name=${HOME:-/root}/${name#\~/}
    found=$(quick "$name" -c 'import sys; print(sys.version.split()[0]); print(sys.executable)' 2>/dev/null) || continue
    if printf '%s\n%s\n' "$NEEDS_PYTHON" "${found%%$'\n'*}" | sort -VC; then
      python=${found#*$'\n'}
      say "Python ${found%%$'\n'*}: $python"
      return
    fi
    tried="$tried $name is Python ${found%%$'\n'*};"
  done
  say "PATH is $PATH"
  fail "no Python $NEEDS_PYTHON or newer on this machine:${tried:- there is no $PYTHON;} install one" \
    "(Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv; elsewhere: uv python install 3.12) and name it in" \
    "environment.python of the fleet file"
}

check_room() {
  local free needed=$ROOM_MIB
  [ "$ROLE" != dispatcher ] || needed=$DISPATCHER_ROOM_MIB
  [ -z "$INHERIT" ] || needed=$INHERIT_ROOM_MIB
  free=$(free_mib)
  [ "$free" -ge "$needed" ] || fail "the disk of $root is full: $free MiB are free and an environment needs about" \
    "$needed; make room there or set another folder"
}

wheel_is_whole() { [ "$(sha256sum 2>/dev/null <"$wheel" | cut -d' ' -f1)" = "$WHEEL_SHA256" ]; } 2>/dev/null

take_wheel() { # a ready image has wheels; one of another version is of no use
  mkdir -p "$host/wheel" && cp -f "${python%/bin/*}/wheels/$WHEEL_NAME" "$wheel" && wheel_is_whole
} 2>/dev/null

fetch_wheel() {
  if wheel_is_whole || take_wheel; then return; fi
  if [ -n "$WHEEL_URL" ] || grep -qs '"dispatcher": *"https' "$host/boot.json"; then
    state installing "fetches the code${WHEEL_URL:+ from ${WHEEL_URL%%\?*}}"
    export SPOTFLEET_WHEEL_URL=$WHEEL_URL # not an argument: it may be signed
    run "$WHEEL_S" "$python" "$host/fetch.py" "$host" "$WHEEL_NAME" "$WHEEL_SHA256"
  else
    state installing "waits for its code: $WHEEL_NAME, to be put into $host/wheel"
    local end=$((SECONDS + WHEEL_S))
    until wheel_is_whole; do
      [ $SECONDS -lt $end ] || fail "nobody put $WHEEL_NAME with digest $WHEEL_SHA256 into $host/wheel within $WHEEL_S s"
      sleep 0.5
    done
  fi
}

is_whole() { [ -e "$environment/complete" ] && quick "$environment/bin/python" -c 'import spotfleet' >/dev/null 2>&1; }

make_environment() { # in a subshell: its variables must not reach the process
  is_whole || (make_environment_here) 9>&- || exit 1
}

make_environment_here() {
  state installing "waits for its turn to make a Python environment"
  lock_root
  if ! is_whole; then
    check_room
    state installing "makes a Python environment: ${python}${INHERIT:+ and what it has installed}"
    export TMPDIR=$host/tmp PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_DEFAULT_TIMEOUT=20
    export UV_CACHE_DIR=$root/.spotfleet-cache UV_NO_PROGRESS=1 UV_HTTP_TIMEOUT=30
    if [ -n "$INDEX_URL" ]; then # through the environment: it may hold a password
      export PIP_INDEX_URL=$INDEX_URL UV_INDEX_URL=$INDEX_URL UV_DEFAULT_INDEX=$INDEX_URL
    fi
    making=$environment
    run "$QUICK_S" rm -rf "$environment" "$TMPDIR"
    run "$QUICK_S" mkdir -p "$root/envs" "$TMPDIR"
    if [ -n "$INHERIT" ]; then inherit; else install; fi
    state installing "tries the environment"
    advice=${INHERIT:+environment.inherit: $python must have what spotfleet requires${NEEDS:+, and $NEEDS}: install it there, or leave inherit out}
    # shellcheck disable=SC2086
    run "$QUICK_S" "$environment/bin/python" -c "$TRY" "$MODULE" $NEEDS
    advice=""
    run "$QUICK_S" touch "$environment/complete"
    making=""
    rm -rf "$TMPDIR"
  fi
}

inherit() {
  run "$ENVIRONMENT_S" "$python" "$host/inherit.py" "$environment" "$wheel"
  if [ ! -s "$host/packages.txt" ]; then
    return
  elif quick "$environment/bin/python" -c 'import pip' 2>/dev/null; then
    state installing "installs packages"
    run "$PACKAGES_S" "$environment/bin/python" -m pip install -r "$host/packages.txt"
  else
    find_uv || fail "environment.packages: $python has no pip, and there is no uv: install one of them"
    state installing "installs packages with uv"
    run "$PACKAGES_S" "$uv" pip install --python "$environment/bin/python" -r "$host/packages.txt"
  fi
}

find_uv() {
  uv=$(PATH="$PATH:${HOME:-/root}/.local/bin:${HOME:-/root}/.cargo/bin" command -v uv)
}

install() { # the user's packages first, so that their versions hold; then ours with its requirements
  local uri installer
  uri=$(quick "$python" -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$wheel")
  { cat "$host/packages.txt"; echo "spotfleet$EXTRAS @ $uri"; } >"$host/.all.txt"
  if [ "$INSTALLER" != pip ] && find_uv; then
    run "$ENVIRONMENT_S" "$uv" venv --python "$python" "$environment"
    echo pip >>"$host/.all.txt" # for the user's own setup
    installer=("$uv" pip install --python "$environment/bin/python")
  elif [ "$INSTALLER" = uv ]; then
    fail "environment.installer is uv, and this machine has none: install it (https://docs.astral.sh/uv), or set pip"
  else
    make_empty_with_pip
    installer=("$environment/bin/python" -m pip install)
  fi
  if [ -s "$host/packages.txt" ]; then
    state installing "installs the packages of the fleet file"
    run "$PACKAGES_S" "${installer[@]}" -r "$host/packages.txt"
  fi
  state installing "installs spotfleet$EXTRAS"
  run "$PACKAGES_S" "${installer[@]}" -r "$host/.all.txt"
  rm -f "$host/.all.txt"
}

has_ensurepip() { quick "$python" -c 'import ensurepip, venv' 2>/dev/null; }

install_venv() { # the machine's own upgrades may have kept cloud-init from it; a user's own machine is left alone
  [ -n "$POWER_OFF" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  state installing "installs python3-venv"
  export DEBIAN_FRONTEND=noninteractive
  timeout -k 5 "$PACKAGES_S" apt-get -q update </dev/null 8>&- 9>&-
  timeout -k 5 "$PACKAGES_S" apt-get -o "DPkg::Lock::Timeout=$APT_LOCK_S" -qy install python3-venv </dev/null 8>&- 9>&-
  has_ensurepip
}

make_empty_with_pip() {
  if has_ensurepip; then
    run "$ENVIRONMENT_S" "$python" -m venv "$environment"
  elif quick "$python" -m pip --version >/dev/null 2>&1; then
    run "$ENVIRONMENT_S" "$python" -m venv --without-pip "$environment"
    run "$PACKAGES_S" "$python" -m pip --python "$environment/bin/python" install pip
  elif install_venv; then
    run "$ENVIRONMENT_S" "$python" -m venv "$environment"
  else
    fail "$python can make no environment: it has neither ensurepip nor pip; install python3-venv (Debian: apt-get" \
      "install python3-venv) or uv, or set environment.inherit: true"
  fi
}

configure() { # what provision.sh, which is in the wheel, sets on an image: a stock machine becomes the same one now
  [ -n "$POWER_OFF" ] && [ "$(id -u)" = 0 ] || return 0
  local found
  for found in "$environment"/lib/python3*/site-packages/spotfleet/bootstrap/provision.sh; do
    [ ! -e "$found" ] || run "$QUICK_S" bash "$found" --configure
  done
}

# --- the process ----------------------------------------------------------------------------------------------------

advertised() { # the address where a dispatcher listens: as set, as SSH reached this machine, or that of its route out
  if [ -n "$ADDRESS" ] || [ "$ROLE" != dispatcher ]; then
    echo "$ADDRESS"
  elif [ -s "$host/address" ]; then
    cat "$host/address"
  else
    quick "$environment/bin/python" -c "$WAY_OUT"
  fi
}

note_surroundings() { # facts that the first caller has and systemd lacks
  local there name
  read -r _ _ there _ <<<"${SSH_CONNECTION:-}"
  [ -z "$there" ] || printf '%s\n' "${there#::ffff:}" >"$host/address" || return 1
  for name in HOME LANG LOGNAME PATH SHELL USER {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY; do
    [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}"
  done >"$host/.found.$$" && mv -f "$host/.found.$$" "$host/found.sh"
}

run_process() { # becomes the process, which holds its lock as long as it lives, even without us
  local address
  exec 7>>"$host/process.lock"
  flock -n 7 || exit $HELD
  address=$(advertised)
  unset "${!SSH_@}" "${!SYSTEMD_@}" INVOCATION_ID JOURNAL_STREAM NOTIFY_SOCKET SPOTFLEET_WHEEL_URL LC_ALL BASH_ENV ENV
  export SPOTFLEET_WHEEL=$wheel SPOTFLEET_METADATA_URL=${METADATA_URL:-$host}
  # Caches of compilers are removed with the host: torch makes a folder in /tmp on import, others in the home.
  export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$host/cache/inductor}
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$host/cache/triton} CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$host/cache/cuda}
  [ "$PORT" = 0 ] || export SPOTFLEET_HOST_PORT=$PORT
  [ -z "$address" ] || export SPOTFLEET_HOST_ADDRESS=$address
  exec "$environment/bin/python" -m "$MODULE" --home "$host" </dev/null >>console.log 2>&1 8>&- 9>&-
}

keep_running() {
  local failures=0 began status
  stage ready
  trap 'stopping=yes; kill -TERM "$child" 2>/dev/null' TERM INT HUP
  stopping="" child=""
  while [ -z "$stopping" ]; do
    end_leftovers
    [ "$(stat -c %s "$host/console.log" 2>/dev/null || echo 0)" -lt $CONSOLE_BYTES ] || mv -f "$host/console.log" "$host/console.log.1"
    state running "${1:-$MODULE}"
    began=$SECONDS
    (trap - TERM INT HUP; run_process) &
    child=$!
    wait_for_child
    [ -z "$stopping" ] || break
    [ $status != 0 ] || power_off
    if [ $status = $HELD ]; then # an earlier supervisor was killed and its process lives: wait for its end
      pause 1
      continue
    fi
    [ $((SECONDS - began)) -lt $STEADY_S ] || failures=0
    local wait_s=${BACKOFFS[failures < ${#BACKOFFS[@]} ? failures : ${#BACKOFFS[@]} - 1]}
    failures=$((failures + 1))
    give_up
    set -- "$MODULE; it ended with status $status before: $(tail -n 1 "$host/console.log" 2>/dev/null)"
    say "$MODULE ended with status $status; started again in $wait_s s"
    pause "$wait_s"
  done
  say "received a signal to stop"
}

give_up() { # the timers that end a lent machine run in the process: without it, it would be billed for ever
  [ -n "$POWER_OFF" ] && [ $failures -ge $GIVEN_UP ] || return 0
  trap - TERM INT HUP
  fail "$MODULE ended $failures times within $STEADY_S s of its start, at last with status $status: $(tail -n 1 "$host/console.log")"
}

wait_for_child() { # sets `status`; a signal to us interrupts `wait`
  while :; do
    status=0
    wait "$child" || status=$?
    kill -0 "$child" 2>/dev/null || return 0
  done
}

pause() {
  sleep "$1" 9>&- &
  child=$!
  wait "$child" || :
}

power_off() { # the process requests it
  state off "$MODULE has ended: the host wants to be off"
  [ -z "$POWER_OFF" ] || ! switch_off || trap - EXIT
  exit 0
}

switch_off() {
  sync
  systemctl poweroff 2>/dev/null || shutdown -h now 2>/dev/null || poweroff -f || { say "this machine cannot be powered off"; return 1; }
}

report_failure() { # WHY: to the dispatcher, so that `spotfleet events` and `status` show it
  [ "$ROLE" != dispatcher ] && grep -qs '"dispatcher": *"https' "$host/boot.json" || return 0
  local broken=${FAIL_S:+broken} name
  for name in "${python:-}" "$environment/bin/python" python3; do
    [ -z "$name" ] || ! command -v "$name" >/dev/null ||
      ! quick "$name" "$host/fetch.py" --failed "$host" "$REQUEST_ID" "$1" $broken || return 0
  done
  return 1
}

expire() { # a lent machine is billed: one without a host is powered off, unless the host is started again
  [ -n "$POWER_OFF" ] && { is failed || is off; } || return 0
  exec 9>&-
  local said wait_s=${FAIL_S:-$FAILED_S}
  local end=$((SECONDS + wait_s))
  said=$(cat "$host/state")
  say "this machine has no host: it is powered off in $wait_s s, unless bootstrap.sh is started again"
  [ ! -w "$SCREEN" ] || printf 'spotfleet: this host has %s\n' "$said" 2>/dev/null >"$SCREEN" || :
  ! is failed || report_failure "$(cut -d ' ' -f 3- <<<"$said")" || say "the dispatcher does not receive the reason"
  while [ $SECONDS -lt $end ]; do
    sleep "$FAILED_LOOK_S"
    [ "$(cat "$host/state" 2>/dev/null)" = "$said" ] || return 0
  done
  switch_off || :
}

# --- systemd --------------------------------------------------------------------------------------------------------

ask_systemd() { timeout 30 systemctl "$manager" "$@" </dev/null 9>&-; }

find_systemd() { # sets `manager` and `units`
  [ -d /run/systemd/system ] && command -v systemctl >/dev/null || return 1
  if [ "$(id -u)" = 0 ]; then
    manager=--system units=/etc/systemd/system
  else
    export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
    manager=--user units=$HOME/.config/systemd/user
  fi
}

print_unit() { # [any]: begin before cloud-init's last stage, which would start the same
  local script=${host//\\/\\\\}/bootstrap.sh target=multi-user.target what="Host $REQUEST_ID of a spotfleet fleet" more="" start
  script=${script//\"/\\\"} script=${script//%/%%} script=${script//\$/\$\$}
  start="/bin/bash \"$script\" supervise"
  if [ "${1:-}" = any ]; then
    what="Host of a spotfleet fleet"
    more=$(printf '%s\n' "ConditionPathExists=$root/claim" "After=cloud-init.service cloud-init-network.service")
    start="/bin/bash -c 'read -r id <$root/claim && exec /bin/bash $root/\$\$id/bootstrap.sh supervise'"
  fi
  [ "$(id -u)" = 0 ] || target=default.target
  cat <<END
[Unit]
Description=$what
StartLimitIntervalSec=0
$([ "$(id -u)" != 0 ] || printf 'Wants=network-online.target\nAfter=network-online.target\n')${more:+
$more}

[Service]
ExecStart=$start
Restart=on-failure
RestartPreventExitStatus=1
RestartSec=2
KillMode=mixed
TimeoutStopSec=15
# A worker that the kernel ends for want of memory does not take the host with it.
OOMPolicy=continue
$([ "$(id -u)" != 0 ] || printf 'LimitMEMLOCK=infinity\nLimitNOFILE=1048576\nTasksMax=infinity\n')

[Install]
WantedBy=$target
END
}

linger() { # otherwise a user's units end with the user's last session
  local who
  who=$(id -un)
  [ "$(id -u)" = 0 ] || [ -e "/var/lib/systemd/linger/$who" ] && return 0
  timeout 30 loginctl enable-linger "$who" </dev/null 9>&- || return 1
  : >"$host/linger"
}

hand_over_to_systemd() { # status 0 when it has taken over: then neither a logout nor a reboot ends the host
  find_systemd || return 1
  linger && mkdir -p "$units" && print_unit >"$units/$unit" && ask_systemd daemon-reload &&
    ask_systemd enable "$unit" || { say "systemd does not take units of $(id -un)"; rm -f "$units/$unit"; return 1; }
  exec 9>&-
  ask_systemd restart --no-block "$unit" || { say "systemd does not start $unit"; return 1; }
  say "systemd runs $unit"
}

# --- entry points ---------------------------------------------------------------------------------------------------

is() { case $(cat "$host/state" 2>/dev/null) in "$1 "*) return 0 ;; *) return 1 ;; esac; }

mark() { # everything that we start has the mark; an export reaches only a shell's children
  [ "${SPOTFLEET_HOST_MARK:-}" = "$REQUEST_ID" ] || exec env SPOTFLEET_HOST_MARK="$REQUEST_ID" bash "$host/bootstrap.sh" "$@"
  exec >>"$log" 2>&1 </dev/null
}

take_lock() { # this host's lock; a second script has nothing to do
  exec 9>>"$host/run.lock"
  flock -w "$1" 9 || { say "another bootstrap.sh is at work"; exit 0; }
}

start() {
  if is off && [ -z "$POWER_OFF" ]; then return; fi
  if held "$host/run.lock"; then # by a running script, or by leftovers of a killed one: `run` waits for them
    SPOTFLEET_HOST_MARK=$REQUEST_ID setsid bash "$host/bootstrap.sh" run </dev/null >>"$log" 2>&1 &
    return
  fi
  if ! head -c 16384 /dev/zero >"$host/.reserve" || ! note_surroundings; then
    echo "the disk of $root is full ($(free_mib) MiB free): make room there or set another folder" >&2
    state failed "the disk of $root is full ($(free_mib) MiB free): make room there or set another folder" 2>/dev/null
    SPOTFLEET_HOST_MARK=$REQUEST_ID setsid bash "$host/bootstrap.sh" expire </dev/null >/dev/null 2>&1 &
    return 1
  fi
  is off || state installing "starts" >/dev/null
  SPOTFLEET_HOST_MARK=$REQUEST_ID setsid bash "$host/bootstrap.sh" run </dev/null >>"$log" 2>&1 &
}

install_all() {
  check_tools
  check_gpus
  end_leftovers
  check_python
  fetch_wheel
  make_environment
  configure
}

note_begin() { if [ -n "$POWER_OFF" ]; then stage lent; else stage own; fi; }

run_all() {
  take_lock 10 # longer than a `look`, or the children of a killed script
  trap expire EXIT
  ! is off || exit 0
  note_begin
  state installing "starts"
  [ -e "$host/found.sh" ] || note_surroundings
  if hand_over_to_systemd; then
    trap - EXIT
    return
  fi
  take_lock 10
  install_all
  keep_running
}

supervise() {
  # shellcheck disable=SC1091
  [ ! -e "$host/found.sh" ] || . "$host/found.sh"
  take_lock 30
  trap expire EXIT
  ! is off || exit 0
  note_begin
  if is_whole && wheel_is_whole; then check_gpus; else install_all; fi
  keep_running
}

systemd_has_it() {
  find_systemd && [ -e "$units/$unit" ] || return 1
  case $(ask_systemd show -p ActiveState --value "$unit") in active | activating | reloading) ;; *) return 1 ;; esac
}

prepare() {
  check_tools
  check_python
  fetch_wheel
  make_environment
}

look() {
  local word at why
  read -r word at why <"$host/state" || { echo "installing $(date +%s) has said nothing yet"; return; }
  case $word in
  installing | running)
    if ! held "$host/run.lock" && ! systemd_has_it && [ $(($(date +%s) - at)) -gt $START_S ]; then
      why="nothing of it runs: its machine was restarted, or somebody ended it (it was $word: $why)"
      word=failed
    fi
    ;;
  esac
  printf '%s %s %s\n' "$word" "$at" "$why"
}

case ${1:-} in
start) start ;;
run) mark "$@" && run_all ;;
supervise) mark "$@" && supervise ;;
look) look ;;
expire) expire ;;
unit) print_unit "${2:-}" ;;
prepare) exec >>"$log" 2>&1 </dev/null && prepare ;;
*) echo "bootstrap.sh start | run | supervise | look | expire | unit [any] | prepare" >&2 && exit 2 ;;
esac
