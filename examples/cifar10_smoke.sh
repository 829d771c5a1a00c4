#!/usr/bin/env bash
# The whole way from CIFAR-10's files to a report, small enough for two CPU cores: prepare, 200 steps of U,
# 50 of QC from that checkpoint, 64 samples, every metric that needs no download, a report of both runs.
#
#     examples/cifar10_smoke.sh DIR [OUT] [option of `curlfree prepare` ...]
#
# DIR: the official files, cifar-10-python.tar.gz or the folder that it unpacks to. OUT: where everything goes
# (default: smoke); the report is OUT/report/report.html. Files in the same format with other content: add
# --unverified. Start it again after an interruption, and it goes on. The network is small and trained for a
# minute: the numbers mean nothing. SMALL=1 in the environment makes it smaller still, for tests: the same
# commands with a few steps and images.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: $0 DIR [OUT] [option of curlfree prepare ...]" >&2; exit 2; }
files=$1 out=${2:-smoke}
shift $(($# < 2 ? $# : 2))
export PYTHONPATH=$(cd "$(dirname "$0")" && pwd)${PYTHONPATH:+:$PYTHONPATH}  # for the feature network

u=200 qc=50 samples=64
network="--field.network.size 32 --field.network.width 16 --field.network.attention 16"
train="--train.batch-size 32 --train.validation-samples 64 --train.log-every 10 --train.checkpoint-every 100 --train.tensorboard"
evaluate="--n 16 --levels 8 --audit-n 32 --nfe-n 2 --tolerances 1e-2 1e-3 --rtol 1e-3 --atol 1e-3 --reference-n 500 --kid-block 16"
audit="--images 16 --levels 8"
if [ -n "${SMALL:-}" ]; then
  u=2 qc=2 samples=8
  network="--field.network.size 32 --field.network.width 4 --field.network.attention 16"
  train="--train.batch-size 4 --train.validation-samples 4 --train.log-every 1 --train.checkpoint-every 2"
  evaluate="--n 2 --levels 2 --audit-n 2 --nfe-n 2 --tolerances 1e-1 --rtol 1e-1 --atol 1e-1 --reference-n 20 --kid-block 2"
  audit="--images 2 --levels 2"
fi

[ -f "$out/cifar10.pack" ] || curlfree prepare cifar10 "$files" --out "$out/cifar10.pack" "$@"
curlfree train tiny-u --out "$out/u" --data.path "$out/cifar10.pack" --train.steps $u $network $train
curlfree train tiny-qc --out "$out/qc" --data.path "$out/cifar10.pack" --init "$out/u" --train.steps $qc $network $train
for run in u qc; do
  curlfree sample "$out/$run" --n $samples
  curlfree evaluate "$out/$run" --features pixel_features:thumbnails --samples.n $samples $evaluate
done
curlfree audit "$out/qc" --json "$out/audit.json" $audit
curlfree report "$out/u" "$out/qc" --out "$out/report"
