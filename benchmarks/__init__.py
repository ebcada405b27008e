"""Benchmarks: what is measured, against whom, and how it is written down.

    cases.py         what is raced: shapes, jobs, groups of rows
    ids.py           the ids that are looked up
    side.py          one contender, and the checks it passes before it is timed
    ours.py          this package as a contender; ours_int8.py: its int8 rows, for other precisions to be measured by
    peer_torch.py    torch's own embedding bags as contenders
    peer_fbgemm.py   FBGEMM as a contender
    timing.py        how time is taken
    worker.py        a process that builds contenders and runs them on request
    ceilings.py      what the card's memory can do
    judge.py         times -> rows
    record.py        rows -> the JSON that all benchmarks share
    kernels.py       `python -m benchmarks kernels` and `python -m benchmarks step`, with kernels_cpu.py and kernels_gpu.py
    memory.py        `python -m benchmarks memory`
    hits.py          `python -m benchmarks hits`, with hits_plot.py
    capacity.py      `python -m benchmarks capacity`
    host.py          `python -m benchmarks host`, with host_ours.py and host_fbgemm.py
    train.py         `python -m benchmarks train`, with train_side.py
    child.py         a contender's measurements in a process of its own; lookahead.py: timing steps that look one batch ahead
    accuracy.py      `python -m benchmarks accuracy`, with accuracy_arms.py, accuracy_rule.py, accuracy_rows.py and pareto.py
    paired.py        training runs for arms that are paired by seed
    levers.py        `python -m benchmarks levers`, with levers_arms.py and levers_rows.py
    chaos.py         `python -m benchmarks chaos`, with chaos_actors.py and chaos_fuzz.py
    show.py          `python -m benchmarks show`

A peer may need an environment of its own. `worker.py` and what it imports (`cases`, `ids`, `side`, `timing`, the peer's
file) therefore import only torch and each other, relatively: the folder can be loaded there without the rest of the
package.
"""
