#!/usr/bin/env bash
# Run all measurements that need a CUDA device: NCCL at world size 1, and three ranks over gloo that share the device.
# Needs python3 with a CUDA build of torch 2.11 or newer, no network, no other package; takes some minutes.
#   bench/gpu/run.sh [FILE]     rows as JSON, also to FILE; PYTHON=... for another interpreter
# Where pytest, hypothesis and psutil are installed, the same runs as a test: python3 -m pytest tests/gpu
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
python=${PYTHON:-python3}
rows=${1:-/dev/null}
{
  "$python" bench/gpu/alone.py card reform spin
  "$python" bench/gpu/alone.py steps --pairs 30
  "$python" bench/gpu/several.py --device cuda
} | tee "$rows"
