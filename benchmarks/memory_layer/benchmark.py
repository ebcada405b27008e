"""`python -m benchmarks memory_layer`: what a memory table adds to a training step of a GPT, and lookups while decoding.

A GPT of 124M parameters (bf16, compiled), 32,768 tokens a step; a table of 100M rows x 160, 16 hashed rows a token:

    cuda/gpt124m/none                 the network with the projection of fixed vectors: what the others are compared with
    cuda/100M/int8+5%/host            rows in host memory, prefetched; int4+1% the same
    cuda/100M/int8+5%/device          rows on the GPU; int4+1% the same
    cuda/320M/int4+0.5%/host          320M rows x 160, with a state of 4 bytes a row
    cuda/320M/int4+0.5%/card          GiB of the GPU for cache and staging
    cuda/decode/int8+5%/1             microseconds of a lookup of the rows of 1, 4 or 64 tokens, not prefetched, against a
                                      plain gather of bf16 rows over the link; `.../graph`: both as CUDA graphs

A ratio is the time of "none" over ours, paired by round; `added` is what the table adds to the step, with its 95% interval.
`speed.py` checks every arm before it is timed. The 320M rows are measured in a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from benchmarks.memory_layer.gpt import GPTShape
from benchmarks.runner import isolated_process as child
from benchmarks.runner import record
from benchmarks.runner.isolated_process import Measurement
from benchmarks.runner.noninferiority import interval
from benchmarks.runner.paired_rows import finite

SPEED = "benchmarks.memory_layer.speed"
NONE = "none"
SHAPE = GPTShape(layers=12, width=768, heads=12, vocabulary=50_304, length=1024, batch=32)
STORED = (("int8", 0.05), ("int4", 0.01))
LARGE = ("int4", 0.005)
ROWS, LARGE_ROWS, DIM = 100_000_000, 320_000_000, 160
DECODED = (1, 4, 64)
CARD_GIB = 4.0  # of the GPU, for cache and staging of the large table
TIMES = {"settle": 288, "rounds": 6, "steps": 16, "calls": 400, "peer_rows": 20_000_000, "compiled": True}
LIMITS_S = (310.0, 165.0)  # of the two processes: the command ends within eight minutes
RACED_S = (240.0, 130.0)  # when no further round begins

QUICK_SHAPE = GPTShape(layers=2, width=32, heads=2, vocabulary=101, length=8, batch=4)
QUICK_TIMES = {"settle": 4, "rounds": 2, "steps": 4, "calls": 8, "peer_rows": 1009, "compiled": False}

Arm = dict[str, Any]


def arm_of(rows: int, dim: int, precision: str, cache: float, residency: str) -> Arm:
    stored = f"{rows // 1_000_000}M/{precision}+{100 * cache:g}%/{residency}"
    return {"name": stored, "rows": rows, "dim": dim, "precision": precision, "cache": cache, "residency": residency}


def arms() -> tuple[list[Arm], list[Arm]]:
    """The arms of the two processes."""
    usual = [arm_of(ROWS, DIM, *stored, residency) for residency in ("host", "device") for stored in STORED]
    return usual, [arm_of(LARGE_ROWS, DIM, *LARGE, "host")]


def all_cases() -> list[str]:
    """The name of every row."""
    usual, (large,) = arms()
    decoded = [f"decode/{_stored(arm)}/{tokens}" for arm in usual if arm["residency"] == "host" for tokens in DECODED]
    names = [*(arm["name"] for arm in usual), *(name + end for name in decoded for end in ("", "/graph")), large["name"]]
    return [f"cuda/{name}" for name in ("gpt124m/none", *names, large["name"].replace("host", "card"))]


def _stored(arm: Arm) -> str:
    return str(arm["name"].split("/")[1])


def run(
    device: str = "cuda", quick: bool = False, progress: Callable[[int, int, str], None] = lambda done, total, what: None
) -> dict[str, Any]:
    """Measure both processes, and return the record."""
    recorder = record.Recorder("memory_layer", lambda line: None, judged=not quick)
    shape = QUICK_SHAPE if quick else SHAPE
    common = {"device": device, "shape": shape.to_json(), **(QUICK_TIMES if quick else TIMES)}
    for number, (these, limit_s) in enumerate(zip(arms(), LIMITS_S, strict=True)):
        given = [{**arm, "rows": 4000 + 999 * number, "dim": 8} for arm in these] if quick else these
        job = {**common, "arms": given, "decode": [] if number else DECODED, "race_until_s": RACED_S[number]}
        found = child.results(SPEED, job, lambda what, number=number: progress(number, 2, what), limit_s)  # type: ignore[misc]
        add_rows(recorder, these, {each.get("name", "process"): each for each in found}, first=not number)
    progress(2, 2, "done")
    return recorder.record | {"shape": shape.to_json()}


def add_rows(recorder: record.Recorder, these: list[Arm], found: Mapping[str, Measurement], first: bool) -> None:
    """Add the rows of one process; `first`: the one with decoding."""
    none = found.get(NONE) or {"error": found.get("process", {}).get("error", "not measured")}
    if first:
        more = {"parameters": found.get("network", {}).get("parameters"), **found.get("vector gradient", {})}
        more["vector_gradient_ms"] = more.pop("ms", None)
        _add_step(recorder, "cuda/gpt124m/none", none, None, **{key: value for key, value in more.items() if key != "name"})
    for arm in these:
        ours = found.get(arm["name"]) or none
        _add_step(recorder, f"cuda/{arm['name']}", ours if ours is not none else {"error": none.get("error", "-")}, none)
        if not first:
            _add_card(recorder, f"cuda/{arm['name'].replace('host', 'card')}", ours)
        if first and arm["residency"] == "host":
            for tokens in DECODED:
                for end in ("", "/graph"):
                    case = f"decode/{_stored(arm)}/{tokens}{end}"
                    _add_decode(recorder, f"cuda/{case}", found.get(f"decode/{arm['name']}/{tokens}{end}"))


def _add_step(recorder: record.Recorder, case: str, ours: Measurement, none: Measurement | None, **further: Any) -> None:
    if "ms" not in ours:
        recorder.fail(case, ours.get("error", "not measured"))
        return
    further |= {key: value for key, value in ours.items() if key not in ("name", "ms", "spread", "rounds")}
    if none is None or "ms" not in none:
        recorder.add(case, ours["ms"], "ms", spread=ours["spread"], **further)
        return
    by_round = [with_table / without for with_table, without in zip(ours["rounds"], none["rounds"], strict=True)]
    further["added"] = finite(interval([ratio - 1 for ratio in by_round]))
    recorder.add(case, ours["ms"], "ms", "no lookup", none["ms"], 1 / median(by_round), ours["spread"], **further)


def _add_card(recorder: record.Recorder, case: str, ours: Measurement) -> None:
    if "cache_bytes" not in ours:
        recorder.fail(case, ours.get("error", "not measured"))
        return
    gib = sum(ours.get(f"{part}_bytes", 0.0) for part in ("cache", "maps", "staging")) / 2**30
    recorder.add(case, gib, "GiB", "allowed", CARD_GIB, CARD_GIB / gib, of_all=ours["card_bytes"] / 2**30)


def _add_decode(recorder: record.Recorder, case: str, found: Measurement | None) -> None:
    if found is None or "rows_us" not in found:
        if found is None and case.endswith("/graph"):
            recorder.add(case, None, "us", skipped="there are CUDA graphs on a GPU only")
        else:
            recorder.fail(case, (found or {}).get("error", "not measured"))
        return
    further = {key: value for key, value in found.items() if key not in ("name", "rows_us", "uva_us")}
    recorder.add(
        case, found["rows_us"], "us", "UVA gather, bf16", found["uva_us"], found["uva_us"] / found["rows_us"], **further
    )
