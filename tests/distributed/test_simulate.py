"""The simulator counts what the traffic meters of real processes count."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import FEATURES, TABLES, batches, heat_of, joined, plan_of, table_plan, with_slots
from typer.testing import CliRunner

from support import has
from thermocline import BadInput, make_plan
from thermocline.cli import app
from thermocline.distributed.exchange.traffic_meter import TrafficRecord
from thermocline.distributed.simulation.log import SimulationLog
from thermocline.distributed.simulation.simulator import RankBatches, simulate
from thermocline.heat.log_columns import LogIds
from thermocline.heat.log_files import profile_files
from thermocline.heat.log_reader import LogFile
from thermocline.plan.tables import TableConfig, TablesConfig
from thermocline.plan.topology import Topology


def cards_of(step, sizes):
    """The batches of some ranks for the simulator."""
    whole = joined(batches(step, sizes))
    return RankBatches({name: LogIds(whole[name][0].numpy(), whole[name][1].numpy()) for name in FEATURES}, np.array(sizes))


def random_plan(seed, nodes, cards, heat):
    """Random tiers, exchanges and gradients; the last table whole on a rank."""
    rng = np.random.default_rng(seed)
    tables = []
    for name, (rows, _, _) in TABLES.items():
        first, second = sorted(int(n) for n in rng.integers(0, rows + 1, 2))
        card = int(rng.integers(nodes * cards)) if name == "shop" and seed % 2 else None
        tiers = (0, 0) if card is not None else (first, second - first)
        table = table_plan(name, *tiers, "int8", ["flat", "node"][rng.integers(2)], card, ["", "fp32"][rng.integers(2)])
        tables.append(table.model_copy(update={"wire_gradients": ["fp32", "bf16", "int8"][rng.integers(3)]}))
    return plan_of(nodes, cards, tables, heat)


@pytest.mark.parametrize("nodes, cards, seed", [(2, 2, 1), (1, 4, 2), (4, 1, 3), (2, 4, 4), (4, 2, 5)])
def test_simulated_bytes_and_messages_equal_those_of_every_meter(on_ranks, nodes, cards, seed):
    heat = heat_of()
    plan = random_plan(seed, nodes, cards, heat)
    rng = np.random.default_rng(seed)
    sizes = [[int(n) for n in rng.integers(0, 6, nodes * cards)] for _ in range(3)]
    sizes[1] = [0] * (nodes * cards)  # none has anything
    found = on_ranks("replan_ranks.metered", nodes * cards, plan, heat, sizes)
    simulated = simulate(plan, heat, [[cards_of(step, each)] for step, each in enumerate(sizes)])
    for card, (lines, messages) in enumerate(found):
        assert simulated.sent(card) == lines
        assert np.array_equal(simulated.messages_CDL[card], messages)


def test_a_plan_for_serving_is_refused():
    heat = heat_of()
    plan = random_plan(1, 2, 2, heat).model_copy(update={"goal": "serve"})
    with pytest.raises(BadInput, check=has(parameter="goal", value="serve")):
        simulate(plan, heat, [[cards_of(0, [1, 1, 1, 1])]])


@pytest.mark.parametrize("nodes, cards, seed, near", [(2, 2, 8, 0), (4, 2, 9, 3), (1, 4, 10, 0)])
def test_rows_in_fixed_slots_are_simulated_as_meters_count_them(on_ranks, nodes, cards, seed, near):
    heat, rng = heat_of(), np.random.default_rng(seed)
    tables = []
    for table in random_plan(seed, nodes, cards, heat).tables:
        tiers = tuple(tier.model_copy(update={"precision": "int4" if near else "int8"}) for tier in table.tiers)
        slots = {tier.tier: (int(rng.integers(1, 12)), int(rng.integers(near + 1))) for tier in tiers}
        tables.append(with_slots(table.model_copy(update={"tiers": tiers}), slots))
    plan = plan_of(nodes, cards, tables, heat)
    sizes = [[int(n) for n in rng.integers(0, 6, nodes * cards)] for _ in range(3)]
    found = on_ranks("replan_ranks.metered", nodes * cards, plan, heat, sizes, {"policy": "fixed"})
    simulated = simulate(plan, heat, [[cards_of(step, each)] for step, each in enumerate(sizes)])
    for card, (lines, messages) in enumerate(found):
        assert simulated.sent(card) == lines
        assert np.array_equal(simulated.messages_CDL[card], messages)


def test_some_nodes_at_a_time_count_as_all_at_once():
    heat = heat_of()
    plan = random_plan(7, 4, 2, heat)
    sizes = [3, 0, 5, 1, 2, 4, 0, 6]
    whole = cards_of(0, sizes)
    ends = np.cumsum([0, *sizes])

    def nodes(first, last):
        bags = {name: bags.part(ends[2 * first], ends[2 * last]) for name, bags in whole.bags.items()}
        return RankBatches(bags, np.array(sizes[2 * first : 2 * last]))

    one = simulate(plan, heat, [[whole]])
    parts = simulate(plan, heat, [[nodes(0, 1), nodes(1, 3), nodes(3, 4)]])
    assert np.array_equal(one.bytes_CDLK, parts.bytes_CDLK) and np.array_equal(one.messages_CDL, parts.messages_CDL)
    assert one.seconds == pytest.approx(parts.seconds) and one.step == pytest.approx(parts.step)


def test_a_step_with_too_few_ranks_is_refused():
    heat = heat_of()
    with pytest.raises(BadInput, check=has(parameter="steps", needed=4, available=2)):
        simulate(random_plan(1, 2, 2, heat), heat, [[cards_of(0, [3, 1])]])
    with pytest.raises(BadInput, check=has(parameter="steps")):
        simulate(random_plan(1, 2, 2, heat), heat, [])


@pytest.fixture
def job(tmp_path):
    """A log with bags and single ids, its heat, and a plan."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 4, 301)
    items = np.split(rng.zipf(1.3, lengths.sum()) % 997, np.cumsum(lengths)[:-1])
    log = tmp_path / "log.parquet"
    pq.write_table(pa.table({"item": [each.tolist() for each in items], "hour": rng.integers(0, 24, 301)}), log)
    heat = profile_files([log], ["item", "hour"])
    sizes = {"item": (997, 16), "hour": (24, 8)}
    tables = [TableConfig(name=name, rows=r, dim=d, precision="int8", cache=0.0) for name, (r, d) in sizes.items()]
    plan = make_plan(TablesConfig(batch=7, dense=1e-4, tables=tuple(tables)), heat, Topology.load("hgx-h200", nodes=2), "20KB")
    return log, heat, plan


