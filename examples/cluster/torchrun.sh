#!/bin/bash
# One node:   NPROC=8 ./torchrun.sh
# More nodes: NNODES=16 NPROC=8 ENDPOINT=first-node:29500 ./torchrun.sh   on every node.
# Elastic:    NNODES=8:16 ...                          goes on with 8 to 16 nodes; a node that joins or leaves restarts all ranks.
set -euo pipefail
cd "$(dirname "$0")"
# Without this variable torch keeps one store for all restarts, in which groups find the addresses of processes that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "${NNODES:-1}" --nproc-per-node "${NPROC:-8}" --max-restarts 100 --rdzv-id "${JOB:-thermocline}" \
  --rdzv-backend c10d --rdzv-endpoint "${ENDPOINT:-localhost:29500}" --rdzv-conf "${RDZV:-last_call_timeout=15}" \
  train.py --folder "${FOLDER:-run}" --topology "${TOPOLOGY:-hgx-h200}" "$@"
