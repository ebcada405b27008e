"""What ranks do in the tests of sharded checkpoints. Every function gets rank, ranks and what the test gave."""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from cases import Model, batches, dense_part, exact_loss, sizes_of

import thermocline as tc
from thermocline.checkpoint import Checkpoint, background_save, save_job
from thermocline.checkpoint.copy_budget import CopyBudget
from thermocline.checkpoint.format import sections
from thermocline.checkpoint.format.saved_cache import SavedCache
from thermocline.checkpoint.format.tensor_files import TensorFile
from thermocline.checkpoint.publishes.log import PublishLog
from thermocline.checkpoint.save_job import SaveJob
from thermocline.distributed.process_groups import ProcessGroups, group_timeout
from thermocline.distributed.sharded_collection import ShardedCollection
from thermocline.errors import FormatError


def work(rank: int, tasks: Any, results: Any) -> None:
    """A process: do what comes, until it is ended."""
    torch.set_num_threads(1)
    sections.SECTION_BYTES, sections._MULTIPLE = 256, 8  # so that tables have several
    while True:
        name, store, size, arguments = tasks.get()
        try:
            if size > 1:
                dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=300), size, rank)
            results.put((rank, True, (resolve_name(name) if "." in name else globals()[name])(rank, size, *arguments)))
        except Exception as error:
            results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class Whole(Model):
    """Tables, and a dense part beside them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.top = dense_part()


def steps(model: Whole, dense: torch.optim.Optimizer, rank: int, size: int, first: int, last: int) -> None:
    for step in range(first, last):
        sizes = sizes_of(step, size)
        out = model.tables(batches(step, sizes)[rank]).values()
        exact_loss(out, step, sum(sizes[:rank])).backward()
        model.top(torch.ones(1, model.top.in_features)).sum().backward()
        dense.step()
        dense.zero_grad()


def held(model: Whole) -> list[Any]:
    """All that lies here: for each table the rows, their codes, meta words and state; clock and rates."""
    sharded, found = model.tables, []
    sharded.wait_for_exchange()
    for index, table in enumerate(sharded.tables):
        rows = torch.arange(table.rows)
        for k, at, place in sharded.shard.local(sharded.row_index.locate(rows + sharded.row_index.first[index])):
            parts = [*sharded.arena.views(k)[:2], *sharded.shard.states(k)]
            found.append((index, sharded.row_index.parts[k].precision, rows[at].numpy(), [p[place].numpy() for p in parts]))
    shared = [sharded.trainer.clock, sharded.trainer.hyper, *model.top.parameters()]
    return [found, [tensor.detach().clone().numpy() for tensor in shared]]


def made(plan: tc.Plan, heat: Any, settings: dict[str, Any], seed: int = 0) -> tuple[Whole, torch.optim.Optimizer, tc.Plan]:
    model = Whole(**settings)
    sharding = tc.shard_(model, plan, heat, reduce="sum")
    dense = torch.optim.Adam(model.top.parameters(), lr=0.1)
    return model, dense, sharding


def train_and_save(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str, more: int) -> Any:
    """Train 12 steps, save, train on; what lies here at the save and at the end."""
    model, dense, _ = made(plan, heat, settings)
    steps(model, dense, rank, size, 0, 12)
    tc.save(model, folder, optimizers=dense, progress={"step": 12})
    then = held(model)
    steps(model, dense, rank, size, 12, 12 + more)
    return then, held(model)


def load_and_train(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str, more: int) -> Any:
    """Load into a fresh model, train on; what lies here before and after."""
    model, dense, sharding = made(plan, heat, settings)
    tc.load_into(model, folder, optimizers=dense)
    sharding.check_replicas()
    then = held(model)
    steps(model, dense, rank, size, 12, 12 + more)
    return then, held(model)


def load_and_count(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """Load; bytes of rows that this rank read, without their numbers (`verify` reads those too), and what lies here."""
    model, dense, _ = made(plan, heat, settings)
    read, plain = [0], TensorFile.read_into

    def counted(self: TensorFile, name: str, out: torch.Tensor, first: int = 0) -> None:
        read[0] += out.nbytes * (self.path.name.startswith("rows-") and not name.endswith("/rows"))
        plain(self, name, out, first)

    with mock.patch.object(TensorFile, "read_into", counted):
        tc.load_into(model, folder, optimizers=dense)
    return read[0], held(model)


def load_a_lost_file(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """Load where rank 1 cannot read rows; the type of the error of each rank."""
    model, dense, _ = made(plan, heat, settings)
    lost = FormatError("the disk is gone") if rank == 1 else None
    with mock.patch.object(Checkpoint, "read_section", side_effect=lost) if lost else contextlib.nullcontext():
        try:
            tc.load_into(model, folder, optimizers=dense)
        except FormatError as error:
            return error.__dict__.get("rank", "own")


def open_alone(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str) -> Any:
    """A collection that one process saved, opened sharded; its rows as all ranks read them together."""
    tables = tc.load(folder, plan=plan, heat=heat)
    rows = [tables.get_rows(table.name).numpy() for table in tables.tables]
    tables.wait_for_exchange()
    states = [int(state.count_nonzero()) for state in tables.trainer.states]
    return rows, states


def fail_to_save(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str) -> str:
    """Rank 1 cannot write; what each was told."""
    from thermocline.checkpoint.format import write as saving

    model, dense, _ = made(plan, heat, {})
    good = saving.write_file
    try:
        if rank == 1:

            def disk_full(path: Any, groups: Any, background: bool) -> Any:
                with saving.explain_write_errors(path):
                    raise OSError(28, "No space left on device")

            saving.write_file = disk_full
        tc.save(model, folder, optimizers=dense)
    except tc.ThermoclineError as error:
        return str(error)
    finally:
        saving.write_file = good
    return "nothing"


def save_and_load_with_torch(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str) -> Any:
    """By torch.distributed.checkpoint, each rank's part; what lies here, before and after."""
    import torch.distributed.checkpoint as dcp

    model, dense, _ = made(plan, heat, {})
    steps(model, dense, rank, size, 0, 6)
    dcp.save({"model": model}, checkpoint_id=folder)
    other, _, _ = made(plan, heat, {})
    dcp.load({"model": other}, checkpoint_id=folder)
    return held(model), held(other)


