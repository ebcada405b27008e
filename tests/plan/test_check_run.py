"""Comparison of a run with its plan: the lines, and their tolerances."""

from __future__ import annotations

import re

import pytest

from support import has
from thermocline import FormatError
from thermocline.errors import BadInput
from thermocline.plan.model import Plan, RankPlan, StepPlan, Traffic
from thermocline.plan.run_file import MeasuredRank, MeasuredRun, MeasuredTraffic, check_run, fingerprint
from thermocline.plan.topology import Topology

PARTS = {"tables": 1_000_000, "optimizer state": 200_000, "cache": 50_000, "maps": 3_000, "buffers": 40_000}
STEP = {"lookup": 1e-3, "rows": 2e-3, "gradients": 2e-3, "update": 1e-3, "ids": 1e-5, "sync": 0.0, "dense": 4e-3}
TRAFFIC = {("node", "ids"): 1e4, ("node", "rows"): 2e6, ("cluster", "rows"): 1e6, ("cluster", "gradients"): 4e6}


@pytest.fixture
def plan():
    return Plan(
        goal="train", objective="step time", heat="", topology=Topology.load("hgx-h200"), budget=2_000_000, batch=64,
        dense=4e-3, optimizer="rowwise_adagrad", gradients="fp32", tables=(),
        ranks=(RankPlan(first=0, count=1, bytes=PARTS, host=500), RankPlan(first=1, count=7, bytes=PARTS)),
        traffic=tuple(Traffic(link=link, direction=direction, bytes=size) for (link, direction), size in TRAFFIC.items()),
        step=StepPlan(parts=STEP, overlaps=("ids",), hidden=1e-5, total=0.01, throughput=51_200),
        balance=1.0, binding="", sensitivities=(), candidates=(),
    )  # fmt: skip


def run_of(plan, memory=None, traffic=None, parts=None, step=0.01):
    """A run that measured exactly what was planned, except the given values."""
    ranks = [MeasuredRank(rank=n, bytes=PARTS | (memory or {}).get(n, {}), host=0 if n else 500) for n in range(8)]
    moved = TRAFFIC | (traffic or {})
    lines = [MeasuredTraffic(link=link, direction=direction, bytes=size) for (link, direction), size in moved.items()]
    times = STEP | (parts or {})
    return MeasuredRun(plan=fingerprint(plan), steps=10, batch=64, ranks=ranks, traffic=lines, parts=times, step=step)


def failed(plan, **change):
    return [(line.kind, line.what) for line in check_run(plan, run_of(plan, **change)).lines if not line.ok]


def test_a_run_as_planned_has_no_bad_line(plan):
    found = check_run(plan, run_of(plan))
    assert found.ok and all(line.off == 0 for line in found.lines if line.predicted)
    assert {line.kind for line in found.lines} == {"memory", "traffic", "time"}
    names = [line.what for line in found.lines]
    assert "rank 0: tables" in names and "rank 0: in host memory" in names and "step: dense" in names
    assert "cluster: gradients" in names and "node: all" in names and "cluster: ids" not in names


@pytest.mark.parametrize("share, good", [(1.019, True), (0.981, True), (1.021, False), (0.979, False)])
def test_memory_may_be_off_by_two_per_cent(plan, share, good):
    scaled = {part: round(size * share) for part, size in PARTS.items()}
    bad = failed(plan, memory={5: scaled})
    assert (bad == []) == good
    assert all(what.startswith("rank 5, furthest off of 1 to 7:") for _, what in bad)


@pytest.mark.parametrize("share, good", [(1.049, True), (0.951, True), (1.051, False), (0.949, False)])
def test_traffic_may_be_off_by_five_per_cent(plan, share, good):
    bad = failed(plan, traffic={("node", "rows"): share * 2e6})
    assert bad == ([] if good else [("traffic", "node: all"), ("traffic", "node: rows")])


@pytest.mark.parametrize("share, good", [(1.24, True), (0.76, True), (1.26, False), (0.74, False)])
def test_time_may_be_off_by_a_quarter(plan, share, good):
    assert failed(plan, step=0.01 * share) == ([] if good else [("time", "step")])
    assert failed(plan, parts={"rows": 2e-3 * share}) == ([] if good else [("time", "step: rows")])


def test_a_negligible_part_may_be_off_by_more(plan):
    assert failed(plan, parts={"ids": 3e-5}) == []  # three times what was predicted, and a third of a per cent of the step
    assert failed(plan, memory={0: {"maps": 3_200}}) == []
    assert failed(plan, parts={"ids": 3e-4}) == [("time", "step: ids")]


def test_unplanned_traffic_is_a_bad_line(plan):
    assert ("traffic", "host: all") in failed(plan, traffic={("host", "rows"): 5.0})


def test_a_run_without_part_times_is_compared_by_its_step(plan):
    lines = check_run(plan, run_of(plan).model_copy(update={"parts": {}})).lines
    assert [line.what for line in lines if line.kind == "time"] == ["step"]


def test_json_has_the_error_of_every_line(plan):
    found = check_run(plan, run_of(plan, step=0.02)).to_json()
    (line,) = [line for line in found["lines"] if line["what"] == "step"]
    assert not found["ok"] and not line["ok"]
    assert line["off"] == pytest.approx(1.0) and line["tolerance"] == 0.25 and line["measured"] == 0.02


def test_text_marks_bad_lines(plan):
    lines = str(check_run(plan, run_of(plan, step=0.02, traffic={("host", "rows"): 5.0}))).splitlines()
    assert re.fullmatch(
        r"time     step +10ms +20ms +\+100\.0%  NOT within 25%", next(line for line in lines if " step " in line)
    )
    assert re.fullmatch(
        r"traffic  host: rows +0 B +5 B +-  NOT within 5%", next(line for line in lines if "host: rows" in line)
    )
    assert re.findall(r"\d+", lines[-1]) == [str(len(lines) - 5), "3"]


@pytest.mark.parametrize(
    "change, fields",
    [
        ({"plan": "f" * 64}, {"parameter": "plan", "value": "f" * 64}),
        ({"batch": 65}, {"parameter": "batch", "value": 65}),
        ({"ranks": [MeasuredRank(rank=n, bytes=PARTS) for n in range(4)]}, {"parameter": "ranks", "value": [0, 1, 2, 3]}),
    ],
)
def test_a_run_of_another_plan_batch_or_world_size_is_refused(plan, change, fields):
    with pytest.raises(BadInput, check=has(**fields)):
        check_run(plan, run_of(plan).model_copy(update=change))


def test_run_round_trips_through_its_file(plan, tmp_path):
    run = run_of(plan)
    run.save(tmp_path / "run.json")
    assert MeasuredRun.load(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    "old, new, field, hint",
    [
        ('"rows": 0.002', '"rowz": 0.002', "parts.rowz", "'rows'"),
        ('"cache"', '"cach"', "cards[0].bytes.cach", "'cache'"),
        ('"card": 1,', '"card": 0,', "cards[1].card", "cards[0]"),
        ('"link": "node"', '"link": "nodes"', "traffic[0].link", "'node'"),
        ('"direction": "ids"', '"direction": "rows"', "traffic[1]", "traffic[0]"),
    ],
)
def test_wrong_fields_of_a_run_are_reported_with_line_and_hint(plan, tmp_path, old, new, field, hint):
    path = tmp_path / "run.json"
    run_of(plan).save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FormatError, check=has(parameter=field)) as error:
        MeasuredRun.load(path)
    assert hint in str(error.value)
    where = path.read_text().splitlines()[error.value.line - 1]
    assert new.split(":")[0] in where or "{" in where
