"""`python -m benchmarks plan-runs`: predictions of plans against runs of random tables, logs and clusters, over shaped links.

    case.py            a random case by its number
    rank.py            one rank: calibrates, plans, shards, measures
    torchrec_rank.py   the same tables by TorchRec and its own planner

Link rates are such that the links of the planned step take about half a second: two cores drive all ranks, and links shall
bound a step. Rows of the record, by case:

    17/time       the error of the predicted step
    17/memory     the error of the predicted bytes of the rank that is furthest off
    17/step       seconds in exchanges against TorchRec's plan
    17/bytes      bytes of all links against TorchRec's plan, as the kernel counts them
    all/...       the worst and the median of all cases
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.exchange.benchmark import (
    PEER,
    ClusterCase,
    ClusterRun,
    ExchangePlan,
    Job,
    ended_by_signal,
    python_of,
    read_runs,
    without_peer,
)
from benchmarks.exchange.network import why_not
from benchmarks.plan_runs.case import RandomCase
from benchmarks.plan_runs.inputs import heat_of, nominal_topology, tables_of
from benchmarks.runner import record
from thermocline.plan.make import make_plan
from thermocline.plan.run_file import TOLERANCES

Progress = Callable[[int, int, str], None]

AIM = 0.5  # seconds in links
FIRST_RATE, SLOWEST, FASTEST = 4e6, 2e5, 4e7  # bytes a second and rank
STEPS = 6
OURS = "plan"
MODULES = ("benchmarks.plan_runs.rank", "benchmarks.plan_runs.torchrec_rank")
AT_MOST = "asked at most"
PARTS = ("time", "memory")


def run(
    runs: int, first: int = 0, kept: Path | None = None, peer_python: str | Path | None = None,
    progress: Progress = lambda done, total, what: None, only: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Measure cases `first` to `first + runs`, and return the record."""
    recorder = record.Recorder("plan-runs", lambda line: None, judged=not why_not() and not only)
    if why_not():
        recorder.note(f"over loopback, links not shaped: {why_not()}; times say nothing of unequal links")
    with tempfile.TemporaryDirectory(prefix="thermocline-") as folder, ended_by_signal():
        here = Path(folder)
        out = kept or here / "runs.jsonl"
        done = read_runs(out)
        jobs = without_peer(_jobs(range(first, first + runs), here, set(done), only), peer_python, recorder)
        shapes = sorted({(job["nodes"], job["cards"]) for job in jobs})
        for nodes, cards in shapes:
            for peer in (False, True):
                mine = [job for job in jobs if (job["nodes"], job["cards"]) == (nodes, cards) and (job["arm"] == PEER) == peer]
                python = python_of(peer_python) if peer else sys.executable
                ranks = ClusterRun(ClusterCase(nodes, cards, 1), here, out, ExchangePlan(), python, MODULES)
                report = partial(_report, progress, out, len(jobs), f"{nodes}x{cards}{', TorchRec' if peer else ''}")
                while left := [job for job in mine if job["name"] not in read_runs(out)]:
                    ranks.do(left, report)
        done = read_runs(out)
    write(recorder, [done[job["name"]] for job in jobs])
    return recorder.record


def _report(progress: Progress, kept: Path, total: int, what: str) -> None:
    progress(len(read_runs(kept)), total, what)


