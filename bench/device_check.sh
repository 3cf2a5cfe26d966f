#!/usr/bin/env bash
# What a machine with an NVIDIA GPU says of fastbrain: checks first, then times.
# Needs python3 with torch, triton, numpy, safetensors and tokenizers; pytest for the kernel tests.
#   bench/device_check.sh [--out DIR] [--dry]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD" exec "${PYTHON:-python3}" -m bench.device_check "$@"
