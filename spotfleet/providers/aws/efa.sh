#!/usr/bin/env bash
# efa.sh VERSION SHA256: install EFA's driver and libraries, with NCCL's plugin for them, from AWS's archive. Nothing to do
# without a version, or where an image has EFA. Never tried on a machine with EFA.
set -euo pipefail
version=${1:-} sha256=${2:-} from=${EFA_FROM:-https://efa-installer.amazonaws.com}

fail() { echo "efa.sh: $*" >&2; exit 1; }

[ -n "$version" ] && [ ! -e /opt/amazon/efa ] || exit 0
[[ $sha256 =~ ^[0-9a-f]{64}$ ]] || fail "efa_sha256 is missing: set it to the SHA-256 of aws-efa-installer-$version.tar.gz"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
curl -fsS --retry 3 -o "$folder/efa.tar.gz" "$from/aws-efa-installer-$version.tar.gz"
echo "$sha256  $folder/efa.tar.gz" | sha256sum -c --status || fail "aws-efa-installer-$version.tar.gz has another SHA-256 than $sha256"
tar -xzf "$folder/efa.tar.gz" -C "$folder"
(cd "$folder/aws-efa-installer" && ./efa_installer.sh -y --skip-limit-conf)
