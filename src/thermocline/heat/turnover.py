"""How the ids of a log come and go: births and deaths in each period, the rows that keep most lookups, and a page of both.

An id is born in the period of its first lookup and dies in that of its last one. Ids of the last periods may still come back,
so deaths at the end of a log are too many. `data/id_replay.py` measures what a table of some rows keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import Line, lines
from thermocline.report.markup import Html
from thermocline.report.numbers import count, share
from thermocline.report.page import facts, figure, figures, page, section, verdict

from .profile import Ints


class Period(NamedTuple):
    """A period of a log; `start` counts from the first one, in hours or, without times, in periods."""

    start: float
    lookups: int
    born: int
    died: int


class KeptRows(NamedTuple):
    """What a table of `rows` keeps: the share of the lookups of ids seen before that found rows of their own."""

    rows: int
    kept: float


@dataclass(frozen=True)
class IdTurnover:
    """The coming and going of the ids of one column.

    `again`: share of the lookups whose id was looked up before. `rule`: the recommended arguments of `IdMap.elastic`.
    """

    name: str
    lookups: int
    distinct: int
    again: float
    hourly: bool
    width: float  # of a period: hours, or 1
    periods: tuple[Period, ...]
    tables: tuple[KeptRows, ...]
    kept: float
    rule: dict[str, int | str]

    @property
    def text(self) -> str:
        """The rule as code."""
        rows, *others = self.rule.items()
        return f"IdMap.elastic({', '.join([str(rows[1]), *(f'{name}={value!r}' for name, value in others)])})"

    def rate(self, what: str) -> float:
        """`born` or `died` per hour or period: the median of the periods of the second half."""
        return float(np.median([getattr(each, what) for each in self.periods[len(self.periods) // 2 :]])) / self.width


def count_periods(ids_N: Ints, period_N: Ints, width: float) -> tuple[Period, ...]:
    """The periods of a log; `period_N` rises from 0."""
    rounds, ends = int(period_N[-1]) + 1, np.searchsorted(period_N, np.arange(period_N[-1] + 2))
    _, first_U = np.unique(ids_N, return_index=True)
    _, back_U = np.unique(ids_N[::-1], return_index=True)
    born, died = (np.bincount(period_N[at], minlength=rounds) for at in (first_U, len(ids_N) - 1 - back_U))
    return tuple(
        Period(width * p, int(ends[p + 1] - ends[p]), int(born[p]), int(died[p]))
        for p in range(rounds)
        if ends[p + 1] > ends[p]
    )


def turnover_page(found: Sequence[IdTurnover], source: str) -> str:
    """Draw the turnover of some columns as one HTML page."""
    return page(
        f"Ids that come and go in {source}",
        verdict(*(f"{each.name}: {each.text} keeps {share(each.kept)}. " for each in found)),
        *(section(each.name, _facts(each), figures(*_pictures(each))) for each in found),
    )


def _facts(one: IdTurnover) -> Html:
    per = "an hour" if one.hourly else "a period"
    return facts(
        {
            "lookups": count(one.lookups),
            "ids": count(one.distinct),
            f"born {per}": count(one.rate("born")),
            f"died {per}": count(one.rate("died")),
            "lookups of ids seen before": share(one.again),
        }
    )


def _pictures(one: IdTurnover) -> list[Html]:
    born, died = ([(each.start, float(getattr(each, what))) for each in one.periods] for what in ("born", "died"))
    across = Axis(0.0, max(one.periods[-1].start, 1.0), "hours" if one.hourly else "periods")
    up = from_zero([y for _, y in (*born, *died)], "ids")
    lives = lines(f"Births and deaths of {one.name}", [Line("born", born), Line("died", died)], across, up)
    curve = [(float(each.rows), each.kept) for each in one.tables]
    rows = Axis(curve[0][0], max(curve[-1][0], curve[0][0] + 1), "rows", log=True)
    kept = lines(f"Rows for {one.name}", [Line("kept", curve, marks=True)], rows, Axis(0.0, 1.0, "lookups kept", share))
    words = "Lookups of ids seen before that found a row of their own, in a table of this size."
    return [figure("Births and deaths", lives), figure("Rows", kept, words)]
