"""Processes of the demo's training, started by `pipeline.py`.

    python -m examples.demo.worker heat SIZES       heat of the synthetic histories, for their plan
    python -m examples.demo.worker warm SIZES       a few steps of both models in one process, which compiles kernels once
    torchrun ... -m examples.demo.worker train SIZES

The first rank writes `trained_ARM.json` after the checkpoint, so that an interrupted demo continues with the next run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from thermocline.checkpoint import save
from thermocline.data.synthetic import SyntheticLog, table_rows
from thermocline.data.write_log import write_parquet
from thermocline.heat import profile_batches, profile_files
from thermocline.plan import Plan, TableConfig, TablesConfig, make_plan
from thermocline.train import DLRMRun, DLRMSettings, SequenceRun, SequenceSettings, TrainingRanks

from .stages import show_progress, write

ARMS = ("fp32", "planned")


def main() -> None:
    task, sizes = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if task == "heat":
        log = _sequence(sizes).log()
        profile_batches([{log.column: log.training_items()}]).save("sequence_heat.tc")
        return
    if task == "warm":
        _warm(sizes)
        return
    dist.init_process_group("gloo")
    try:
        for number, arm in enumerate(ARMS):
            _train(arm, number, sizes)
    finally:
        dist.destroy_process_group()


def _warm(sizes: dict[str, Any]) -> None:
    """Small runs of both models on one rank, discarded."""
    small = {**sizes, "samples": 600, "rows": 2_600, "users": 60, "items": 64}
    with TemporaryDirectory() as folder:
        small["data"] = f"{folder}/clicks.parquet"
        log = SyntheticLog(table_rows(small["rows"]), small["samples"])
        write_parquet(log, Path(small["data"]), lambda done, total, what: None)
        heat = profile_files([small["data"]], output=f"{folder}/heat.tc")
        kinds = ("fp32", "int8", "int4")
        tables = [
            TableConfig(
                name=each.name,
                rows=each.distinct + 1,
                dim=small["dim"],
                cache=0.05 * (number % 3 > 0),
                precision=kinds[number % 3],
            )
            for number, each in enumerate(heat.tables.values())
        ]
        plan = make_plan(TablesConfig(batch=64, tables=tuple(tables)), heat, "laptop")
        show_progress(0, 2, "compiling kernels for this machine, once")
        DLRMRun(_clicks(small), ranks=TrainingRanks(plan=plan, heat=heat)).finish()
    show_progress(1, 2, "compiling kernels for this machine, once")
    for precision in ("fp32", "int8"):
        histories = _sequence(small)
        seen = histories.log()
        heat = profile_batches([{seen.column: seen.training_items()}])
        item = TableConfig(
            name="item",
            rows=small["items"],
            dim=small["sequence_dim"],
            pooling="none",
            precision=precision,
            cache=0.05 * (precision != "fp32"),
        )
        plan = make_plan(TablesConfig(batch=32, tables=(item,)), heat, "laptop")
        SequenceRun(histories, ranks=TrainingRanks(plan=plan, heat=heat)).finish()


def _train(arm: str, number: int, sizes: dict[str, Any]) -> None:
    done = Path(f"trained_{arm}.json")
    kept = [done.exists() and json.loads(done.read_text())["sizes"] == sizes]
    dist.broadcast_object_list(kept)  # one rank decides for all
    if kept[0]:
        return
    ranks = TrainingRanks(dist.get_rank(), dist.get_world_size(), Plan.load(f"{arm}.json"), "heat.tc")
    clicks = DLRMRun(_clicks(sizes), ranks=ranks)
    dlrm = clicks.finish(_progress(2 * number, f"a DLRM, {arm}"))
    found = {"dlrm": {"auc": dlrm.auc, "logloss": dlrm.logloss, **_cost(clicks, dlrm)}}
    save(clicks.model.embeddings, f"checkpoint_{arm}")
    tables: Any = clicks.model.embeddings
    tables.flush()  # as served: cached rows rounded to their table's precision
    found["dlrm"]["served_auc"] = clicks.evaluate()["auc"]
    ranks = TrainingRanks(ranks.rank, ranks.size, Plan.load(f"sequence_{arm}.json"), "sequence_heat.tc")
    histories = SequenceRun(_sequence(sizes), ranks=ranks)
    sequence = histories.finish(_progress(2 * number + 1, f"a sequence model, {arm}"))
    found["sequence"] = {"hit_rate": sequence.hit_rate, "ndcg": sequence.ndcg, **_cost(histories, sequence)}
    if ranks.first:
        write(done, {**found, "sizes": sizes})


def _clicks(sizes: dict[str, Any]) -> DLRMSettings:
    return DLRMSettings(data=Path(sizes["data"] or "clicks.parquet"), dim=sizes["dim"], batch=sizes["batch"])


def _sequence(sizes: dict[str, Any]) -> SequenceSettings:
    return SequenceSettings(
        users=sizes["users"], items=sizes["items"], dim=sizes["sequence_dim"], batch=sizes["sequence_batch"], length=36,
        blocks=1, epochs=2,
    )  # fmt: skip


def _cost(run: DLRMRun | SequenceRun, outcome: Any) -> dict[str, Any]:
    """Bytes of the tables on all ranks, and bytes that one rank sends in a step, by link."""
    (memory,) = run.ranks.add(float(sum(outcome.memory.values())))
    sent: dict[str, float] = {}
    assert run.run_json is not None
    for line in run.run_json.traffic:
        if line.link in ("node", "cluster"):
            sent[line.link] = sent.get(line.link, 0.0) + line.bytes
    return {"bytes": memory, "sent": sent, "step": run.run_json.step, "samples": outcome.samples, "seconds": outcome.seconds}


def _progress(number: int, what: str) -> Any:
    """Progress over all runs, printed by the first rank."""
    last = [-1]

    def report(done: int, total: int, _: str) -> None:
        part = 250 * done // total
        if int(os.environ["RANK"]) == 0 and part != last[0]:
            last[0] = part
            show_progress(250 * number + part, 250 * 2 * len(ARMS), what)

    return report


if __name__ == "__main__":
    main()
