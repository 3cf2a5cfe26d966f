#!/usr/bin/env bash
# What a machine with an NVIDIA GPU says of fastbrain: checks first, then times. Needs python3 with
# torch, triton, numpy, safetensors and tokenizers; takes at most 8 minutes.
#   bench/device_check.sh [--out DIR] [--only PART,...] [--budget FACTOR] [--dry] [--help]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -P -m bench.device_check "$@"
