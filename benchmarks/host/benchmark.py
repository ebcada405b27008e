"""`python -m benchmarks host`: training steps on tables in host memory, against FBGEMM with equal GPU memory.

Ours keeps int8 (or int4) rows in host memory and a small full-precision cache on the GPU. FBGEMM trains no integer rows: it
keeps fp32 rows in host memory, and a cache that takes as many bytes on the GPU as ours, maps and optimizer state included. A
step is lookup, backward, update and every transfer of rows. Ids are Zipf and new in every step.

    cuda/B/zipf/int8+5%/host              our fastest variant against FBGEMM's fastest
    cuda/B/zipf/int8+5%/host-zero-copy    rows are read over the link where they are needed
    cuda/B/zipf/int8+5%/host-prefetch     rows of the next batch are prefetched during this step
    cuda/B/zipf/int8+5%/host-prefetch4    rows of the next four batches are prefetched together during four steps
    cuda/B/zipf/int8+5%+staged10%/host    the same, with GPU memory for a tenth of the rows as stored, where they stay
    cuda/B/zipf/int8+5%/prefetch-of-link  useful bytes in both directions of a prefetch alone, against the link
    cuda/link/h2d, cuda/link/d2h          copies of 256 MiB

Further fields: `stall_ms`, the time beyond a step with all rows on the GPU; `useful_bytes_each_way` and `useful_gbs`, over the
time of the step; `card_bytes` of both contenders; hit rates. FBGEMM is measured for each number of GPU bytes of our int8
variants; int4 with a cache of 1% takes fewer, and is compared with the smallest.

Each contender of each shape is a process. `thermocline_tables.py` runs first: its bytes set the size of FBGEMM's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.host.thermocline_tables import AHEAD
from benchmarks.kernels.cases import GPU_SHAPES, STEP_ROWWISE, ZIPF, Shape, Workload
from benchmarks.runner import isolated_process as child
from benchmarks.runner import record
from benchmarks.runner.isolated_process import Measurement
from benchmarks.runner.timing import BACKWARD

GATED = ("int8", 0.05)
STORED = (GATED, ("int4", 0.01))
STAGED = (0.10, 0.25)  # staged shares of the rows, with GATED
WAYS = ("zero-copy", *AHEAD)
PREFETCHED = "B"  # shape whose prefetch is compared with the link
OURS, PEER = "benchmarks.host.thermocline_tables", "benchmarks.host.fbgemm_tables"
PROCESS = "process"
# Steady states: our cache after 256 batches; FBGEMM's LRU after a dozen, its LFU later.
BUDGET = {"settle": 320, "peer_settle": 128, "stretches": 3}
QUICK = {"settle": 8, "peer_settle": 8, "stretches": 1}
PEER_HELP = (
    "FBGEMM was not measured: `import fbgemm_gpu` must work in this environment; install the fbgemm-gpu wheel that matches "
    "this torch and CUDA (with --no-deps), or put it on PYTHONPATH"
)


def all_cases(shapes: Sequence[Shape] = GPU_SHAPES) -> list[str]:
    """The name of every row."""
    cases = ["cuda/link/h2d", "cuda/link/d2h"]
    for job in (job for shape in shapes for job in _jobs(shape)):
        cases.append(f"{_base(job)}/host")
        if not job.staged:
            cases += [f"{_base(job)}/host-{way}" for way in WAYS]
            cases += [f"{_base(job)}/prefetch-of-link"] if job.shape.name == PREFETCHED else []
    return cases


def _jobs(shape: Shape) -> list[Workload]:
    """Workloads on a shape, the required one first."""
    jobs = [Workload(shape, precision, STEP_ROWWISE, cache=cache) for precision, cache in STORED]
    return [jobs[0], *(replace(jobs[0], staged=share) for share in STAGED), *jobs[1:]]


def run(
    device: str = "cuda",
    shapes: Sequence[Shape] = GPU_SHAPES,
    filter: str | None = None,
    judged: bool = True,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measure the shapes that have a row whose name contains `filter`, and return the record."""
    recorder = record.Recorder("host", lambda line: None, judged=judged)
    recorder.note(BACKWARD)
    wanted = [shape for shape in shapes if any(filter is None or filter in case for case in all_cases([shape])[2:])]
    link: Measurement = {}
    for number, shape in enumerate(wanted):

        def tell(what: str, done: int = 2 * number, shape: Shape = shape) -> None:
            progress(done + what.startswith(PEER), 2 * len(wanted), f"{shape.name} {what}")

        jobs = _jobs(shape)
        common = {"device": device, **(BUDGET if judged else QUICK)}
        ours = by_name(child.results(OURS, {**common, "jobs": [job.to_json() for job in jobs], "link": not link}, tell))
        link = link or _add_link(recorder, ours)
        peers: dict[str, dict[str, Measurement]] = {}
        card_bytes = {job.stored: bytes for job in jobs if job.precision == GATED[0] and (bytes := _card_bytes(ours, job))}
        if card_bytes:
            found = by_name(child.results(PEER, {**common, "job": jobs[0].to_json(), "card_bytes": card_bytes}, tell))
            for matched, bytes in card_bytes.items():
                own = {name.removeprefix(f"{matched}/"): one for name, one in found.items() if _belongs(name, matched)}
                peers[matched] = own
                _look_at(recorder, shape, own, bytes)
        for job in jobs:
            add_rows(recorder, job, ours, peers.get(job.stored, peers.get(jobs[0].stored, {})), link)
    progress(2 * len(wanted), 2 * len(wanted), "done")
    return recorder.record


