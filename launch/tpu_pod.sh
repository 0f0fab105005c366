#!/usr/bin/env bash
# Runs jaxalign.train on every host of a TPU pod slice created by `gcloud compute tpus tpu-vm create`.
#
#   launch/tpu_pod.sh NAME ZONE FOLDER [FLAGS OF jaxalign.train ...]
#
# FOLDER is this repository on a file system that all hosts share at the same path (docs/hosts.md). PYTHON is an interpreter
# with jaxalign and jax[tpu] (default: python3). The processes find each other automatically.
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
name=$1 zone=$2 folder=$3
shift 3

printf -v command 'cd %q && exec %q -m jaxalign.train' "$folder" "${PYTHON:-python3}"
for flag in "$@"; do
  printf -v command '%s %q' "$command" "$flag"
done
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$command"
