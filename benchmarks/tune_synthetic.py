"""Tune fp32 rows on the large synthetic log: the learning rates of `thermocline.train.recipes.LARGE`.

Only fp32 is looked at, on a log that no arm is judged on (its seed is none of theirs): 80% of its samples are trained on, the
rest judge. One coordinate after the other: rows first, then MLPs, then rows again beside the best, until nothing is better.

    python benchmarks/tune_synthetic.py --json tuned.json          # on a CUDA GPU; about 3 s a run, 10 to 14 runs
    python benchmarks/tune_synthetic.py --device cpu --rows 20000 --samples 20000 --batch 256
"""

import argparse
import json
import time
from dataclasses import replace

from thermocline.data import SyntheticLog, in_memory
from thermocline.data.synthetic import table_rows
from thermocline.train import DLRMRun, DLRMSettings
from thermocline.train.recipes import LARGE

SEED = 1000
LRS = [0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3]
DENSE_LRS = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]


class Search:
    """Runs by (lr, dense_lr), each done once."""

    def __init__(self, settings, logs, seconds, target):
        self.settings, self.logs, self.target = settings, logs, target
        self.until = time.perf_counter() + seconds
        self.found = {}

    def score(self, lr, dense_lr):
        """Validation LogLoss; infinite when the time is over."""
        if (lr, dense_lr) not in self.found:
            if time.perf_counter() > self.until:
                return float("inf")
            start = time.perf_counter()
            done = DLRMRun(replace(self.settings, lr=lr, dense_lr=dense_lr), logs=self.logs).finish()
            self.found[lr, dense_lr] = done.logloss
            row = {"lr": lr, "dense_lr": dense_lr, "auc": done.auc, "logloss": done.logloss}
            row["seconds"] = time.perf_counter() - start
            print(json.dumps(row), flush=True)
            if self.target:
                with open(self.target, "a") as file:
                    file.write(json.dumps(row) + "\n")
        return self.found[lr, dense_lr]

    def climb(self, values, at, score):
        """From one value to a neighbour as long as that is better."""
        while True:
            near = [values[n] for n in (values.index(at) - 1, values.index(at) + 1) if 0 <= n < len(values)]
            best = min([at, *near], key=score)
            if best == at:
                return at
            at = best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--samples", type=int, default=20_000_000)
    parser.add_argument("--batch", type=int, default=LARGE.batch)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="no run starts later than this")
    parser.add_argument("--json", help="a line for each run is appended here")
    given = parser.parse_args()
    rows, first = table_rows(given.rows), given.samples * 4 // 5
    parts = [
        SyntheticLog(rows, first, SEED, 0, given.device),
        SyntheticLog(rows, given.samples - first, SEED, first, given.device),
    ]
    start = time.perf_counter()
    logs = tuple(in_memory(part, given.device, 1 << 20) for part in parts)
    print(f"{given.samples} samples made in {time.perf_counter() - start:.1f} s", flush=True)
    log = DLRMSettings(samples=given.samples, rows=given.rows, dim=given.dim, seed=SEED, device=given.device)
    search = Search(replace(LARGE, batch=given.batch).apply(log), logs, given.seconds, given.json)
    lr, dense_lr = 0.05, 4e-3
    while True:
        before = lr, dense_lr
        lr = search.climb(LRS, lr, lambda value, other=dense_lr: search.score(value, other))
        dense_lr = search.climb(DENSE_LRS, dense_lr, lambda value, other=lr: search.score(other, value))
        if (lr, dense_lr) == before or time.perf_counter() > search.until:
            break
    best = min(search.found, key=search.found.get)
    print(f"best of {len(search.found)} runs: lr {best[0]}, dense_lr {best[1]}, batch {given.batch}")


if __name__ == "__main__":
    main()