def _belongs(name: str, matched: str) -> bool:
    """Whether a result of the peer's process belongs to the contenders that match `matched`, or to all."""
    return name.startswith(f"{matched}/") or "/" not in name


def by_name(results: Sequence[Measurement]) -> dict[str, Measurement]:
    """Results by name; the error of a process is named `PROCESS`."""
    return {found.get("name", PROCESS): found for found in results}


def add_rows(
    recorder: record.Recorder,
    job: Workload,
    ours: Mapping[str, Measurement],
    peers: Mapping[str, Measurement],
    link: Mapping[str, Any],
) -> None:
    """Add all rows of one workload."""
    base, measured = _base(job), _measured(ours, job)
    best = min(measured, key=lambda name: float(measured[name]["ms"]), default=f"{job.stored}/{WAYS[-bool(job.staged)]}")
    _add_step(recorder, f"{base}/host", ours, best, peers, link)
    if job.staged:
        return
    for way in WAYS:
        _add_step(recorder, f"{base}/host-{way}", ours, f"{job.stored}/{way}", peers, link)
    if job.shape.name == PREFETCHED:
        _add_share(recorder, f"{base}/prefetch-of-link", ours.get(f"{job.stored}/prefetch", {}), link)


def _add_step(
    recorder: record.Recorder, case: str, ours: Mapping[str, Measurement], name: str, peers: Mapping[str, Measurement],
    link: Mapping[str, Any],
) -> None:  # fmt: skip
    found = ours.get(name) or ours.get(PROCESS) or {"error": "not measured"}
    if "error" in found:
        recorder.fail(case, found["error"])
        return
    if "skipped" in found:
        recorder.add(case, None, "ms", skipped=found["skipped"])
        return
    further = {key: value for key, value in found.items() if key not in ("ms", "spread", "name")} | {"way": name}
    rate = found["useful_bytes_each_way"] / found["ms"] / 1e6
    further |= {"useful_gbs": rate, "useful_of_link": rate / link["h2d"] if "h2d" in link else None}
    on_card = ours.get(f"{name.partition('/')[0].partition('+staged')[0]}/device", {})
    if "ms" in on_card:
        further |= {"device_ms": on_card["ms"], "stall_ms": found["ms"] - on_card["ms"]}
    raced = {label: peer for label, peer in peers.items() if "ms" in peer}
    further["peers"] = {label: {key: peer[key] for key in peer if key != "name"} for label, peer in peers.items() if peer}
    if not raced:
        recorder.add(case, found["ms"], "ms", spread=found["spread"], **further)
        return
    best = min(raced, key=lambda label: float(raced[label]["ms"]))
    theirs = raced[best]["ms"]
    further["peer_card_bytes"] = raced[best]["card_bytes"]
    recorder.add(case, found["ms"], "ms", f"fbgemm fp32 {best}", theirs, theirs / found["ms"], found["spread"], **further)


def _add_share(recorder: record.Recorder, case: str, found: Measurement, link: Mapping[str, Any]) -> None:
    """Add the rate of useful bytes of a prefetch alone, as a share of the link."""
    if "prefetch_ms" not in found or "h2d" not in link:
        reason = found.get("error") or found.get("skipped") or "the link or the prefetch was not measured"
        recorder.add(case, None, "GB/s", skipped=reason)
        return
    rate = found["prefetch_bytes_both_ways"] / found["prefetch_ms"] / 1e6
    counted = ("prefetch_ms", "prefetch_bytes", "prefetch_bytes_both_ways", "useful_bytes_each_way")
    further = {key: found[key] for key in counted}
    recorder.add(case, rate, "GB/s", "link, host to card", link["h2d"], rate / link["h2d"], **further)


def _add_link(recorder: record.Recorder, ours: Mapping[str, Measurement]) -> Measurement:
    link = ours.get("link", {})
    for way in ("h2d", "d2h"):
        if way in link:
            recorder.add(f"cuda/link/{way}", link[way], "GB/s")
    return link


def _look_at(recorder: record.Recorder, shape: Shape, peers: Mapping[str, Measurement], card_bytes: int) -> None:
    """Record the peer's version, and note missing or unequal peers."""
    versions = peers.get("versions", {})
    recorder.record["versions"].update({key: value for key, value in versions.items() if key not in ("name", "error")})
    if not any("ms" in peer for peer in peers.values()):
        reasons = "; ".join(f"{label or 'process'}: {peer['error']}" for label, peer in peers.items() if "error" in peer)
        recorder.note(f"{shape.name}: {PEER_HELP} ({reasons})")
    for label, peer in peers.items():
        if peer.get("card_bytes", card_bytes) < card_bytes:
            recorder.note(
                f"{shape.name}: {label} has {peer['card_bytes']:,} bytes on the card, ours {card_bytes:,}: no fair race"
            )


def _measured(ours: Mapping[str, Measurement], job: Workload) -> dict[str, Measurement]:
    """Our timed variants of a workload."""
    names = [f"{job.stored}/{way}" for way in WAYS]
    return {name: ours[name] for name in names if "ms" in ours.get(name, {})}


def _card_bytes(ours: Mapping[str, Measurement], job: Workload) -> int:
    return max((found["card_bytes"] for found in _measured(ours, job).values()), default=0)


def _base(job: Workload) -> str:
    return f"cuda/{job.shape.name}/{ZIPF}/{job.stored}"
