#!/usr/bin/env bash
# Make this machine a ready image of hosts and dispatchers: torch and the packages of spotfleet in an environment of its
# own, the environment of this version's agent, its systemd unit, sshd and limits. Then a host downloads nothing.
# docs/clouds/images.md explains it. Debian 12, Ubuntu 22.04 or newer, as root. Run again, it changes nothing.
#
#   provision.sh --wheel FILE [--prefix DIR] [--extras LIST] [--torch REQUIREMENT|cuda12|none] [--torch-index URL]
#                [--index URL] [--see DIR] [--gpus] [--venv-only] [--simulate] [--seal]
#   provision.sh --configure
#
#   --wheel        spotfleet's wheel, which names the packages; hosts of the same version need not fetch it
#   --prefix       folder of the environment: /opt/spotfleet. Fleet file: environment: {python: DIR/bin/python, inherit: true}
#   --extras       spotfleet's extras besides torch, as train,NAME: what the dispatchers' cloud needs; default: train
#   --torch        default torch==2.13.0; cuda12: that of the extra of this name; none: --see has it
#   --torch-index  index of torch's wheels: https://download.pytorch.org/whl/cpu for hosts without GPUs
#   --index        index of all other packages; default: pip's own
#   --see          a folder of packages that exists already, as /opt/pytorch/lib/python3.12/site-packages; may be repeated
#   --gpus         install NVIDIA's driver if there is none, and the torch that its version can run
#   --venv-only    the environment alone: no system packages, no root
#   --simulate     print what apt-get would install, and change nothing
#   --seal         then remove this machine's own keys, logs, histories. Nobody can log in until an image of it has booted
#   --configure    only what a running stock machine lacks besides packages: sshd, limits, time. bootstrap.sh runs this
set -euo pipefail
export LC_ALL=C
prefix=/opt/spotfleet torch="" torch_index="" index="" extras=train wheel="" see=()
gpus="" venv_only="" simulate="" seal="" configure=""

TORCH=torch==2.13.0
CUDA12_INDEX=https://download.pytorch.org/whl/cu128
DRIVER=580         # packages of Ubuntu
CUDA13_DRIVER=580  # the oldest that runs wheels of CUDA 13, which torch brings since 2.11
CUDA12_DRIVER=525  # the oldest that runs wheels of CUDA 12
PACKAGES=(ca-certificates chrony curl openssh-server python3 python3-venv rsync util-linux)

fail() { echo "provision.sh: $*" >&2; exit 1; }
say() { echo "provision.sh: $*" >&2; }

while [ $# -gt 0 ]; do
  case $1 in
  --wheel | --prefix | --extras | --torch | --torch-index | --index | --see) [ $# -gt 1 ] || fail "$1 needs a value" ;;&
  --wheel) wheel=$2 && shift 2 ;;
  --prefix) prefix=$2 && shift 2 ;;
  --extras) extras=$2 && shift 2 ;;
  --torch) torch=$2 && shift 2 ;;
  --torch-index) torch_index=$2 && shift 2 ;;
  --index) index=$2 && shift 2 ;;
  --see) see+=("$2") && shift 2 ;;
  --gpus) gpus=yes && shift ;;
  --venv-only) venv_only=yes && shift ;;
  --simulate) simulate=yes && shift ;;
  --seal) seal=yes && shift ;;
  --configure) configure=yes && shift ;;
  -h | --help) sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}" && exit 0 ;;
  *) fail "unknown option $1; see --help" ;;
  esac
done
[ -n "$configure$simulate" ] || [ -n "$wheel" ] || fail "no wheel: name it with --wheel; \`spotfleet image build --folder DIR\` writes one"
[ -z "$wheel" ] || [ -s "$wheel" ] || fail "--wheel: there is no file $wheel"
[ -z "$seal" ] || [ -z "$venv_only" ] || fail "--seal is for a machine that becomes an image, --venv-only for one that does not"
[ -n "$venv_only$simulate" ] || [ "$(id -u)" = 0 ] || fail "must run as root (or with --venv-only)"

# --- files and packages of the system ---------------------------------------------------------------------------------

put() { # PATH, from stdin; status 0 if it has changed
  local new
  new=$(mktemp) && cat >"$new"
  if cmp -s "$new" "$1"; then rm -f "$new" && return 1; fi
  mkdir -p "$(dirname "$1")" && install -m 0644 "$new" "$1" && rm -f "$new" && say "writes $1"
}

missing() { # PACKAGE...: those that are not installed
  local name
  for name in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || echo "$name"
  done
}

