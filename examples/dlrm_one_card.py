"""A DLRM on one card (or a CPU), with rows by heat: fp32 for the hottest, int8 for the warm, int4 for the rest.

python examples/dlrm_one_card.py [LOG.parquet]      a log in Criteo's columns; without one, a synthetic log
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: idle threads wait instead of spinning

import torch

from thermocline.train import DLRMRun, DLRMSettings


def main(data: Path | None = None, samples: int = 200_000) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    log = {"data": data, "samples": samples, "rows": 100_000, "device": device, "dim": 32}
    arms = {
        "fp32": DLRMSettings(**log, precision="fp32"),
        "int8, 5% cached": DLRMSettings(**log, precision="int8", cache=0.05),
        "by heat": DLRMSettings(**log, precision={"fp32": 0.01, "int8": 0.05, "int4": 0.94}),
    }
    for name, settings in arms.items():
        outcome = DLRMRun(settings).finish()
        print(f"{name:16} AUC {outcome.auc:.4f}  LogLoss {outcome.logloss:.4f}  {sum(outcome.memory.values()):>12,} bytes")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
