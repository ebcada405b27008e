"""Results of the exchange benchmark as rows of the record.

    2x2/1in9/globo/P3/apart                 seconds of a step beyond its dense part, with all that was measured beside it
    2x2/1in9/globo/bytes-vs-P1              P3's bytes between nodes, sync included, against P1's: how many times fewer
    2x2/1in9/globo/exchanged-vs-P0          the same without sync
    2x2/1in9/globo/time-vs-P1/overlap       seconds beyond the dense part; apart: seconds in exchanges
    2x2/1in9/globo/never-slower/apart       the same against the best of P0, P1 and P2
    2x2/1in9/globo/tiers-vs-P1q             seconds beyond the dense part with overlap: what the plan buys
    2x2/1in9/globo/time-vs-P3r/overlap      the same against plans with replicas whether they pay or not
    2x2/1in9/globo/exact/...                P3x against P2
    2x2/1in9/globo/owners/bytes-vs-P1q      P1o against P1q, and owners/time-vs-P1q/overlap: what sums buy
    2x2/1in9/globo/balance                  bytes of the card that sends most over the mean, P3
    2x2/1in9/globo/memory                   bytes of all cards against P0's
    2x2/1in9/globo/counters/cluster         bytes of the meter against the kernel's, all headers taken off, all arms together
    2x2/1in9/globo/check/P3/traffic         error of the plan's prediction over its tolerance

Targets are minimum values of `ratio`: "down by 85%" is 1 / 0.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.exchange.arms import REPLICAS
from benchmarks.exchange.step import APART, OVERLAP
from benchmarks.runner.record import Recorder
from thermocline.plan.run_file import TOLERANCES

Job = dict[str, Any]

NEAR = 0.03  # that counters of the kernel may be off
GLOO = 144  # bytes that gloo adds to a message: its header, and word that there is one, and that it may come, 48 each
EVEN = 1.10  # maximum over mean
CHECKED = ("P1", "P2", "P1q", "P1o", "P3", "P3x", "P3f", *REPLICAS)
AT_MOST = "asked at most"


def write(recorder: Recorder, jobs: Sequence[Job]) -> None:
    """All rows: the measurements of each run, and comparisons with the other runs of its log and cluster."""
    groups: dict[str, dict[str, Job]] = {}
    for job in jobs:
        if "error" in job:
            recorder.fail(job["name"], job["error"])
            continue
        groups.setdefault(f"{job['case']}/{job['log']}", {}).setdefault(job["arm"], {})[job["mode"]] = job
        further = {
            key: value for key, value in job.items() if key not in ("name", "case", "log", "arm", "mode", "exposed", "check")
        }
        recorder.add(job["name"], job["exposed"], "s", split=split(job), **further)
    for name, arms in groups.items():
        if APART in arms.get("P3", {}):
            _against(recorder, name, arms)
            _exact(recorder, name, arms)
            _sound(recorder, name, arms)
        _owners(recorder, name, arms)
        _checks(recorder, name, arms)


def modes(job: Job) -> list[str]:
    return [mode for mode in (APART, OVERLAP) if mode in job]


def split(found: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of forward (ids and rows), backward and sync, between nodes and inside them; empty for a peer without a meter."""
    traffic: dict[str, float] = found.get("traffic", {})
    parts = {"forward": ("ids", "rows"), "backward": ("gradients",), "sync": ("sync",)}
    return {
        f"{link}/{part}": sum(traffic.get(f"{link}/{direction}", 0.0) for direction in directions)
        for link in ("cluster", "node")
        for part, directions in parts.items()
        if traffic
    }


def between(job: Job, sync: bool = True) -> float:
    """Bytes that a card sends to other nodes in a step; of a peer, as the kernel counts them."""
    found = job.get(APART, {"kernel": {}})
    if "traffic" not in found:
        return float(found["kernel"].get("cluster", {}).get("carried", 0.0))
    return sum(size for part, size in split(found).items() if part.startswith("cluster/") and (sync or part != "cluster/sync"))


def seconds(job: Job, mode: str) -> float:
    """Communication: seconds in exchanges, or with overlap what is left of them beyond the dense part."""
    return float(job[mode]["exposed"] if mode == OVERLAP else sum(job[mode]["exchange"].values()))


def _row(recorder: Recorder, case: str, ours: float, unit: str, peer: str, theirs: float) -> None:
    recorder.add(case, ours, unit, peer, theirs, theirs / max(ours, 1e-9))


