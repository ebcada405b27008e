"""Saved under one plan on four ranks, loaded under others on one, two, three and four."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import TABLES, heat_of, plan_of, table_plan, with_slots
from sharded_ranks import Whole, made, steps

import thermocline as tc
from forked import script
from support import has
from thermocline.checkpoint import Checkpoint, compact
from thermocline.checkpoint.save_job import begin_save
from thermocline.kernels import dequantize_rows
from thermocline.rows.precision import format_of

HEAT = heat_of()


def plan_p(precision):
    """2 nodes of 2 cards: all three tiers, and a table on one card."""
    tables = [
        table_plan("user", 9, 14, precision),
        table_plan("item", 5, 0, precision),
        table_plan("shop", 0, 0, precision, card=2),
    ]
    return plan_of(2, 2, tables, HEAT)


def plan_q(cards, precision, first_precision=""):
    """Other tiers on so many cards, and another table on one card."""
    last = table_plan("shop", 23, 0, precision) if cards > 1 else table_plan("shop", 0, 0, precision)
    tables = [
        table_plan("user", 30, 0, precision, first_precision=first_precision),
        table_plan("item", 0, 0, precision, card=0),
    ]
    return plan_of(1, cards, [*tables, last], HEAT)


def whole(ranks):
    """Of what all ranks hold, every row once: by table, rows and arrays. Copies must be equal."""
    found = {}
    for parts, _ in ranks:
        for index, precision, rows, arrays in parts:
            for at, row in enumerate(rows.tolist()):
                value = (precision, *(array[at].tobytes() for array in arrays))
                assert found.setdefault((index, row), value) == value
    return found


def assert_same(mine, theirs):
    assert whole(mine) == whole(theirs)
    for one, other in zip(mine[0][1], theirs[0][1], strict=True):
        assert np.array_equal(one, other)


def exactly(found):
    """The same with bytes in place of arrays, which can be compared as a whole."""
    if isinstance(found, dict):
        return {name: exactly(each) for name, each in found.items()}
    if isinstance(found, (list, tuple)):
        return [exactly(each) for each in found]
    return (found.dtype, found.shape, found.tobytes()) if isinstance(found, np.ndarray) else found


def split(results):
    return [then for then, _ in results], [after for _, after in results]


SETTINGS = {"int8": {"precision": "int8"}, "int4": {"precision": "int4", "optimizer": tc.Adam(lr=0.125)}}


@pytest.mark.parametrize("precision", SETTINGS)
def test_rows_and_states_are_equal_under_any_plan_and_number_of_ranks(on_ranks, tmp_path, precision):
    settings, folder = SETTINGS[precision], str(tmp_path / "saved")
    saved, after = split(on_ranks("train_and_save", 4, plan_p(precision), HEAT, settings, folder, 5))
    assert len(whole(saved)) == sum(rows for rows, _, _ in TABLES.values())
    manifest = Checkpoint.open(folder).manifest
    assert sum(section.count for section in manifest.saves[0].sections) == len(whole(saved)), "every row is written once"
    assert {name.split("-")[-2] for name in (f.name for f in manifest.files) if "rows-" in name} == {
        "0000",
        "0001",
        "0002",
        "0003",
    }
    for ranks in (1, 2, 3):
        loaded, _ = split(on_ranks("load_and_train", ranks, plan_q(ranks, precision), HEAT, settings, folder, 0))
        assert_same(loaded, saved)
    loaded, resumed = split(on_ranks("load_and_train", 4, plan_p(precision), HEAT, settings, folder, 5))
    assert_same(loaded, saved)
    assert_same(resumed, after)  # gradients are whole numbers here; but on as many ranks their sums have one order anyway
    assert exactly(loaded) == exactly(saved), "every card holds what it held"


def test_ranks_of_another_number_read_the_folder_once_together(on_ranks, tmp_path):
    settings, folder = {"precision": "int8", "optimizer": tc.Adam(lr=0.125)}, str(tmp_path / "saved")
    saved, _ = split(on_ranks("train_and_save", 4, plan_p("int8"), HEAT, settings, folder, 0))
    checkpoint = Checkpoint.open(folder)
    rows = [file for save in checkpoint.manifest.saves for file in save.files if "rows-" in file.name]
    tensors = [each.info(name) for each in (checkpoint.file(file.name) for file in rows) for name in each.names()]
    every = sum(tensor.bytes for tensor in tensors if not tensor.name.endswith("/rows"))
    for ranks, plan in ((3, plan_q(3, "int8")), (2, plan_q(2, "int8")), (4, plan_p("int8"))):
        read, loaded = zip(*on_ranks("load_and_count", ranks, plan, HEAT, settings, folder), strict=True)
        assert sum(read) == every and max(read) < 0.8 * every, read
        assert_same(loaded, saved)
    assert on_ranks("load_a_lost_file", 2, plan_q(2, "int8"), HEAT, settings, folder) == [1, "own"]


def test_a_folder_of_four_ranks_opens_in_one_process_and_reads_without_a_model(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    saved, _ = split(on_ranks("train_and_save", 4, plan_p("int8"), HEAT, {"precision": "int8"}, folder, 0))
    model = Whole(precision="int8")
    tc.load_into(model, folder)
    rows, checkpoint = whole(saved), Checkpoint.open(folder)
    for index, (name, (count, dim, _)) in enumerate(TABLES.items()):
        blocks = list(checkpoint.blocks(name))
        codes, meta = torch.cat([b.codes_RB for b in blocks]), torch.cat([b.meta_RW for b in blocks])
        states = torch.cat([state[0] for _, state in checkpoint.states(name)])
        for row in range(count):
            assert rows[index, row] == (
                "int8",
                codes[row].numpy().tobytes(),
                meta[row].numpy().tobytes(),
                states[row].numpy().tobytes(),
            )
        assert torch.equal(model.tables.get_rows(name), dequantize_rows(codes, meta, format_of("int8"), dim))
    assert model.tables.trainer.clock.tolist() == [5, 12]
    assert checkpoint.manifest.heat == HEAT.sha256 and checkpoint.manifest.plan["topology"]["nodes"] == 2


def test_tiers_in_other_precisions_are_rounded_once_and_come_back(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    saved, _ = split(on_ranks("train_and_save", 2, plan_q(2, "int8", "fp32"), HEAT, {}, folder, 0))
    checkpoint = Checkpoint.open(folder)
    assert set(checkpoint.manifest.table("user").precisions) == {"fp32", "int8"}
    with pytest.raises(tc.BadInput, check=has(table="user")):
        next(checkpoint.blocks("user"))
    assert sum(len(part.rows_R) for part in checkpoint.section_rows("user")) == TABLES["user"][0]
    loaded, _ = split(on_ranks("load_and_train", 2, plan_q(2, "int8", "fp32"), HEAT, {}, folder, 0))
    assert_same(loaded, saved)
    model = Whole(precision="fp32")
    tc.load_into(model, folder)
    for (index, row), (precision, codes, meta, _) in whole(saved).items():
        name, (_, dim, _) = list(TABLES.items())[index]
        words = torch.frombuffer(bytearray(meta), dtype=torch.int32)[None] if meta else torch.zeros(1, 0, dtype=torch.int32)
        codes_1B = torch.frombuffer(bytearray(codes), dtype=torch.uint8)[None]
        assert torch.equal(
            model.tables.get_rows(name, torch.tensor([row])), dequantize_rows(codes_1B, words, format_of(precision), dim)
        )


def test_a_collection_that_one_process_saved_opens_sharded(on_ranks, tmp_path):
    torch.manual_seed(3)
    tables = [tc.Table(name, rows, dim, features) for name, (rows, dim, features) in TABLES.items()]
    one = tc.EmbeddingCollection(tables, rows=tc.RowConfig("int8", cache=0.2))
    one(
        {f: (torch.arange(20), torch.arange(21)) for _, _, features in TABLES.values() for f in features}
    ).values().sum().backward()
    tc.save(one, tmp_path / "saved")
    one.flush()  # sharded tables have no slots: rows that were in some are rounded
    for rows, states in on_ranks("open_alone", 3, plan_q(3, "int8"), HEAT, str(tmp_path / "saved")):
        assert all(np.array_equal(mine, one.get_rows(name).numpy()) for name, mine in zip(TABLES, rows, strict=True))
        assert states[0] > 0


def test_all_ranks_raise_when_one_cannot_write_and_the_old_checkpoint_stays(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    on_ranks("train_and_save", 4, plan_p("int8"), HEAT, {}, folder, 0)
    before = Checkpoint.open(folder).manifest
    told = on_ranks("fail_to_save", 4, plan_p("int8"), HEAT, folder)
    assert "No space left on device" in told[1] and "rows-0001" in told[1]
    assert all(text.startswith("rank 1 stopped: ") for text in told[:1] + told[2:])
    assert Checkpoint.open(folder).manifest == before and len(list((tmp_path / "saved").iterdir())) == 2


def test_torchs_distributed_checkpoint_keeps_the_part_of_every_rank(on_ranks, tmp_path):
    mine, theirs = split(on_ranks("save_and_load_with_torch", 3, plan_q(3, "int8"), HEAT, str(tmp_path / "torch")))
    assert exactly(mine) == exactly(theirs)


def test_chain_of_ranks_opens_under_another_plan_also_compacted(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    saved = on_ranks("save_a_chain", 4, plan_p("int8"), HEAT, {}, folder)
    manifest = Checkpoint.open(folder).manifest
    assert [save.kind for save in manifest.saves] == ["full", "incremental", "incremental"]
    counts = [sum(section.count for section in save.sections) for save in manifest.saves]
    assert counts[0] == 181 and all(0 < count < 100 for count in counts[1:])
    assert_same(split(on_ranks("load_and_train", 3, plan_q(3, "int8"), HEAT, {}, folder, 0))[0], saved)
    compact(folder)
    assert_same(split(on_ranks("load_and_train", 4, plan_p("int8"), HEAT, {}, folder, 0))[0], saved)


def test_all_ranks_raise_when_one_fails_early_and_no_change_is_lost(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    told, saved = zip(*on_ranks("fail_to_take_changes", 3, plan_q(3, "int8"), HEAT, {}, folder), strict=True)
    assert [text.startswith("rank 1 stopped: ") for text in told] == [True, False, True]
    assert all("the save before cannot be read" in text for text in told)
    assert [save.kind for save in Checkpoint.open(folder).manifest.saves] == ["full", "incremental"]
    assert_same(split(on_ranks("load_and_train", 3, plan_q(3, "int8"), HEAT, {}, folder, 0))[0], saved)


def test_a_chain_of_tiers_in_several_precisions_can_be_compacted(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    saved = on_ranks("save_a_chain", 2, plan_q(2, "int8", "fp32"), HEAT, {}, folder)
    compact(folder)
    assert_same(split(on_ranks("load_and_train", 2, plan_q(2, "int8", "fp32"), HEAT, {}, folder, 0))[0], saved)


def test_background_save_of_ranks_holds_the_moment_of_the_call(on_ranks, tmp_path):
    folder = str(tmp_path / "saved")
    saved = on_ranks("save_in_the_background", 4, plan_p("int8"), HEAT, {}, folder)
    assert [save.kind for save in Checkpoint.open(folder).manifest.saves] == ["full", "incremental"]
    assert_same(split(on_ranks("load_and_train", 4, plan_p("int8"), HEAT, {}, folder, 0))[0], saved)


@pytest.mark.parametrize(
    "what, kind, said", [("no disk", "ThermoclineError", "the disk is gone"), ("not shared", "BadInput", "")]
)
def test_all_ranks_hear_at_once_of_a_rank_that_cannot_write(on_ranks, tmp_path, what, kind, said):
    found = on_ranks("fail_in_the_background", 3, plan_q(3, "int8"), HEAT, str(tmp_path / "saved"), what)
    assert {timeout for _, _, timeout in found} == {300.0}, "as the processes were started"
    assert found[1][0] == kind and all(said in text for _, text, _ in found)
    assert all("rank 1 stopped: " in text for rank, (_, text, _) in enumerate(found) if rank != 1), found
    assert len(list((tmp_path / "saved").glob("save-*"))) == 1
    Checkpoint.open(tmp_path / "saved").verify()


def test_all_ranks_resume_from_the_same_save_if_the_last_is_damaged(on_ranks, tmp_path):
    on_ranks("save_a_chain", 3, plan_q(3, "int8"), HEAT, {}, str(tmp_path / "chain"))
    (damaged, *_) = (tmp_path / "chain").glob("save-000003-*/rows-0001-*")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    for told, then, before in on_ranks("resume_damaged", 2, plan_q(2, "int8"), HEAT, str(tmp_path / "chain")):
        assert len(told) == 1 and damaged.name in told[0]
        assert all(np.array_equal(one, other) for one, other in zip(then, before, strict=True))


@pytest.mark.parametrize("dying", [0, 1])
def test_waiting_for_a_rank_that_was_killed_ends_and_names_it(tmp_path, dying):
    file, store, saved = Path(__file__).with_name("dying_saver.py"), tmp_path / "store", tmp_path / "saved"
    ranks = [process.finish() for process in [script(file, store, rank, dying, saved) for rank in range(2)]]
    assert ranks[dying].returncode == -signal.SIGKILL and ranks[1 - dying].returncode == 7, ranks
    assert json.loads(ranks[1 - dying].stdout) == {"rank": 1 - dying, "unresponsive": [dying]}


@pytest.mark.parametrize("incremental", [False, True])
def test_background_save_never_waits_for_an_exchange(tmp_path, incremental):
    model, dense, _ = made(slotted(plan_q(1, "int8"), (6, 0)), HEAT, {"precision": "int8"})
    tc.save(model, tmp_path, incremental=True)
    steps(model, dense, 0, 1, 0, 2)
    saving, may_end = begin_save(model, tmp_path, None, None, incremental, background=True), threading.Event()
    model.tables.pipeline.comm_thread.submit(may_end.wait)  # an update is about to ask for the rows
    writer = threading.Thread(target=saving.write, daemon=True)
    writer.start()
    writer.join(120)
    waits = writer.is_alive()
    may_end.set()
    assert not waits
    saving.publish()
    assert len(Checkpoint.open(tmp_path).manifest.saves) == 1 + incremental


def test_background_save_holds_rows_from_before_a_migration(tmp_path):
    def plan(heat, first):
        tables = [table_plan(name, first, 0, "int8", first_precision="fp32") for name in TABLES]
        return slotted(plan_of(1, 1, tables, heat), (0, 0), (6, 0)).model_copy(update={"heat": heat.sha256})

    other = heat_of(4)
    model, dense, sharding = made(plan(HEAT, 5), HEAT, {"precision": "int8"})
    steps(model, dense, 0, 1, 0, 3)
    tc.save(model, tmp_path / "before")
    saving, before = begin_save(model, tmp_path / "meanwhile", None, None, False, background=True), model.tables.row_index
    sharding.migrate(plan(other, 9), other)
    assert model.tables.row_index is not before
    steps(model, dense, 0, 1, 3, 5)
    saving.write(background=True)
    saving.publish()
    found = []
    for name in ("before", "meanwhile"):
        loaded, _, _ = made(plan(HEAT, 5), HEAT, {"precision": "int8"}, seed=1)
        tc.load_into(loaded, tmp_path / name)
        found.append(exactly({key: each.numpy() for key, each in loaded.tables._arrays().items()}))
    assert found[0] == found[1]


def slotted(plan, *slots):
    """The same with slots in tiers."""
    tables = [with_slots(t, dict(zip((tier.tier for tier in t.tiers), slots, strict=False))) for t in plan.tables]
    return plan_of(plan.topology.nodes, plan.topology.gpus_per_node, tables, HEAT)


@pytest.mark.parametrize("precision, policy", [("int8", "lfu"), ("int4", "adaptive")])
def test_caches_of_shards_are_restored_and_open_under_other_plans(on_ranks, tmp_path, precision, policy):
    near = 2 * (precision == "int4")
    plan, settings = slotted(plan_p(precision), *[(6, near)] * 3), {"precision": precision, "policy": policy}
    folder = str(tmp_path / "saved")
    saved = on_ranks("train_and_save_slots", 4, plan, HEAT, settings, folder)
    checkpoint = Checkpoint.open(folder)
    assert [save.kind for save in checkpoint.manifest.saves] == ["full", "incremental"]
    loaded = on_ranks("load_slots_and_train", 4, plan, HEAT, settings, folder)
    for mine, theirs in zip(loaded, saved, strict=True):
        assert exactly(mine[0]) == exactly(theirs[0]), "every card holds what it held, in the same slots"
        assert exactly(mine[1]) == exactly(theirs[1]), "and goes on in the same way"
    rows = dict(zip(TABLES, saved[0][0][2], strict=True))
    cached = {name: checkpoint.cached(name) for name in TABLES}
    assert all(len(each.rows_K) == len(set(each.rows_K.tolist())) > 3 for each in cached.values())
    for name, (hot_K, values_KD) in cached.items():
        assert np.array_equal(values_KD.numpy(), rows[name][hot_K])
    other = slotted(plan_q(3, precision), (40, 0), (9, near))
    for each in on_ranks("load_slots_and_train", 3, other, HEAT, settings, folder):
        check_values(each[0][2], rows, cached, precision)
        assert each[2] > 20
    model = Whole(**settings, cache=0.3)
    tc.load_into(model, folder)
    check_values([model.tables.get_rows(name).numpy() for name in TABLES], rows, cached, precision)
    compact(folder)
    again = on_ranks("load_slots_and_train", 4, plan, HEAT, settings, folder)
    assert [exactly(each[1]) for each in again] == [exactly(each[1]) for each in saved]


def test_rank_writes_and_reads_only_its_own_slots(on_ranks, tmp_path):
    most = {}
    for ranks in (2, 4):
        tables = [with_slots(table_plan(name, 0, 0, "int8"), {3: (5 * ranks, 0)}) for name in TABLES]
        folder, plan = tmp_path / f"of{ranks}", plan_of(1, ranks, tables)
        found = on_ranks("save_and_count", ranks, plan, None, {"precision": "int8"}, str(folder))
        for rank, (here, copied, pools) in enumerate(found):
            assert pools == [table * ranks + rank for table in range(len(TABLES))]
            (file,) = folder.rglob(f"slots-{rank:04d}.safetensors")
            assert 0 < copied < 2 * here, "slots, and once more their rows and words"
            assert here < file.stat().st_size < here + 4096, "names and shapes take the rest"
        most[ranks] = max(copied for _, copied, _ in found)
    assert most[4] <= most[2] + 8 * 5 * len(TABLES)


def check_values(found, rows, cached, precision):
    """Rows are what they were; one that has lost its slot, or its fp32 slot for an int8 one, is rounded to nearest."""
    for name, mine in zip(TABLES, found, strict=True):
        rounded, hot = [rows[name]], cached[name].rows_K.numpy()
        for less in (precision, "int8"):
            arena = tc.Arena([tc.TableSpec(len(mine), mine.shape[1], less)])
            arena.write(0, torch.arange(len(mine)), torch.from_numpy(rows[name]))
            rounded.append(arena.read(0).numpy())
        same_VR = np.stack([(each == mine).all(axis=1) for each in rounded])
        assert np.isin(np.flatnonzero(~same_VR[0]), hot).all() and same_VR.any(axis=0).all(), name
