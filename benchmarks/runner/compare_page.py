"""A comparison of results as one HTML page: histogram of changes, largest changes, and a searchable list."""

from __future__ import annotations

from bisect import bisect_right

from benchmarks.runner.compare import ComparedCase, Comparison
from thermocline.report.axes import from_zero
from thermocline.report.charts import Bar, bars, columns
from thermocline.report.markup import Html
from thermocline.report.numbers import Number, count
from thermocline.report.page import facts, figure, figures, page, paragraph, section, table, verdict

BINS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.11, 1.25, 1.5, 2.0)  # edges between times better
DRAWN = 12  # cases whose change is drawn


def compare_page(comparison: Comparison) -> str:
    """The whole page."""
    benches = ", ".join(dict.fromkeys(report.bench for report in comparison.reports))
    files = [
        (name, report.bench, report.date[:10], report.commit, count(len(report.rows)), report.machine)
        for name, report in zip(comparison.names, comparison.reports, strict=True)
    ]
    return page(
        f"Results of {benches}, compared",
        *(verdict(_verdict(comparison, at)) for at in range(1, len(comparison.reports))),
        paragraph(
            f"{count(len(comparison.cases))} cases. A change is how many times better a case is than in {comparison.names[0]}, "
            "whichever way its unit counts; within the spread of both measurements it is called the same."
        ),
        *(paragraph(note) for note in comparison.notes()),
        section("The files", table(("file", "bench", "measured", "commit", "cases", "machine"), files)),
        *(_changes(comparison, at) for at in range(1, len(comparison.reports))),
        section("All cases", _list(comparison)),
        foot="Written by `python -m benchmarks compare`.",
    )


def _verdict(comparison: Comparison, at: int) -> str:
    """What changed from the first file, in a sentence."""
    numbers = comparison.count(at)
    words = " and ".join(f"{word} in {count(numbers[word])}" for word in ("better", "worse") if numbers[word])
    return f"{comparison.names[at]} is {words or 'the same in all'} of {count(sum(numbers.values()))} cases."


def _changes(comparison: Comparison, at: int) -> Html:
    """One file against the first."""
    changed = [(case, change) for case in comparison.cases if (change := case.change(at)) is not None]
    verdicts = comparison.count(at)
    return section(
        f"{comparison.names[at]} against {comparison.names[0]}",
        facts({**{word: count(number) for word, number in verdicts.items()}, "in one only": count(_alone(comparison, at))}),
        figures(_histogram([change for _, change in changed]), *_extremes(changed, at)) if changed else "",
    )


def _alone(comparison: Comparison, at: int) -> int:
    return sum((case.rows[0] is None) != (case.rows[at] is None) for case in comparison.cases)


def _histogram(changes: list[float]) -> Html:
    names = [f"<{BINS[0]:g}x", *(f"{low:g}x" for low in BINS)]
    numbers = [0.0] * len(names)
    for change in changes:
        numbers[bisect_right(BINS, change)] += 1
    drawn = columns("Cases by change", names, numbers, from_zero(numbers, "cases"), "times better, and more")
    return figure("Cases by change", drawn, "From 0.95x to 1.05x stands under 0.95x.")


def _extremes(changed: list[tuple[ComparedCase, float]], at: int) -> list[Html]:
    """The cases that changed most, each way: those that are more than their spread."""
    drawn = []
    for word, title in (("worse", "Most for the worse"), ("better", "Most for the better")):
        found = sorted((one for one in changed if one[0].verdict(at) == word), key=lambda one: one[1], reverse=word == "better")
        if found:
            names = _told_apart([case.name for case, _ in found[:DRAWN]])
            shown = [Bar(name, {"times better": change}) for name, (_, change) in zip(names, found, strict=False)]
            drawn.append(figure(title, bars(title, shown, _times, ("as before", 1.0), 2 if word == "worse" else 4)))
    return drawn


def _told_apart(names: list[str]) -> list[str]:
    """Names of cases without the parts that all of them begin with: there is little room beside a bar."""
    parts = [name.split("/") for name in names]
    same = 0
    while all(len(one) > same + 1 and one[same] == parts[0][same] for one in parts):
        same += 1
    return names if len(names) == 1 else ["/".join(one[same:]) for one in parts]


def _list(comparison: Comparison) -> Html:
    heads, others = ["case", "unit"], range(1, len(comparison.reports))
    for at, name in enumerate(comparison.names):
        heads += [name, "to peer"] if not at else [name, "to peer", "change", "verdict"]
    rows = []
    for case in comparison.cases:
        row: list[object] = [case.name, case.unit, _value(case, 0, "ours"), _value(case, 0, "ratio")]
        for at in others:
            change = case.change(at)
            row += [
                _value(case, at, "ours"),
                _value(case, at, "ratio"),
                "" if change is None else _judged(change, case.verdict(at)),
                case.verdict(at),
            ]
        rows.append(row)
    return table(heads, rows, search="search cases")


def _value(case: ComparedCase, at: int, field: str) -> object:
    row = case.rows[at]
    if row is None or row[field] is None:
        return ""
    return _times(row[field]) if field == "ratio" else Number(row[field], f"{row[field]:.4g}")


def _judged(change: float, verdict: str) -> Number:
    """A change in the colour of its verdict."""
    return Number(change, f"{change:.2f}x", {"better": True, "worse": False}.get(verdict))


def _times(value: float) -> Number:
    return Number(value, f"{value:.2f}x")