def test_ranks_take_the_samples_of_a_log_in_turn_and_repeat_it(job):
    log, _, plan = job
    read = SimulationLog([log], plan)
    found = [list(step) for step in read.steps(plan, 3)]
    chunks = LogFile(log).chunks(["item"])
    whole = next(chunks)["item"]
    assert read.rounds(plan, 3) == 3 * 16 * 7 / 301
    for step, cards in enumerate(found):
        assert sum(int(each.samples_C.sum()) for each in cards) == 16 * 7
        ids = np.concatenate([each.bags["item"].ids_N for each in cards])
        at = np.arange(step * 112, (step + 1) * 112) % 301
        assert np.array_equal(ids, np.concatenate([whole.part(n, n + 1).ids_N for n in at]))


def test_the_command_counts_what_the_function_counts(job, tmp_path):
    log, heat, plan = job
    heat.save(tmp_path / "heat.tc")
    plan.save(tmp_path / "plan.json")
    arguments = ["simulate", "--plan", tmp_path / "plan.json", "--heat", tmp_path / "heat.tc", "--log", log, "--steps", "2"]
    run = CliRunner()
    done = run.invoke(app, [*map(str, arguments), "--json", str(tmp_path / "found.json")], catch_exceptions=False)
    assert done.exit_code == 0 and "2 x 8" in done.output
    found = json.loads((tmp_path / "found.json").read_text())
    same = simulate(plan, heat, SimulationLog([log], plan).steps(plan, 2))
    assert [TrafficRecord(**line) for line in found["lines"]] == same.all_sent()
    assert sum(line["bytes"] for line in found["lines"]) == same.bytes_CDLK.sum()
    scaled = [*map(str, arguments), "--scale", "4", "--report", str(tmp_path / "scale.html"), "--json", "-"]
    points = json.loads(run.invoke(app, scaled, catch_exceptions=False).output)["points"]
    assert [each["cards"] for each in points] == [8, 16, 32]
    assert "<svg" in (tmp_path / "scale.html").read_text()


def test_a_log_with_other_batches_than_the_plan_gets_a_note(job, tmp_path):
    log, _, plan = job
    plan.save(tmp_path / "plan.json")
    longer = plan.model_copy(
        update={"tables": tuple(t.model_copy(update={"lookups": 50 * t.lookups}) for t in plan.tables), "heat": ""}
    )
    longer.save(tmp_path / "longer.json")
    said = {}
    for name in ("plan", "longer"):
        arguments = ["simulate", "--plan", tmp_path / f"{name}.json", "--log", log, "--steps", "1"]
        said[name] = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False).output
    lookups = f"{50 * sum(t.lookups for t in plan.tables):,.0f}"
    assert lookups not in said["plan"] and lookups in said["longer"]
