"""A race: build the contenders of a case group, time them in turn, and add a row for each baseline.

A row compares ours with the best contender of the libraries that its baseline names. It is written only if all of these
libraries are available. A contender that fails its check or its build turns the rows that need it into rows with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.kernels.cases import Baseline, CaseGroup
from benchmarks.runner.record import Recorder, Row, brief
from benchmarks.runner.timing import Chunk, Times, enough, interleave

OURS = "ours"
ALONE = Baseline("", ())  # ours without a peer


@dataclass(frozen=True)
class TimingBudget:
    """Rounds, milliseconds of each contender in a round, and bounds of its iterations."""

    rounds: int
    chunk_ms: float
    least: int
    most: int


@dataclass
class ReadyContenders:
    """Contenders that were built, by label, and errors of libraries that failed."""

    library_of: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def gather(self, libraries: Iterable[str], build: Callable[[str], Sequence[str]]) -> None:
        """Build the contenders of each library; ours is first, and without it there is no race."""
        for library in libraries:
            try:
                self.library_of.update(dict.fromkeys(build(library), library))
            except Exception as error:
                self.errors[library] = f"{library}: {brief(error)}"
                if library == OURS:
                    return


def active(group: CaseGroup, available: set[str], peers: bool) -> list[Baseline]:
    """The rows of a group that can be measured with these libraries."""
    if not peers:
        return [ALONE]
    return [baseline for baseline in group.baselines if set(baseline.libraries) <= available]


def libraries_of(baselines: Iterable[Baseline]) -> list[str]:
    """Ours first, then the peers, each once."""
    return list(dict.fromkeys([OURS, *(library for baseline in baselines for library in baseline.libraries)]))


class RaceTimes(NamedTuple):
    """Times of all contenders, and the work of our cache meanwhile."""

    times: dict[str, Times]
    cache: dict[str, float]


def race(chunks: Mapping[str, Chunk], budget: TimingBudget) -> dict[str, Times]:
    """Time all contenders in turn, each for about as long."""
    iterations = {label: enough(chunk(2), budget.chunk_ms, budget.least, budget.most) for label, chunk in chunks.items()}
    return interleave(chunks, budget.rounds, iterations)


def time_all(chunks: Mapping[str, Chunk], budget: TimingBudget, stats: Callable[[], Mapping[str, int]]) -> RaceTimes:
    """Race all contenders, and count the work of our cache meanwhile; `stats` reads its counters."""
    before = stats()
    times = race(chunks, budget)
    return RaceTimes(times, cache_work(before, stats()))


def add_rows(
    recorder: Recorder, cases: Mapping[Baseline, str], ready: ReadyContenders, measure: Callable[[], RaceTimes]
) -> dict[str, Times]:
    """Measure once, then add the row of each baseline. Returns the times."""
    times: dict[str, Times] = {}
    did: dict[str, float] = {}
    if OURS not in ready.errors:
        try:
            times, did = measure()
        except Exception as error:
            ready.errors[OURS] = brief(error)
    for baseline, case in cases.items():
        failed = [ready.errors[library] for library in (OURS, *baseline.libraries) if library in ready.errors]
        if failed:
            recorder.fail(case, "; ".join(failed))
        else:
            labels = [x for x in times if ready.library_of[x] in baseline.libraries and x not in baseline.without]
            _add_row(recorder, case, times, labels, did)
    return times


def cache_work(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """Hits and admissions per counted lookup, between two readings of a cache's counters."""
    change = {name: after[name] - before.get(name, 0) for name in after}
    lookups = change.get("lookups", 0)
    return {"hit_rate": change["hits"] / lookups, "admitted": change["admissions"] / lookups} if lookups else {}


def _add_row(recorder: Recorder, case: str, times: Mapping[str, Times], labels: Sequence[str], did: dict[str, Any]) -> Row:
    """Add ours against the best of `labels`, or ours alone."""
    ours = times[OURS]
    if not labels:
        return recorder.add(case, ours.median, "ms", spread=ours.spread, **did)
    best = min(labels, key=lambda label: times[label].median)
    peer = times[best]
    by_round = [theirs / mine for mine, theirs in zip(ours.rounds, peer.rounds, strict=True)]
    return recorder.add(
        case,
        ours.median,
        "ms",
        peer=best,
        peer_value=peer.median,
        ratio=peer.median / ours.median,
        spread=ours.spread,
        ratio_range=[min(by_round), max(by_round)],
        peers={label: times[label].median for label in labels},
        **did,
    )
