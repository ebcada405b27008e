"""`python -m benchmarks train`: a DLRM trained end to end on tables that are larger than their share of GPU memory.

26 tables of a million rows and 128 columns (13.3 GB in fp32), MLPs of the sizes of MLPerf's DLRM (13-512-256-128 below,
1024-1024-512-256-1 above the dot products), Adam, TF32, batches of 16,384 samples of the synthetic click log. Rows are in host
memory. Every arm may take as many GPU bytes as int8 tables with a cache of 5%: about 0.9 GB with maps and optimizer state.

    cuda/dlrm/int8+5%/train             our fastest variant against the fastest arm with fp32 rows
    cuda/dlrm/int8+5%/train-zero-copy   rows are read over the link where they are needed
    cuda/dlrm/int8+5%/train-prefetch    rows of the next batch are prefetched during this step
    cuda/dlrm/int8+5%/train-prefetch4   rows of the next four batches are prefetched together during four steps
    cuda/dlrm/fp32/train-lru, ...       FBGEMM's rows with its caches in the same model
    cuda/dlrm/fp32/train-zero-copy      our fp32 rows, without a cache

Values are samples per second. Each contender is a process (`train_contender.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.host.benchmark import PEER_HELP, PROCESS, WAYS, by_name
from benchmarks.kernels.cases import STEP_ROWWISE, A, Shape, Workload
from benchmarks.runner import isolated_process as child
from benchmarks.runner import record
from benchmarks.runner.isolated_process import Measurement
from benchmarks.runner.timing import BACKWARD

STORED = (("int8", 0.05), ("int4", 0.05), ("fp32", 0.0))
MLPS = {"bottom": (512, 256), "top": (1024, 1024, 512, 256)}
PEERS = ("lru", "lfu", "lru-pipelined")
CONTENDER = "benchmarks.host.train_contender"
BUDGET = {"ring": 256, "settle": 256, "stretches": 3}
QUICK = {"ring": 8, "settle": 8, "stretches": 1}
QUICK_SHAPE = Shape("A", tables=26, rows=1001, dim=16, batch=63, pooling=1)
QUICK_MLPS = {"bottom": (8,), "top": (8,)}


def all_cases() -> list[str]:
    """The name of every row."""
    low = [_base(precision, cache) for precision, cache in STORED if cache]
    cases = [f"{base}{suffix}" for base in low for suffix in ("", *(f"-{way}" for way in WAYS))]
    return [*cases, *(f"{_base('fp32', 0.0)}-{arm}" for arm in (*PEERS, WAYS[0]))]


def run(
    device: str = "cuda",
    shape: Shape = A,
    judged: bool = True,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Train every arm for several hundred steps, and return the record."""
    recorder = record.Recorder("train", lambda line: None, judged=judged)
    recorder.note(BACKWARD)
    mlps = MLPS if judged else QUICK_MLPS
    common = {"device": device, "shape": asdict(shape), "mlps": mlps, **(BUDGET if judged else QUICK)}
    ours_job = {**common, "side": "ours", "stored": STORED, "ways": WAYS}
    ours = by_name(child.results(CONTENDER, ours_job, lambda what: progress(0, 2, f"ours, {what}")))
    card_bytes = max(
        (found["card_bytes"] for name, found in ours.items() if name.startswith("int") and "ms" in found), default=0
    )
    peers: dict[str, Measurement] = {}
    if card_bytes:
        peer_job = {**common, "side": "fbgemm", "card_bytes": card_bytes}
        peers = by_name(child.results(CONTENDER, peer_job, lambda what: progress(1, 2, f"fbgemm, {what}")))
    progress(2, 2, "done")
    recorder.record["sizes"] = {"tables": asdict(shape), **mlps, "card_bytes": card_bytes}
    add_rows(recorder, ours, peers)
    return recorder.record


def add_rows(recorder: record.Recorder, ours: Mapping[str, Measurement], peers: Mapping[str, Measurement]) -> None:
    """Add all rows."""
    versions = peers.get("versions", {})
    recorder.record["versions"].update({key: value for key, value in versions.items() if key not in ("name", "error")})
    fp32 = {f"fbgemm fp32 {arm}": _found(peers, arm) for arm in PEERS}
    raced = any("ms" in found for found in fp32.values())
    if not raced:
        recorder.note(f"{PEER_HELP} ({fp32[f'fbgemm fp32 {PEERS[0]}'].get('error')})")
    fp32[f"ours fp32 {WAYS[0]}"] = _found(ours, f"fp32/{WAYS[0]}")
    timed = {label: float(found["samples_per_s"]) for label, found in fp32.items() if "ms" in found}
    # Our fp32 rows have no cache: without FBGEMM there is no relevant fp32 arm.
    best_fp32 = max(timed.items(), key=lambda item: item[1]) if raced else None
    for precision, cache in STORED:
        if not cache:
            continue
        stored = Workload(A, precision, STEP_ROWWISE, cache=cache).stored
        arms = {way: _found(ours, f"{stored}/{way}") for way in WAYS}
        measured = {way: found for way, found in arms.items() if "ms" in found}
        way = max(measured, key=lambda way: float(measured[way]["samples_per_s"]), default=WAYS[0])
        _add(recorder, _base(precision, cache), arms[way], best_fp32, way=way)
        for way, found in arms.items():
            _add(recorder, f"{_base(precision, cache)}-{way}", found, best_fp32)
    for label, found in fp32.items():
        known = found if "ms" in found else {"skipped": found.get("error")}
        _add(recorder, f"{_base('fp32', 0.0)}-{label.rpartition(' ')[2]}", known, None)


def _found(results: Mapping[str, Measurement], name: str) -> Measurement:
    return results.get(name) or results.get(PROCESS) or {"error": "not measured"}


def _add(recorder: record.Recorder, case: str, found: Measurement, best_fp32: tuple[str, float] | None, **further: Any) -> None:
    unit = "samples/s"
    if "ms" not in found:
        if "skipped" in found:
            recorder.add(case, None, unit, skipped=found["skipped"])
        else:
            recorder.fail(case, found["error"])
        return
    rate, spread = found["samples_per_s"], found["spread"]
    further |= {key: value for key, value in found.items() if key not in ("name", "spread", "samples_per_s")}
    if best_fp32 is None:
        recorder.add(case, rate, unit, spread=spread, **further)
    else:
        recorder.add(case, rate, unit, best_fp32[0], best_fp32[1], rate / best_fp32[1], spread, **further)


def _base(precision: str, cache: float) -> str:
    return f"cuda/dlrm/{Workload(A, precision, STEP_ROWWISE, cache=cache).stored}/train"
