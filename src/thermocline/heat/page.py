"""A heat profile as one HTML page: skew, bag lengths, repeats in batches, and drift of each table.

Charts are drawn for the dozen tables with most ids; a sortable list has all tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import Band, Line, columns, lines
from thermocline.report.markup import Html
from thermocline.report.numbers import Number, brief, count, share
from thermocline.report.page import facts, figure, figures, page, section, table, verdict

from .profile import HeatProfile, LogSlice, TableHeat

DRAWN = 12  # tables with pictures
POINTS = 120  # of a curve, at most
COLUMNS = 16  # of a histogram that has one for each length; longer ones go by powers of two
HOTTEST = (0.001, 0.01, 0.1)  # parts of the rows whose share of lookups is listed


def heat_page(profile: HeatProfile) -> str:
    """Draw a heat profile as one HTML page, with style and charts inside.

    Args:
        profile: The profile.

    Returns:
        The text of the page.

    Example::

        Path("heat.html").write_text(heat_page(HeatProfile.load("heat.tc")))
    """
    heats = sorted(profile.tables.values(), key=lambda one: (-one.distinct, one.name))
    drawn = [one for one in heats if one.lookups][:DRAWN]
    lookups = sum(one.lookups for one in heats)
    hot = sum(one.hottest(0.01) * one.lookups for one in heats) / max(lookups, 1)
    return page(
        f"Heat of {_source(profile.source)}",
        verdict(
            f"{count(len(heats))} {'table' if len(heats) == 1 else 'tables'} with {count(lookups)} lookups. "
            f"The hottest 1% of the rows of each take {share(hot)} of them."
        ),
        facts(
            {
                "samples": count(max((one.samples for one in heats), default=0)),
                "lookups": count(lookups),
                "ids seen": count(sum(one.distinct for one in heats)),
                "counts": "exact" if all(one.exact for one in heats) else "partly estimated",
            }
        ),
        section("All tables", _list(heats)),
        *(section(one.name, _facts(one), figures(*_pictures(one))) for one in drawn),
        foot=f"Counted {profile.created}; sha256 of the heat {profile.sha256[:16]}.",
    )


def _source(files: str) -> str:
    """The counted files without folders, at most two by name."""
    names = [path.rsplit("/", 1)[-1] for path in files.split(", ")]
    return ", ".join(names[:2]) + (f" and {count(len(names) - 2)} more" if len(names) > 2 else "") if files else "a log"


def _list(tables: Sequence[TableHeat]) -> Html:
    takes = [f"hottest {brief(share(part))}" for part in HOTTEST]
    batch = max((size for one in tables for size in one.repeats), default=0)
    repeats = f"repeats in {count(batch)}" if batch else "repeats"
    heads = ("table", "lookups", "a sample", "ids seen", *takes, repeats, "kept by hottest 5%", "missing")
    return table(heads, (_row(one, batch) for one in tables), search="search tables")


def _row(one: TableHeat, batch: int) -> tuple[object, ...]:
    kept = list(one.kept.values())
    return (
        one.name,
        count(one.lookups),
        Number(one.per_sample, f"{one.per_sample:.2f}"),
        _distinct(one),
        *(share(one.hottest(part)) if one.lookups else "" for part in HOTTEST),
        share(one.repeats[batch]) if batch in one.repeats else "",
        share(kept[-1]) if kept else "",
        count(one.missing),
    )


def _distinct(one: TableHeat) -> Number:
    return count(one.distinct) if one.exact else Number(one.distinct, f"≈{count(one.distinct)} ±{share(one.error)}")


def _facts(one: TableHeat) -> Html:
    shown: dict[str, object] = {
        "lookups": count(one.lookups),
        "ids seen": _distinct(one),
        "lookups a sample": f"{one.per_sample:.2f}",
        "the hottest row takes": share(one.hottest(0.0)),
    }
    return facts(shown | ({"missing": count(one.missing)} if one.missing else {}))


def _pictures(one: TableHeat) -> Iterable[Html]:
    yield _curve(one)
    if len(one.lengths_L) > 1:
        yield _lengths(one)
    if one.batches:
        sizes, repeats = [count(size).text for size in one.repeats], list(one.repeats.values())
        chart = columns(f"Repeats of {one.name}", sizes, repeats, from_zero(repeats, "lookups", share), "samples in a batch")
        yield figure("Repeats", chart, "Lookups of an id that the same batch had looked up before.")
    later = [(number, each) for number, each in enumerate(one.slices, 1) if not each.first and each.lookups]
    if later:
        yield _drift(one, later)


def _curve(one: TableHeat) -> Html:
    curve = one.curve()
    rows_K, taken_K = np.cumsum(curve.rows_K) / curve.rows, np.cumsum(curve.lookups_K) / curve.lookups
    even = np.searchsorted(rows_K, np.geomspace(rows_K[0], 1.0, POINTS)).clip(max=len(rows_K) - 1)  # in the logarithm
    points = [(float(rows_K[at]), float(taken_K[at])) for at in np.unique(even)]
    across = Axis(min(points[0][0], 0.1), 1.0, "hottest rows, of those seen", share, log=True)
    hot = [
        Band(brief(share(part)), max(start, across.low), part, f"{share(one.hottest(part))} of lookups", colour)
        for start, part, colour in zip((0.0, *HOTTEST), HOTTEST, (2, 1, 0), strict=False)
        if part > across.low
    ]
    chart = lines(f"Heat of {one.name}", [Line("lookups", points)], across, Axis(0.0, 1.0, "lookups taken", share), hot)
    return figure("Heat", chart)


def _lengths(one: TableHeat) -> Html:
    """One column per length while there are few, else bins that double."""
    bags: dict[str, float] = {}
    for length, number in zip(one.lengths_L.tolist(), one.bags_L.tolist(), strict=True):
        low = 1 << (length.bit_length() - 1) if length else 0
        name = count(length).text if len(one.lengths_L) <= COLUMNS or length < 2 else f"{count(low)}+"
        bags[name] = bags.get(name, 0) + number / max(one.samples, 1)
    up = from_zero(bags.values(), "samples", share)
    return figure(
        "Ids a sample", columns(f"Ids a sample in {one.name}", list(bags), list(bags.values()), up, "ids in a sample")
    )


def _drift(one: TableHeat, later: list[tuple[int, LogSlice]]) -> Html:
    drawn = [
        Line("hottest 1%", [(number, each.kept_1 / each.lookups) for number, each in later], marks=len(later) <= 30),
        Line("hottest 5%", [(number, each.kept_5 / each.lookups) for number, each in later], marks=len(later) <= 30),
    ]
    across = Axis(later[0][0] - 0.5, later[-1][0] + 0.5, "slice of the log", count)
    chart = lines(f"Drift of {one.name}", drawn, across, Axis(0.0, 1.0, "of the slice's lookups", share))
    return figure("Drift", chart, "Lookups that still go to the hottest rows of the slice before.")
