"""One race: build the contenders of a group, time them in turn, and write down each of its rows.

A row sets ours against the best contender of the libraries that its rival names, and is written only if all of these
are there. A contender that fails its check, or fails to build, turns the rows that need it into rows with an error.
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
    """How long to look: rounds, milliseconds of each contender in a round, and the bounds of iterations in them."""

    rounds: int
    chunk_ms: float
    least: int
    most: int


@dataclass
class ReadyContenders:
    """The contenders that stand ready, by label, and the libraries that failed."""

    library_of: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def gather(self, libraries: Iterable[str], build: Callable[[str], Sequence[str]]) -> None:
        """Build the contenders of each library; ours comes first, and without it there is no race."""
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
    return [rival for rival in group.rivals if set(rival.libraries) <= available]


def libraries_of(rivals: Iterable[Baseline]) -> list[str]:
    """Ours first, then the peers, each once."""
    return list(dict.fromkeys([OURS, *(library for rival in rivals for library in rival.libraries)]))


class RaceTimes(NamedTuple):
    """Times of all contenders, and what our cache did meanwhile, if there is one."""

    times: dict[str, Times]
    cache: dict[str, float]


def time_all(chunks: Mapping[str, Chunk], effort: TimingBudget, stats: Callable[[], Mapping[str, int]]) -> RaceTimes:
    """Time all contenders in turn, each for about as long. `stats`: what our cache did so far."""
    iterations = {label: enough(chunk(2), effort.chunk_ms, effort.least, effort.most) for label, chunk in chunks.items()}
    before = stats()
    times = interleave(chunks, effort.rounds, iterations)
    return RaceTimes(times, cache_work(before, stats()))


def add_rows(
    recorder: Recorder, cases: Mapping[Baseline, str], ready: ReadyContenders, measure: Callable[[], RaceTimes]
) -> dict[str, Times]:
    """Measure once, then write the row of each rival under its case. Returns the times."""
    times: dict[str, Times] = {}
    did: dict[str, float] = {}
    if OURS not in ready.errors:
        try:
            times, did = measure()
        except Exception as error:
            ready.errors[OURS] = brief(error)
    for rival, case in cases.items():
        failed = [ready.errors[library] for library in (OURS, *rival.libraries) if library in ready.errors]
        if failed:
            recorder.fail(case, "; ".join(failed))
        else:
            labels = [x for x in times if ready.library_of[x] in rival.libraries and x not in rival.without]
            _add_row(recorder, case, times, labels, did)
    return times


def cache_work(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """Hits and admissions of a cache between two readings, both a lookup that it counted."""
    change = {name: after[name] - before.get(name, 0) for name in after}
    lookups = change.get("lookups", 0)
    return {"hit_rate": change["hits"] / lookups, "admitted": change["admissions"] / lookups} if lookups else {}


def _add_row(recorder: Recorder, case: str, times: Mapping[str, Times], labels: Sequence[str], did: dict[str, Any]) -> Row:
    """Ours against the best of `labels`; without any, ours alone."""
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
