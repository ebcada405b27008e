"""A run beside its plan: which lines there are, and which of them are good."""

from __future__ import annotations

import re

import pytest

from thermocline import FormatError
from thermocline.errors import BadInput
from thermocline.plan.model import CardPlan, Plan, StepPlan, Traffic
from thermocline.plan.report.check_run import compare
from thermocline.plan.run_file import CardRun, Run, TrafficRun, fingerprint
from thermocline.plan.topology import Topology

PARTS = {"tables": 1_000_000, "optimizer state": 200_000, "cache": 50_000, "maps": 3_000, "buffers": 40_000}
STEP = {"lookup": 1e-3, "rows": 2e-3, "gradients": 2e-3, "update": 1e-3, "ids": 1e-5, "sync": 0.0, "dense": 4e-3}
TRAFFIC = {("node", "ids"): 1e4, ("node", "rows"): 2e6, ("cluster", "rows"): 1e6, ("cluster", "gradients"): 4e6}


@pytest.fixture
def plan():
    return Plan(
        goal="train", objective="step time", heat="", topology=Topology.load("hgx-h200"), budget=2_000_000, batch=64,
        dense=4e-3, optimizer="rowwise_adagrad", gradients="fp32", tables=(),
        cards=(CardPlan(first=0, count=1, bytes=PARTS, host=500), CardPlan(first=1, count=7, bytes=PARTS)),
        traffic=tuple(Traffic(link=link, direction=direction, bytes=size) for (link, direction), size in TRAFFIC.items()),
        step=StepPlan(parts=STEP, overlaps=("ids",), hidden=1e-5, total=0.01, throughput=51_200),
        balance=1.0, binding="", marginals=(), candidates=(),
    )  # fmt: skip


def run_of(plan, memory=None, traffic=None, parts=None, step=0.01):
    """A run that measured exactly what was planned, but for what is given."""
    cards = [CardRun(card=n, bytes=PARTS | (memory or {}).get(n, {}), host=0 if n else 500) for n in range(8)]
    moved = TRAFFIC | (traffic or {})
    lines = [TrafficRun(link=link, direction=direction, bytes=size) for (link, direction), size in moved.items()]
    times = STEP | (parts or {})
    return Run(plan=fingerprint(plan), steps=10, batch=64, cards=cards, traffic=lines, parts=times, step=step)


def failed(plan, **change):
    return [(line.kind, line.what) for line in compare(plan, run_of(plan, **change)).lines if not line.ok]


def test_a_run_that_went_as_planned_has_no_bad_line(plan):
    found = compare(plan, run_of(plan))
    assert found.ok and all(line.off == 0 for line in found.lines if line.predicted)
    assert {line.kind for line in found.lines} == {"memory", "traffic", "time"}
    names = [line.what for line in found.lines]
    assert "card 0: tables" in names and "card 0: in host memory" in names and "step: dense" in names
    assert "cluster: gradients" in names and "node: all" in names and "cluster: ids" not in names


@pytest.mark.parametrize("share, good", [(1.019, True), (0.981, True), (1.021, False), (0.979, False)])
def test_memory_may_be_off_by_two_per_cent(plan, share, good):
    scaled = {part: round(size * share) for part, size in PARTS.items()}
    bad = failed(plan, memory={5: scaled})
    assert (bad == []) == good
    assert all(what.startswith("card 5, furthest off of 1 to 7:") for _, what in bad)


@pytest.mark.parametrize("share, good", [(1.049, True), (0.951, True), (1.051, False), (0.949, False)])
def test_traffic_may_be_off_by_five_per_cent(plan, share, good):
    bad = failed(plan, traffic={("node", "rows"): share * 2e6})
    assert bad == ([] if good else [("traffic", "node: all"), ("traffic", "node: rows")])


@pytest.mark.parametrize("share, good", [(1.24, True), (0.76, True), (1.26, False), (0.74, False)])
def test_time_may_be_off_by_a_quarter(plan, share, good):
    assert failed(plan, step=0.01 * share) == ([] if good else [("time", "step")])
    assert failed(plan, parts={"rows": 2e-3 * share}) == ([] if good else [("time", "step: rows")])


def test_a_part_too_small_to_plan_by_may_be_off_by_more(plan):
    assert failed(plan, parts={"ids": 3e-5}) == []  # three times what was predicted, and a third of a per cent of the step
    assert failed(plan, memory={0: {"maps": 3_200}}) == []
    assert failed(plan, parts={"ids": 3e-4}) == [("time", "step: ids")]


def test_traffic_that_nobody_planned_is_a_bad_line(plan):
    assert ("traffic", "host: all") in failed(plan, traffic={("host", "rows"): 5.0})


def test_a_run_without_times_of_its_parts_is_held_to_the_step(plan):
    lines = compare(plan, run_of(plan).model_copy(update={"parts": {}})).lines
    assert [line.what for line in lines if line.kind == "time"] == ["step"]


def test_as_json_every_line_says_how_far_off_it_is(plan):
    found = compare(plan, run_of(plan, step=0.02)).to_json()
    (line,) = [line for line in found["lines"] if line["what"] == "step"]
    assert not found["ok"] and not line["ok"]
    assert line["off"] == pytest.approx(1.0) and line["tolerance"] == 0.25 and line["measured"] == 0.02


def test_as_text_bad_lines_stand_out(plan):
    lines = str(compare(plan, run_of(plan, step=0.02, traffic={("host", "rows"): 5.0}))).splitlines()
    assert re.fullmatch(
        r"time     step +10ms +20ms +\+100\.0%  NOT within 25%", next(line for line in lines if " step " in line)
    )
    assert re.fullmatch(
        r"traffic  host: rows +0 B +5 B +-  NOT within 5%", next(line for line in lines if "host: rows" in line)
    )
    assert lines[-1] == f"{len(lines) - 5} as predicted, 3 not"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"plan": "f" * 64}, "carried out plan ffffffffffff, and this plan is"),
        ({"batch": 65}, "65 samples.*64"),
        ({"cards": [CardRun(card=n, bytes=PARTS) for n in range(4)]}, r"4 cards and the plan is for 8 \(numbers 0 to 7\)"),
    ],
)
def test_what_cannot_be_compared_is_refused(plan, change, says):
    with pytest.raises(BadInput, match=says):
        compare(plan, run_of(plan).model_copy(update=change))


def test_a_run_is_read_as_it_was_written(plan, tmp_path):
    run = run_of(plan)
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('"rows": 0.002', '"rowz": 0.002', "field parts.rowz: there is no such part (did you mean 'rows'?)"),
        ('"cache"', '"cach"', "field cards[0].bytes.cach: there is no such part (did you mean 'cache'?)"),
        ('"card": 1,', '"card": 0,', "field cards[1].card: card 0 is in cards[0] too"),
        ('"link": "node"', '"link": "nodes"', "field traffic[0].link: 'nodes' is not known (did you mean 'node'?)"),
        ('"direction": "ids"', '"direction": "rows"', "field traffic[1]: rows over node links are in traffic[0] too"),
    ],
)
def test_what_is_wrong_with_a_run_is_told_with_line_and_field(plan, tmp_path, old, new, says):
    path = tmp_path / "run.json"
    run_of(plan).save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(FormatError, match=re.escape(says)) as error:
        Run.load(path)
    line = int(re.search(r"line (\d+)", str(error.value))[1])
    where = path.read_text().splitlines()[line - 1]
    assert new.split(":")[0] in where or "{" in where