install_packages() { # PACKAGE...
  local wanted
  mapfile -t wanted < <(missing "$@")
  [ ${#wanted[@]} -gt 0 ] || return 0
  export DEBIAN_FRONTEND=noninteractive
  if [ -n "$simulate" ]; then
    apt-get --simulate -q install --no-install-recommends "${wanted[@]}"
    return
  fi
  say "installs ${wanted[*]}"
  # An upgrade in the background would hold dpkg's lock, or be half done in the image.
  systemctl stop apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service 2>/dev/null || :
  apt-get update -q
  apt-get -o DPkg::Lock::Timeout=300 install -qy --no-install-recommends "${wanted[@]}"
}

driver_packages() { # never tried on a machine with GPUs
  # shellcheck disable=SC1091
  . /etc/os-release
  local headers=linux-headers-amd64 # a module for another kernel than the image boots would be no driver
  case $(uname -r) in *-cloud-amd64) headers=linux-headers-cloud-amd64 ;; esac
  case $ID in
  ubuntu) echo "linux-headers-generic nvidia-headless-$DRIVER-server-open nvidia-utils-$DRIVER-server nvidia-fabricmanager-$DRIVER" ;;
  debian) echo "$headers nvidia-kernel-dkms nvidia-smi libcuda1 nvidia-persistenced" ;; # of non-free; its open modules lag behind its libraries
  *) fail "no NVIDIA driver is known for $ID: take a base image that has one" ;;
  esac
}

driver_version() { modinfo -F version nvidia 2>/dev/null || dpkg-query -W -f '${Version}\n' 'nvidia-headless-*' nvidia-kernel-dkms 2>/dev/null | head -n 1; }

install_driver() {
  local packages
  [ -n "$gpus" ] && [ -z "$(driver_version)" ] || return 0
  packages=$(driver_packages)
  # shellcheck disable=SC2086
  install_packages $packages
}

# --- what a stock machine gets as well --------------------------------------------------------------------------------

harden_sshd() { # first of the folder, so that its values win
  local root=no
  ! grep -qsE '^(ssh|ecdsa|sk)-' /root/.ssh/authorized_keys || root=prohibit-password # the fleet's user is root
  put /etc/ssh/sshd_config.d/10-spotfleet.conf <<END || return 0
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin $root
X11Forwarding no
MaxAuthTries 3
END
  systemctl reload ssh 2>/dev/null || :
}

raise_limits() { # of logins; units have their own. RDMA locks its memory
  put /etc/security/limits.d/90-spotfleet.conf <<'END' || :
* - memlock unlimited
root - memlock unlimited
* - nofile 1048576
END
}

sync_time() { # the cloud's image knows which servers
  local service
  for service in chrony systemd-timesyncd; do
    [ -e "/lib/systemd/system/$service.service" ] || continue
    [ "$(systemctl is-enabled "$service" 2>/dev/null)" = enabled ] || systemctl enable --now "$service" || :
    return 0
  done
  say "this machine has no chrony or systemd-timesyncd: nothing sets its clock"
}

configure_machine() {
  harden_sshd
  raise_limits
  sync_time
}

# --- the environment --------------------------------------------------------------------------------------------------

find_python() {
  local name
  for name in python3.12 python3.13 python3.11 python3; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name" && return
    fi
  done
  return 1
}

requirements() { # EXTRA...: of the wheel and these extras
  "$python" - "$wheel" "$@" <<'END'
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    about = wheel.read(next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))).decode()
for line in about.partition("\n\n")[0].splitlines():
    if line.startswith("Requires-Dist: "):
        requirement, _, marker = line.removeprefix("Requires-Dist: ").partition(";")
        extra = re.search(r'extra == "([^"]+)"', marker)
        if (not extra and "only" not in sys.argv[2:]) or (extra and extra[1] in sys.argv[2:]):
            print(requirement.strip())
END
}

choose_torch() { # wheels whose CUDA the driver runs
  [ -n "$gpus" ] && [ -z "$torch" ] || return 0
  local version major
  version=$(driver_version) && major=${version%%.*}
  [ -n "$major" ] || fail "there is no NVIDIA driver, so no torch can be chosen: name one with --torch"
  if [ "$major" -ge "$CUDA13_DRIVER" ]; then
    torch=$TORCH
  elif [ "$major" -ge "$CUDA12_DRIVER" ]; then
    torch=cuda12
  else
    fail "NVIDIA driver $version is older than $CUDA12_DRIVER, which CUDA 12 needs: take a newer base image"
  fi
}