def _against(recorder: Recorder, name: str, arms: Mapping[str, Job]) -> None:
    """P3 against all other arms."""
    best = arms["P3"]
    for peer in (arm for arm in ("P0", "P1", "P2", "P1q", *REPLICAS, "torchrec") if arm in arms):
        other = arms[peer]
        _row(recorder, f"{name}/bytes-vs-{peer}", between(best), "bytes", peer, between(other))
        _row(recorder, f"{name}/exchanged-vs-{peer}", between(best, sync=False), "bytes", peer, between(other, sync=False))
        for mode in [mode for mode in modes(other) if mode in best]:
            _row(recorder, f"{name}/time-vs-{peer}/{mode}", seconds(best, mode), "s", peer, seconds(other, mode))
    for mode in modes(best):
        plain = {arm: seconds(arms[arm], mode) for arm in ("P0", "P1", "P2") if mode in arms.get(arm, {})}
        if plain:
            fastest = min(plain, key=lambda arm: plain[arm])
            _row(recorder, f"{name}/never-slower/{mode}", seconds(best, mode), "s", fastest, plain[fastest])
    if OVERLAP in arms.get("P1q", {}) and OVERLAP in best:
        theirs = arms["P1q"][OVERLAP]["exposed"]
        _row(recorder, f"{name}/tiers-vs-P1q", best[OVERLAP]["exposed"], "s", "P1q", theirs)
    if "P3f" in arms and "P0" in arms:
        equal = arms["P3f"]
        _row(recorder, f"{name}/equal/bytes-vs-P0", between(equal), "bytes", "P0", between(arms["P0"]))
        for mode in modes(equal):
            _row(recorder, f"{name}/equal/time-vs-P0/{mode}", seconds(equal, mode), "s", "P0", seconds(arms["P0"], mode))


def _exact(recorder: Recorder, name: str, arms: Mapping[str, Job]) -> None:
    """The exact arm with tiers against the best exact arm without."""
    if "P3x" in arms and "P2" in arms:
        ours, theirs = arms["P3x"], arms["P2"]
        _row(recorder, f"{name}/exact/bytes-vs-P2", between(ours), "bytes", "P2", between(theirs))
        for mode in modes(ours):
            _row(recorder, f"{name}/exact/exposed-vs-P2/{mode}", ours[mode]["exposed"], "s", "P2", theirs[mode]["exposed"])


def _owners(recorder: Recorder, name: str, arms: Mapping[str, Job]) -> None:
    """Pooling by owners against pooling by requesters."""
    if APART in arms.get("P1o", {}) and APART in arms.get("P1q", {}):
        ours, theirs = arms["P1o"], arms["P1q"]
        _row(recorder, f"{name}/owners/bytes-vs-P1q", between(ours), "bytes", "P1q", between(theirs))
        for mode in [mode for mode in modes(theirs) if mode in ours]:
            _row(recorder, f"{name}/owners/time-vs-P1q/{mode}", seconds(ours, mode), "s", "P1q", seconds(theirs, mode))


def _sound(recorder: Recorder, name: str, arms: Mapping[str, Job]) -> None:
    """Balance, memory, and whether the meter and the kernel agree."""
    best = arms["P3"][APART]
    _row(recorder, f"{name}/balance", best["balance"], "max over mean", AT_MOST, EVEN)
    if "P0" in arms:
        _row(recorder, f"{name}/memory", best["memory"], "bytes", "P0", arms["P0"][APART]["memory"])
    for link in ("cluster", "node"):
        runs = [job[mode] for job in arms.values() for mode in modes(job)]
        runs = [run for run in runs if run.get("kernel") and "traffic" in run]  # ours, with nothing under way at either end
        if runs:
            metered = sum(size for run in runs for part, size in split(run).items() if part.startswith(link))
            carried = sum(run["kernel"][link]["carried"] for run in runs)
            gloo = GLOO * sum(run["messages"][link] for run in runs)
            off = abs((carried - gloo) / max(metered, 1.0) - 1)
            headers = sum(run["kernel"][link]["bytes"] for run in runs) / max(carried, 1.0) - 1
            recorder.add(
                f"{name}/counters/{link}", off, "of the meter", AT_MOST, NEAR, NEAR / max(off, 1e-9), headers=headers,
                gloo=gloo, metered=metered, kernel=carried - gloo, again=_again(runs),
            )  # fmt: skip


def _again(runs: Sequence[Job]) -> int | None:
    """Segments that TCP retransmitted; None unless every run counted them."""
    return sum(run["again"] for run in runs) if all("again" in run for run in runs) else None


def _checks(recorder: Recorder, name: str, arms: Mapping[str, Job]) -> None:
    """`plan check` of every run: the line of each kind that is furthest off, of those for whole cards, links and steps."""
    for arm in (arm for arm in CHECKED if arm in arms):
        job = arms[arm]
        found = job[OVERLAP if OVERLAP in job else APART]["check"]
        for kind, may in TOLERANCES.items():
            lines = [line for line in found if line["kind"] == kind and line["off"] is not None and _whole(line["what"])]
            if lines:
                worst = max(lines, key=lambda line: abs(line["off"]))
                off = abs(worst["off"])
                recorder.add(
                    f"{name}/check/{arm}/{kind}", off, "of predicted", AT_MOST, may, may / max(off, 1e-9), what=worst["what"],
                    predicted=worst["predicted"], measured=worst["measured"],
                )  # fmt: skip


def _whole(what: str) -> bool:
    return what == "step" or what in ("node: all", "cluster: all") or (what.startswith("rank ") and what.endswith(": all"))
