#!/usr/bin/env bash
# Make the machine that this runs on a ready image: everything that hosts and dispatchers need but spotfleet's own code,
# in an environment of its own, so that nothing is downloaded between a launch and the first step. ami/README.md says how
# an image is made of the machine. Ubuntu 24.04, or a Deep Learning AMI of it where there are GPUs; run as root.
#
#   provision.sh [--prefix DIR] [--torch REQUIREMENT|none] [--torch-index URL] [--index URL] [--see DIR]
#                [--pyproject FILE] [--venv-only] [--seal]
#
#   --prefix       where the environment lies: /opt/spotfleet. Fleet file: environment: {python: DIR/bin/python, inherit: true}
#   --torch        default torch==2.13.0; none: it is there already, by --see
#   --torch-index  of torch's wheels: https://download.pytorch.org/whl/cpu for hosts without GPUs
#   --index        of all other packages; default pip's own
#   --see          a folder of packages that is there already, as /opt/pytorch/lib/python3.12/site-packages; may be repeated
#   --pyproject    spotfleet's, which names what is needed; default: beside this script's folder, or beside the script
#   --venv-only    the environment alone: no package of the system, no root
#   --seal         at last forget this machine: keys, logs, histories. Nobody can log in until an image of it has booted
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix=/opt/spotfleet torch=torch==2.13.0 torch_index="" index="" see=() pyproject="" venv_only="" seal=""

fail() { echo "provision.sh: $*" >&2; exit 1; }
say() { echo "provision.sh: $*" >&2; }

while [ $# -gt 0 ]; do
  case $1 in
  --prefix | --torch | --torch-index | --index | --see | --pyproject) [ $# -gt 1 ] || fail "$1 needs a value" ;;&
  --prefix) prefix=$2 && shift 2 ;;
  --torch) torch=$2 && shift 2 ;;
  --torch-index) torch_index=$2 && shift 2 ;;
  --index) index=$2 && shift 2 ;;
  --see) see+=("$2") && shift 2 ;;
  --pyproject) pyproject=$2 && shift 2 ;;
  --venv-only) venv_only=yes && shift ;;
  --seal) seal=yes && shift ;;
  -h | --help) sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}" && exit 0 ;;
  *) fail "unknown option $1; see --help" ;;
  esac
done
[ -n "$pyproject" ] || for pyproject in "$here/pyproject.toml" "$here/../pyproject.toml"; do [ ! -e "$pyproject" ] || break; done
[ -e "$pyproject" ] || fail "there is no pyproject.toml of spotfleet here: name it with --pyproject"
[ -z "$seal" ] || [ -z "$venv_only" ] || fail "--seal is for a machine that becomes an image, --venv-only for one that does not"
[ -n "$venv_only" ] || [ "$(id -u)" = 0 ] || fail "must run as root (or with --venv-only)"

find_python() {
  local name
  for name in python3.12 python3.13 python3.11 python3; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name" && return
    fi
  done
  return 1
}

install_system() { # what bootstrap.sh, rsync-up and people want; all small
  say "installs packages of the system"
  export DEBIAN_FRONTEND=noninteractive
  # An upgrade in the background would hold dpkg's lock, or be half done in the image.
  systemctl stop apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service 2>/dev/null || :
  apt-get update -q
  apt-get -o DPkg::Lock::Timeout=300 install -qy --no-install-recommends ca-certificates curl python3 python3-venv rsync util-linux
}

spare_our_units() { # after an upgrade Ubuntu restarts services that use a replaced library; user data write this too
  mkdir -p /etc/needrestart/conf.d
  printf '%s\n' '$nrconf{override_rc}{qr(^spotfleet-)} = 0;' >/etc/needrestart/conf.d/spotfleet.conf
}

requirements() { # what agents, workers and dispatchers import, as pyproject.toml says; torch apart
  "$python" - "$pyproject" <<'END'
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = project["dependencies"] + [r for extra in ("aws", "train") for r in project["optional-dependencies"][extra]]
print("\n".join(r for r in wanted if not re.match(r"torch\b", r)))
END
}

make_environment() {
  local name
  say "makes $prefix with $("$python" --version)"
  "$python" -m venv --clear "$prefix"
  local packages
  packages=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  for name in "${see[@]}"; do
    [ -d "$name" ] || fail "--see: there is no folder $name"
    printf 'import site; site.addsitedir(%s)\n' "$("$python" -c 'import sys; print(repr(sys.argv[1]))' "$name")"
  done >"$packages/zz_seen.pth"
  pip() { "$prefix/bin/python" -m pip --disable-pip-version-check --no-cache-dir --no-input "$@"; }
  [ "$torch" = none ] || pip install ${torch_index:+--index-url "$torch_index"} "$torch"
  requirements >"$prefix/requirements.txt"
  pip install ${index:+--index-url "$index"} -r "$prefix/requirements.txt"
  pip freeze >"$prefix/freeze.txt" # what is in this image, for whoever asks later
}

try_environment() { # what bootstrap.sh tries, so that an image that cannot work is not made
  local module
  for module in aiohttp boto3 cryptography fabric numpy obstore pydantic torch yaml; do
    (cd / && "$prefix/bin/python" -c "import $module") || fail "$prefix has no $module"
  done
  "$prefix/bin/python" -m compileall -q "$prefix/lib" || : # some files are for other Pythons; the rest need not be compiled later
  chmod -R a+rX "$prefix"
}

seal() {
  say "forgets this machine"
  apt-get clean
  cloud-init clean --logs --seed --machine-id 2>/dev/null || cloud-init clean --logs
  rm -rf /var/lib/apt/lists/* /tmp/* /var/tmp/* /root/.cache /home/*/.cache
  rm -f /etc/ssh/ssh_host_* /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys /root/.*_history /home/*/.*_history
  sync
}

[ -n "$venv_only" ] || { install_system && spare_our_units; }
python=$(find_python) || fail "no Python 3.11 or newer with venv here"
make_environment
try_environment
[ -z "$seal" ] || seal
say "done: environment: {python: $prefix/bin/python, inherit: true}"
