"""A training run as an HTML page: loss, speed, cache hits, traffic and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from thermocline.report.axes import Axis, from_zero
from thermocline.report.charts import Bar, Line, bars, lines
from thermocline.report.markup import Html
from thermocline.report.numbers import Number, brief, count, seconds, share, size
from thermocline.report.page import facts, figure, figures, page, paragraph, section, table, verdict

MEASURES = {
    "auc": "test AUC", "logloss": "test LogLoss", "ne": "test NE", "hit_rate": "test HitRate@10", "ndcg": "test NDCG@10",
}  # fmt: skip

Point = Mapping[str, float]


def train_page(
    model: str, settings: Mapping[str, Any], result: Mapping[str, Any], curve: Sequence[Point], epochs: Sequence[Point],
    ranks: int,
) -> str:  # fmt: skip
    """The page of a run: `curve` has points of the training, `epochs` the metrics after each epoch."""
    drawn = [*_progress(curve), *_epochs(epochs)]
    memory, plain, state = sum(result["memory"].values()), 4 * settings["dim"] * result["rows"], _state(result)
    one_rank, words = ranks == 1, "One run with one seed: small differences may be chance."
    numbers = {name: _four(result[field]) for field, name in MEASURES.items() if field in result}
    numbers["train loss"] = _four(result["train_loss"])
    numbers["samples per second"] = count(round(result["samples"] / max(result["seconds"], 1e-9)))
    numbers["tables" if one_rank else "tables, first rank"] = size(memory)
    if one_rank and memory:  # as `MemoryUsage.ratio` and `ratio_with_state` define them
        numbers["smaller than fp32 rows"] = _ratio(plain, memory - state)
        numbers["the same with optimizer state"] = _ratio(plain + state, memory)
    bytes_of = figures(_memory(result["memory"], plain if one_rank else None, state))
    counts = [(name, count(number)) for name, number in result["stats"].items() if number]
    return page(
        f"Training a {model}",
        verdict(_verdict(settings, result, plain / (memory - state) if one_rank and memory > state else None)),
        paragraph(
            f"{count(result['samples'])} samples on {count(ranks)} {'rank' if one_rank else 'ranks'} in "
            f"{seconds(result['seconds'])}; {count(result['rows'])} rows of {settings['dim']} columns."
        ),
        facts(numbers),
        section("Progress", figures(*drawn)) if drawn else "",
        section("Memory of the tables", bytes_of, table(("counter", ""), counts) if counts else ""),
        section("Settings", table(("setting", "value"), list(_plain(settings)))),
        foot=words,
    )


def _plain(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings in words, without those that are not set."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _plain(value)
        elif value not in (None, "", (), []):
            yield name, ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _progress(curve: Sequence[Point]) -> Iterable[Html]:
    """Charts over steps."""
    if len(curve) < 2:
        return
    across = Axis(0.0, curve[-1]["step"], "steps", count)
    yield _line("Training loss", "Mean since the point before.", across, "loss", _points(curve, "loss"), _four, zero=False)
    rates = _points(curve, "samples per second")
    yield _line("Speed", "", across, "samples per second", rates, lambda value: count(round(value)))
    if hits := _hits(curve):
        drawn = lines("Cache hits", [Line("hits", hits)], across, Axis(0.0, 1.0, "of lookups", share))
        yield figure("Cache hits", drawn, "Share of lookups since the point before.")
    kinds = sorted({name for point in curve for name in point if name.startswith("sent/")})
    if kinds:
        sent = [Line(kind.removeprefix("sent/"), _points(curve, kind)) for kind in kinds]
        up = from_zero([value for line in sent for _, value in line.points], "bytes per step", size)
        yield figure("Sent by the first rank", lines("Bytes sent", sent, across, up), "Mean of the epoch so far.")


def _points(curve: Sequence[Point], name: str) -> list[tuple[float, float]]:
    return [(point["step"], point[name]) for point in curve if name in point]


def _hits(curve: Sequence[Point]) -> list[tuple[float, float]]:
    """Hit rate between two points."""
    found = [(0.0, 0.0, 0.0)]
    found += [(point["step"], point["tables/hits"], point["tables/lookups"]) for point in curve if "tables/hits" in point]
    between = [(b[0], b[1] - a[1], b[2] - a[2]) for a, b in pairwise(found)]
    return [(step, min(hits / lookups, 1.0)) for step, hits, lookups in between if lookups > 0] if found[-1][1] else []


def _line(
    title: str, words: str, across: Axis, label: str, points: list[tuple[float, float]], show: Any, zero: bool = True
) -> Html:
    values = [value for _, value in points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    up = from_zero(values, label, show) if zero else Axis(low - margin, high + margin, label, show)
    return figure(title, lines(title, [Line(label, points)], across, up), words)


def _epochs(epochs: Sequence[Point]) -> Iterable[Html]:
    """Charts over epochs, if there are several."""
    if len(epochs) < 2:
        return
    across = Axis(0.5, len(epochs) + 0.5, "epoch", lambda at: count(at) if at == round(at) else Number(at, ""))
    for field, name in MEASURES.items():
        numbered = [(float(number), one[field]) for number, one in enumerate(epochs, 1) if field in one]
        points = [(number, value) for number, value in numbered if value == value]
        if points:
            yield _line(name[0].upper() + name[1:], "After each epoch.", across, name, points, _four, zero=False)


def _state(result: Mapping[str, Any]) -> int:
    return int(result["memory"].get("optimizer state", 0))


def _ratio(fp32: int, ours: int) -> Number:
    return Number(fp32 / max(ours, 1), f"{fp32 / max(ours, 1):.2f}x", good=fp32 > ours)


def _verdict(settings: Mapping[str, Any], result: Mapping[str, Any], smaller: float | None) -> str:
    """The result in one sentence."""
    name = next((name for name in MEASURES if name in result), "train_loss")
    cache = f" and a cache of {brief(share(settings['cache']))}" if settings.get("cache") else ""
    rows = f"Rows in {settings['precision']}{cache}" if isinstance(settings.get("precision"), str) else "The run"
    factor = "" if not smaller else f"{smaller:.2f}x smaller" if smaller >= 1 else f"{1 / smaller:.2f}x larger"
    bytes_ = f", in tables {factor} than fp32 rows" if factor else ""
    return f"{rows} gave a {MEASURES.get(name, 'train loss')} of {result[name]:.4f}{bytes_}."


def _memory(parts: Mapping[str, int], plain: int | None, state: int) -> Html:
    drawn = [Bar("this run", {name: float(number) for name, number in parts.items() if number})]
    if plain is not None:
        drawn.append(Bar("fp32", {"codes": float(plain)} | ({"optimizer state": float(state)} if state else {})))
    words = "" if plain is None else "The same rows in fp32, with the same optimizer state."
    return figure("Bytes of the tables", bars("Bytes of the tables", drawn, lambda value: size(round(value))), words)


def _four(value: float) -> Number:
    return Number(value, f"{value:.4f}")
