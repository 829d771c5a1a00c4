#!/usr/bin/env bash
# The whole way from CIFAR-10's files to a report, small enough for two CPU cores: prepare, 200 steps of U,
# 50 of QC from that checkpoint, 64 samples, every metric that needs no download, a report of both runs.
#
#     examples/cifar10_smoke.sh DIR [OUT] [option of `curlfree prepare` ...]
#
# DIR: the official files, cifar-10-python.tar.gz or the folder that it unpacks to. OUT: where everything goes
# (default: smoke). Files in the same format with other content: add --unverified. Start it again after an
# interruption, and it goes on. The network is small and trained for a minute: the numbers mean nothing.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 DIR [OUT] [option of curlfree prepare ...]" >&2; exit 2; }
files=$1 out=${2:-smoke}
shift $(($# < 2 ? $# : 2))
export PYTHONPATH=$(cd "$(dirname "$0")" && pwd)${PYTHONPATH:+:$PYTHONPATH}  # for the feature network

network="--field.network.size 32 --field.network.width 16 --field.network.attention 16"
steps="--train.batch-size 32 --train.validation-samples 64 --train.log-every 10 --train.tensorboard"

[ -f "$out/cifar10.pack" ] || curlfree prepare cifar10 "$files" --out "$out/cifar10.pack" "$@"
curlfree train tiny-u --out "$out/u" --data.path "$out/cifar10.pack" --train.steps 200 $network $steps
curlfree train tiny-qc --out "$out/qc" --data.path "$out/cifar10.pack" --init "$out/u" --train.steps 50 $network $steps
for run in u qc; do
  curlfree sample "$out/$run" --n 64
  curlfree evaluate "$out/$run" --n 32 --levels 8 --audit-n 32 --nfe-n 2 --tolerances 1e-2 1e-3 --rtol 1e-3 --atol 1e-3 \
    --features pixel_features:thumbnails --reference-n 500 --samples.n 64 --kid-block 16
done
curlfree audit "$out/qc" --images 16 --levels 8 --json "$out/audit.json"
curlfree report "$out/u" "$out/qc" --out "$out/report"