make_environment() {
  local name packages wanted key
  python=$(find_python) || fail "no Python 3.11 or newer with venv here"
  choose_torch
  case ${torch:=$TORCH} in
  none) wanted="" ;;
  cuda12) wanted=$(requirements only cuda12) torch_index=${torch_index:-$CUDA12_INDEX} ;;
  *) wanted=$torch ;;
  esac
  # shellcheck disable=SC2086
  packages=$(requirements ${extras//,/ } | grep -v '^torch\b')
  key=$("$python" -VV; printf '%s\n' "$prefix" "$wanted" "$torch_index" "$index" "${see[@]}" "$packages")
  if [ "$key" = "$(cat "$prefix/complete" 2>/dev/null)" ]; then return; fi
  say "makes $prefix with $("$python" --version)"
  "$python" -m venv --clear "$prefix"
  name=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  local folder
  for folder in "${see[@]}"; do
    [ -d "$folder" ] || fail "--see: there is no folder $folder"
    printf 'import site; site.addsitedir(%s)\n' "$("$python" -c 'import sys; print(repr(sys.argv[1]))' "$folder")"
  done >"$name/zz_seen.pth"
  pip() { "$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir --no-input "$@"; }
  # shellcheck disable=SC2086
  [ -z "$wanted" ] || pip install -q ${torch_index:+--index-url "$torch_index"} $wanted
  printf '%s\n' "$packages" >"$prefix/requirements.txt"
  pip install -q ${index:+--index-url "$index"} -r "$prefix/requirements.txt"
  pip freeze >"$prefix/freeze.txt" # what this image has
  # Some files are for other versions of Python; the others need not be compiled by each host.
  "$prefix/bin/python" -m compileall -q "$prefix/lib" >/dev/null || :
  printf '%s\n' "$key" >"$prefix/complete"
  chmod -R a+rX "$prefix"
}

keep_wheel() { # for hosts of this version
  local kept
  kept=$prefix/wheels/$(basename "$wheel")
  cmp -s "$wheel" "$kept" || { mkdir -p "$prefix/wheels" && install -m 0644 "$wheel" "$kept"; }
}

try_environment() { # everything that hosts import, so that an image that cannot work is not made; it fills caches, too
  local modules="aiohttp cryptography numpy obstore pydantic torch yaml"
  (cd / && "$prefix/bin/python" -c 'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]' $modules) ||
    fail "$prefix cannot import all of $modules"
}

prepare_hosts() { # the environment that hosts of this version make from $prefix, by the same script
  local folder environment
  folder=$(cd / && PYTHONPATH=$wheel "$prefix/bin/python" -m spotfleet.bootstrap.image "$prefix" "$wheel")
  environment=$(dirname "$folder")/envs/$(sed -n 's/^ENVIRONMENT=//p' "$folder/settings.sh")
  if [ ! -e "$environment/complete" ]; then
    bash "$folder/bootstrap.sh" prepare || fail "no environment for hosts: $(cat "$folder/state")"
    "$environment/bin/python" -m compileall -q "$environment/lib" >/dev/null
    say "made $environment"
  fi
  if bash "$folder/bootstrap.sh" unit any | put /etc/systemd/system/spotfleet-host.service; then
    systemctl daemon-reload 2>/dev/null || :
  fi
  [ "$(systemctl is-enabled spotfleet-host 2>/dev/null)" = enabled ] || systemctl enable spotfleet-host
  rm -rf "$folder"
}

seal() {
  say "removes what is this machine's own"
  apt-get clean
  ! command -v cloud-init >/dev/null || cloud-init clean --logs --seed
  rm -rf /var/lib/apt/lists/* /tmp/* /var/tmp/* /root/.cache /home/*/.cache /var/lib/systemd/random-seed /var/lib/dhcp/*
  rm -f /etc/ssh/ssh_host_* /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys /root/.*_history /home/*/.*_history
  find /var/log -type f -exec truncate -s 0 {} +
  : >/etc/machine-id # each machine makes its own
  [ ! -f /var/lib/dbus/machine-id ] || ln -sf /etc/machine-id /var/lib/dbus/machine-id
  sync
}

if [ -n "$configure" ]; then
  configure_machine
  exit
fi
if [ -n "$simulate" ]; then
  install_packages "${PACKAGES[@]}"
  install_driver
  exit
fi
[ -n "$venv_only" ] || { install_packages "${PACKAGES[@]}" && install_driver; }
wheel=$(realpath "$wheel")
make_environment
try_environment
keep_wheel
[ -n "$venv_only" ] || { prepare_hosts && configure_machine; }
[ -z "$seal" ] || seal
say "done: environment: {python: $prefix/bin/python, inherit: true}"