def save_a_chain(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """A full save and two incremental ones; what lies here at the end."""
    model, dense, _ = made(plan, heat, settings)
    for first in (0, 8, 9):
        steps(model, dense, rank, size, first, first + 1)
        tc.save(model, folder, optimizers=dense, incremental=True)
    return held(model)


def fail_to_take_changes(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """An incremental save for which rank 1 cannot find what changed, then another: what each was told, and what lies here."""

    model, dense, _ = made(plan, heat, settings)
    steps(model, dense, rank, size, 0, 1)
    tc.save(model, folder, optimizers=dense, incremental=True)
    steps(model, dense, rank, size, 8, 9)
    good, told = SaveJob._changed, ""

    def unread(self: SaveJob, each: Any) -> Any:
        raise tc.FormatError("the save before cannot be read")

    try:
        if rank == 1:
            SaveJob._changed = unread  # type: ignore[method-assign]
        tc.save(model, folder, optimizers=dense, incremental=True)
    except tc.ThermoclineError as error:
        told = str(error)
    finally:
        SaveJob._changed = good  # type: ignore[method-assign]
    tc.save(model, folder, optimizers=dense, incremental=True)
    return told, held(model)


def save_in_the_background(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """A full save and an incremental one while training goes on; what lay here when the second was asked for."""
    model, dense, _ = made(plan, heat, settings)
    then = None
    for first in (0, 8):
        steps(model, dense, rank, size, first, first + 1)
        then = held(model)
        with no_waiting_for_steps():
            pending = tc.save_async(model, folder, optimizers=dense, incremental=True)
            steps(model, dense, rank, size, first + 1, first + 6)
            pending.wait()
    return then


@contextlib.contextmanager
def no_waiting_for_steps() -> Iterator[None]:
    """Fail if a writer thread waits for a step: the step may wait for the lock that the writer holds."""
    wait = ShardedCollection.wait_for_exchange

    def watched(self: ShardedCollection) -> None:
        me = threading.current_thread()
        assert self.pipeline.comm_thread.is_current or me is threading.main_thread(), f"{me.name} waits for a step"
        wait(self)

    ShardedCollection.wait_for_exchange = watched
    try:
        yield
    finally:
        ShardedCollection.wait_for_exchange = wait


def resume_damaged(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str) -> Any:
    """Resume where the last save is damaged; what was warned of, and the rows then and of the save before."""
    model, dense, _ = made(plan, heat, {})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        assert tc.resume(folder, model, optimizers=dense) == {}
    then = slots_and_rows(model)[2]
    tc.load_into(model, folder, optimizers=dense, save=2)
    return [str(each.message) for each in told if "from save 2" in str(each.message)], then, slots_and_rows(model)[2]


def fail_in_the_background(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str, what: str) -> Any:
    """Rank 1 can write nothing, not even a report, or does not see the folder; what each rank was told, and the timeout."""
    model, dense, _ = made(plan, heat, {})
    tc.save(model, folder, optimizers=dense)
    is_dir = Path.is_dir

    def cannot(*given: Any, **more: Any) -> Any:
        raise tc.ThermoclineError("the disk is gone")

    with contextlib.ExitStack() as patches:
        if rank == 1 and what == "no disk":
            patches.enter_context(mock.patch.object(save_job, "write_sections", cannot))
            patches.enter_context(mock.patch.object(background_save, "report_failure", cannot))
        if rank == 1 and what == "not shared":
            seen = mock.patch.object(Path, "is_dir", lambda path: not path.name.startswith("save-0") and is_dir(path))
            patches.enter_context(seen)
        try:
            tc.save_async(model, folder, optimizers=dense).wait()
        except tc.ThermoclineError as error:
            return type(error).__name__, str(error), group_timeout(model.tables.groups.device).total_seconds()
    return "nothing"


def slots_and_rows(model: Whole) -> list[Any]:
    """All that lies here, slots of caches too, and all rows as the ranks read them together."""
    tables = model.tables
    rows = [tables.get_rows(table.name).numpy() for table in tables.tables]
    here = held(model)
    for *_, (codes_RB, meta_RW, *_) in here[0]:
        codes_RB[meta_RW[:, 0] < 0] = 0  # a slot has the value; an eviction during a background save may change stale codes
    return [here, [array.clone().numpy() for array in tables.arena.cache], rows]


def train_and_save_slots(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """A full save and an incremental one, the second while training goes on; what lies here then, and at the end."""
    model, dense, _ = made(plan, heat, settings)
    steps(model, dense, rank, size, 0, 9)
    tc.save(model, folder, optimizers=dense, incremental=True)
    steps(model, dense, rank, size, 9, 12)
    with no_waiting_for_steps():
        pending = tc.save_async(model, folder, optimizers=dense, incremental=True)
        then = slots_and_rows(model)
        steps(model, dense, rank, size, 12, 17)
        pending.wait()
    return then, slots_and_rows(model)


def load_slots_and_train(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """Load into a fresh model, train on; what lies here before and after, and the rows in slots."""
    model, dense, sharding = made(plan, heat, settings)
    tc.load_into(model, folder, optimizers=dense)
    sharding.check_replicas()
    then = slots_and_rows(model)
    slots = model.tables.stats().get("admissions", 0)
    steps(model, dense, rank, size, 12, 17)
    sharding.check_replicas()
    return then, slots_and_rows(model), slots


def save_and_count(rank: int, size: int, plan: tc.Plan, heat: Any, settings: dict[str, Any], folder: str) -> Any:
    """Save with slots, in the background too, and load: bytes of the slots here, of all copies that were made, pools read."""
    budgets, pools, slots = [], set(), SavedCache.array
    begin, gather = CopyBudget.__init__, ProcessGroups.all_gather

    def made_budget(self: CopyBudget, *given: Any) -> None:
        begin(self, *given)
        budgets.append(self)

    def told(self: ProcessGroups, each: Any) -> Any:
        Told(io.BytesIO()).dump(each)
        return gather(self, each)

    def read(self: SavedCache, module: str, number: int, array: str, *span: Any) -> Any:
        pools.add(number)
        return slots(self, module, number, array, *span)

    CopyBudget.__init__, ProcessGroups.all_gather, SavedCache.array = made_budget, told, read
    try:
        model, dense, _ = made(plan, heat, settings)
        steps(model, dense, rank, size, 0, 3)
        tc.save(model, folder)
        steps(model, dense, rank, size, 3, 4)
        tc.save_async(model, folder).wait()
        tc.load_into(model, folder)
    finally:
        CopyBudget.__init__, ProcessGroups.all_gather, SavedCache.array = begin, gather, slots
    arena = model.tables.arena
    here = sum(each.numel() * each.element_size() for each in arena.cache)
    (budget,) = budgets
    return here, budget.peak - 3 * sections.SECTION_BYTES - arena.rows, sorted(pools)


class Told(pickle.Pickler):
    """What ranks tell each other while they save: no tensors."""

    def persistent_id(self, each: Any) -> None:
        assert not isinstance(each, (torch.Tensor, np.ndarray)), each.shape


def open_and_train(rank: int, size: int, plan: tc.Plan, heat: Any, folder: str) -> Any:
    """Load what other versions wrote at step 8, under this plan; all rows then and three steps later."""
    model, dense, _ = made(plan, heat, {"precision": "int8"})
    tc.load_into(model, folder, optimizers=dense)
    then = slots_and_rows(model)[2]
    steps(model, dense, rank, size, 8, 11)
    return then, slots_and_rows(model)[2]


def train_and_publish(
    rank: int, size: int, plan: Any, heat: Any, settings: Any, folder: str, address: str, secret: str
) -> list[Any]:  # fmt: skip
    """Train and publish, a few steps at a time; then a checkpoint of the moment of the last publish."""
    model, dense, _ = made(plan, heat, settings)
    with tc.publish(model, folder, to=address, dense=True, secret_file=secret, interval=0.0) as publisher:
        done = [publisher.flush(120.0)]
        for first in range(0, 9, 3):
            steps(model, dense, rank, size, first, first + 3)
            publisher.step()
            done.append(publisher.flush(120.0))
        tc.save(model, folder + " expected")
        return [publisher.number, done, [each.state for each in publisher.servers]]


def publish_after_a_failure(rank: int, size: int, plan: Any, heat: Any, settings: Any, folder: str) -> list[Any]:
    """The log of one rank cannot be written, at two publishes one after the other: all ranks raise, and go on."""
    model, dense, _ = made(plan, heat, settings)
    append, failures = PublishLog.append, [1, 1] if rank == 1 else []

    def fail(log: PublishLog, part: Any) -> int:
        if failures:
            failures.pop()
            raise tc.ThermoclineError("no space is left")
        return append(log, part)

    raised = []
    with tc.publish(model, folder, dense=True, interval=0.0) as publisher:
        publisher.flush()
        with mock.patch.object(PublishLog, "append", fail):
            for first in range(0, 9, 3):
                steps(model, dense, rank, size, first, first + 3)
                try:
                    publisher.flush()
                    raised.append("")
                except tc.ThermoclineError as error:
                    raised.append(str(error))
        tc.save(model, folder + " expected")
        return raised