def _jobs(seeds: range, folder: Path, done: set[str], only: Sequence[str]) -> list[Job]:
    """The jobs of all cases; heat files of those to run are written for the ranks."""
    jobs: list[Job] = []
    for seed in seeds:
        case = RandomCase.draw(seed)
        arms = (OURS, PEER) if _comparable(case) else (OURS,)
        names = {arm: f"{seed}/{arm}" for arm in arms if not only or arm in only}
        rates = (0.0, 0.0)
        if any(name not in done for name in names.values()):
            heat = heat_of(case)
            heat.save(folder / f"{seed}.tc")
            step = make_plan(
                tables_of(case, case.dense), heat, nominal_topology(case, FIRST_RATE), gradients=case.gradients
            ).step
            links = sum(step.parts[part] for part in ("ids", "rows", "gradients", "sync"))
            rate = min(max(FIRST_RATE * links / AIM, SLOWEST), FASTEST)
            rates = (rate * case.inside, rate)
        about = {"nodes": case.nodes, "cards": case.cards, "seed": seed, "steps": STEPS}
        links_of = {"links": f"{rates[0]:.4g}/{rates[1]:.4g}", "rates": rates}
        jobs += [{"name": name, "arm": arm, **about, **links_of} for arm, name in names.items()]
    return jobs


def _comparable(case: RandomCase) -> bool:
    """Whether TorchRec can run the tables, in the same memory: its sequences have one dimension."""
    return not case.room and (case.pooling != "none" or len({table.dim for table in case.tables}) == 1)


# -- rows -----------------------------------------------------------------------------------------------------------------


def write(recorder: record.Recorder, jobs: Sequence[Job]) -> None:
    """All rows."""
    by_seed: dict[int, dict[str, Job]] = {}
    for job in jobs:
        if "error" in job:
            recorder.fail(job["name"], job["error"])
        else:
            by_seed.setdefault(job["seed"], {})[job["arm"]] = job
    worst: dict[str, list[float]] = {part: [] for part in PARTS}
    against: dict[str, list[float]] = {"step": [], "bytes": []}
    for seed, arms in by_seed.items():
        if OURS in arms:
            _predictions(recorder, seed, arms[OURS], worst)
        if len(arms) == 2:
            _against(recorder, seed, arms, against)
    for part, off in worst.items():
        if off:
            limit = TOLERANCES[part]  # type: ignore[index]
            recorder.add(
                f"all/{part}", max(off), "of predicted", AT_MOST, limit, limit / max(max(off), 1e-9),
                within=sum(each <= limit for each in off), runs=len(off), median=statistics.median(off),
            )  # fmt: skip
    for part, ratios in against.items():
        if ratios:
            least = min(ratios)
            recorder.add(f"all/{part}-vs-torchrec", 1 / least, "times", PEER, 1.0, least, runs=len(ratios), ratios=ratios)


def _predictions(recorder: record.Recorder, seed: int, job: Job, worst: dict[str, list[float]]) -> None:
    for part in PARTS:
        limit = TOLERANCES[part]  # type: ignore[index]
        lines = [line for line in job["check"] if line["kind"] == part and line["off"] is not None and _whole(line["what"])]
        line = max(lines, key=lambda line: abs(line["off"]))
        off = abs(line["off"])
        worst[part].append(off)
        recorder.add(
            f"{seed}/{part}", off, "of predicted", AT_MOST, limit, limit / max(off, 1e-9), predicted=line["predicted"],
            measured=line["measured"], tables=job["what"], placements=_counted(job["placements"]), link=job["links"],
        )  # fmt: skip


def _whole(what: str) -> bool:
    return what == "step" or what.endswith(": all")


def _counted(placements: Sequence[str] | Mapping[str, str]) -> dict[str, int]:
    names = list(placements.values()) if isinstance(placements, Mapping) else list(placements)
    return {name: names.count(name) for name in sorted(set(names))}


def _against(recorder: record.Recorder, seed: int, arms: Mapping[str, Job], found: dict[str, list[float]]) -> None:
    ours, theirs = arms[OURS], arms[PEER]
    carried = [sum(link["carried"] for link in job.get("kernel", {}).values()) for job in (ours, theirs)]
    for part, (mine, other), unit in (
        ("step", (ours["overlapping"], theirs["exposed"]), "s"), ("bytes", carried, "bytes"),
    ):  # fmt: skip
        ratio = other / max(mine, 1e-9)
        found[part].append(ratio)
        recorder.add(f"{seed}/{part}", mine, unit, PEER, other, ratio, theirs=_counted(theirs["placements"]))
