"""Tables of a checkpoint over several cards, and lookups in them.

    with CardGroup("checkpoint", cards=4, split="hash") as group:
        rows = group.lookup({"user": ids})["user"]                       [n, dim]
        group.load("checkpoint-of-today")                                beside the old one, then in its place

On a CPU cards are processes that fill shared memory, and lookups run here: one kernel reads the memory of all cards. On GPUs
this process drives all cards of the host, and a kernel on the first reads the memory of the others through peer access; with
fewer GPUs than cards several cards share one, in allocations of their own.

`infer` answers a whole micro-batch (`answers.py`). It takes the current `Version` once, so all rows of all its requests are of
one version; a new one is put in place by one assignment (`version.py`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import formats as F
from thermocline.errors import BadInput
from thermocline.heat.profile import HeatProfile
from thermocline.kernels.serve.fields import FEW
from thermocline.plan.model import Plan
from thermocline.serve.errors import NotReady
from thermocline.serve.frozen_tables import FrozenTables
from thermocline.serve.remote.remote_hosts import Fetch, Hosts, other_hosts
from thermocline.serve.remote.rendezvous import cards_of, hosts_asked_for
from thermocline.serve.server.served_model import CardStatus, Model, TensorInfo

from .checkpoint_source import Source
from .huge_pages import Enlarging
from .lookup import Answer, answer, warm
from .requests import OFFSETS, WEIGHTS, as_array
from .response_writer import Filler
from .segments import Arrangement, Bytes, Segment, Shelf, arrange, check_fits, put_rows
from .supervisor import Supervisor
from .version import Changed, Version

Array = NDArray[Any]


class CardGroup:
    """Frozen tables over `cards` cards. `split`: "hash", "range", "feature", or "plan" with a plan (and its heat file)."""

    def __init__(
        self,
        folder: Path | str,
        cards: int = 4,
        split: str = "hash",
        *,
        plan: Plan | Path | str | None = None,
        heat: HeatProfile | Path | str | None = None,
        device: str = "cpu",
        name: str = "tables",
    ) -> None:
        self.name, self.count, self.split, self.device = name, cards, split, torch.device(device)
        self._plan = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        self._heat = HeatProfile.load(heat) if isinstance(heat, (str, Path)) else heat
        self._lookups_C = np.zeros(cards + 1, np.int64)
        self._loading = threading.Lock()
        self._ending = threading.Lock()  # held for a moment: nothing is put in place once `_closed` is set
        self._closed = False
        self._loads = 0
        self._current: Version | None = None
        self._enlarging = Enlarging(())
        self._held = ""
        self._far_of: dict[str, int] = {}  # what other hosts call what is held
        self._source = source = Source(folder)
        source.splits(cards, split, self._plan, self._heat)  # refuse what cannot be split before processes are started
        self._hosts = self._meet()
        near = cards if self._hosts is None else len(self._hosts.mine(cards))
        self._supervisor = Supervisor(near) if self.device.type == "cpu" else None
        try:
            self._take(source)
        except BaseException:
            self.close()
            raise

    def _meet(self) -> Hosts | None:
        """The other hosts that cards are on, if torchrun started several."""
        rank, hosts = hosts_asked_for()
        if hosts == 1:
            return None
        if rank != 0:
            raise BadInput(f"this is host {rank} of {hosts}: call thermocline.serve.hold_cards() here; host 0 looks rows up")
        if self.device.type != "cpu" or self.count < hosts:
            raise BadInput(
                f"{self.count} cards on {hosts} hosts, device {self.device}: cards of several hosts are processes of CPUs, at "
                "least one on each; use --device cpu, and as many --cards as there are hosts or more"
            )
        found = other_hosts()
        assert found is not None
        self._there = found.join(self)  # what other hosts call this group
        return found

    def __enter__(self) -> CardGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- versions -----------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Version:
        """What is served now. Take it once for lookups that belong together."""
        if (version := self._current) is None:
            raise NotReady(f"the cards of {self.name!r} are closed")
        return version

    def _check_open(self) -> None:
        if self._closed:
            raise NotReady(f"the cards of {self.name!r} were closed; what was loaded or changed is not served")

    @property
    def waits(self) -> bool:
        """Whether lookups wait for other hosts."""
        return self._hosts is not None

    @property
    def closed(self) -> bool:
        return self._current is None

    @property
    def version(self) -> str:
        return "" if self._current is None else self._current.name

    def load(self, folder: Path | str) -> None:
        """Load another checkpoint beside the one that is served, then serve it. If anything is wrong with it, or it does not
        fit, the old one stays."""
        self._take(Source(folder))

    def _take(self, source: Source) -> None:
        with self._loading:
            self._check_open()
            splits = source.splits(self.count, self.split, self._plan, self._heat)
            arrangement = arrange(source.tables, splits, records=self.device.type == "cpu")
            memory: list[Bytes] = []
            if self._supervisor is None:
                from .gpu_shards import load

                segments = load(source, arrangement, self.count)
                held = ""
            else:
                held = f"{self._loads}"
                self._loads += 1
                segments, memory = self._load_processes(source, arrangement, held, self._supervisor)
            fetch = self._fetch(arrangement, held)
            version = Version.of(source.name, arrangement, segments, source.id_maps, source.modes, source.dense, fetch)
            warm(version)
            try:
                with self._ending:
                    self._check_open()  # whoever closes does not wait for loads
                    before, self._current, self._held, self._source = self._held, version, held, source
                    of_before, self._enlarging = self._enlarging, Enlarging(memory)
            except NotReady:
                self._forget(held)
                raise
            of_before.stop()
            if before and self._supervisor is not None:
                self._supervisor.drop(before)
                if self._hosts is not None:
                    self._hosts.drop_later(self._far_of.pop(before))

    def _forget(self, held: str) -> None:
        """Let cards have no more of a version that is not served."""
        if self._supervisor is not None:
            self._supervisor.drop(held)
        if self._hosts is not None:
            self._hosts.drop(self._far_of.pop(held))

    def _load_processes(
        self, source: Source, arrangement: Arrangement, held: str, supervisor: Supervisor
    ) -> tuple[list[Any], list[Bytes]]:
        """Segments of all cards, and the memory of those that are here."""
        hosts, job = self._hosts, source.job(arrangement)
        mine = range(arrangement.cards) if hosts is None else hosts.mine(arrangement.cards)
        check_fits(sum(arrangement.sizes_C[: len(mine)]), f"'{source.checkpoint.folder}' on {len(mine)} cards")
        segments = [Segment(arrangement.sizes_C[card], f"card-{card}") for card in mine]
        number, wait = (0, None) if hosts is None else hosts.load(self._there, job, arrangement.cards)
        self._far_of[held] = number
        try:
            try:
                supervisor.load(held, job, segments)
            finally:
                if wait is not None:
                    wait()
            memory = [segment.memory for segment in segments]
            source.put_rest(arrangement.shelves, lambda shelf, *rows: self._put(arrangement, number, shelf, memory, *rows))
        except BaseException:
            self._forget(held)
            self._check_open()  # else that is why
            raise
        with ThreadPoolExecutor(min(len(segments), 8)) as several:
            list(several.map(Segment.populate, segments))
        here = [torch.from_numpy(segment.memory) for segment in segments]
        return (here if hosts is None else hosts.segments(here, arrangement.cards)), memory

    def _put(self, arrangement: Arrangement, number: int, shelf: Shelf, memory: list[Bytes], *rows: Any) -> None:
        """Rows that were read here, to their places here and on other hosts."""
        put_rows(shelf, memory, *rows)
        if self._hosts is not None:
            self._hosts.put(number, arrangement.shelves.index(shelf), *rows)

    def _fetch(self, arrangement: Arrangement, held: str) -> Fetch | None:
        return None if self._hosts is None else Fetch(self._hosts, arrangement, self._far_of[held])

    def lost(self, host: int) -> None:
        """A host is gone: rows of its cards cannot be had, all others can."""
        with self._ending:
            version = self._current
            if self._hosts is not None and version is not None:
                near = version.segments[: len(self._hosts.mine(self.count))]
                self._current = version.on(self._hosts.segments(near, self.count))

    def back(self, host: int) -> None:
        """A host is there again, with nothing: load everything anew, beside what is served."""
        if self._current is not None:
            self.load(self._source.checkpoint.folder)

    def follow(self) -> bool:
        """Serve what was saved to the folder since, if anything was: the changes of incremental saves, or else all of it."""
        newer = self._source.checkpoint.newer()
        if newer is None:
            return False
        source = Source(self._source.checkpoint.folder)
        changes = source.changes(self._source.checkpoint.number)
        if changes is None:
            self._take(source)
        else:
            self.apply(source.name, changes, source.dense)
            self._source = source
        return True

    def apply(self, name: str, changed: Mapping[str, Changed], dense: Mapping[str, Tensor] | None = None) -> None:
        """Serve changed rows from now on, as version `name`: a delta. Requests under way end with the rows they began with."""
        with self._loading:
            version = self.current
            self._check_changes(version, changed)
            newer = version.with_changes(name, changed, dense)
            with self._ending:
                self._check_open()
                self._current = newer

    def _check_changes(self, version: Version, changed: Mapping[str, Changed]) -> None:
        tables = {shelf.table.name: shelf.table for shelf in version.arrangement.shelves}
        size = sum(each.codes_KB.nbytes + each.meta_KW.nbytes for each in changed.values())
        already = 0 if version.overlay is None else version.overlay.segment.numel()
        if self.device.type == "cpu":
            check_fits(size + already, f"a delta of {size:,} bytes over {already:,} changed before")
        for name, each in changed.items():
            if name not in tables:
                raise BadInput(f"the delta changes table {name!r}; there are {', '.join(tables)}")
            table = tables[name]
            rows_K, shape = each.rows_K, (len(each.rows_K), F.row_bytes(table.format, table.dim))
            if each.codes_KB.shape != shape:
                raise BadInput(f"the delta of table {name!r} has codes of {each.codes_KB.shape}, and {shape} are needed")
            if len(rows_K) and not (rows_K[0] >= 0 and rows_K[-1] < table.rows and (np.diff(rows_K) > 0).all()):
                raise BadInput(f"the delta of table {name!r} must name rows 0 to {table.rows - 1}, rising and each once")

    # -- lookups ------------------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> list[TensorInfo]:
        version = self.current
        return [
            info
            for feature in version.features
            for info in (
                TensorInfo(feature, "INT64", (-1,), True),
                TensorInfo(feature + OFFSETS, "INT64", (-1,), True),
                TensorInfo(feature + WEIGHTS, "FP32", (-1,), True),
            )
        ]

    @property
    def outputs(self) -> list[TensorInfo]:
        version = self.current
        return [TensorInfo(name, "FP32", (-1, dim)) for name, dim in zip(version.features, version.dims, strict=True)]

    def infer(self, requests: Sequence[Mapping[str, Array]]) -> list[Answer | Exception]:
        """Answer a micro-batch: for each request its outputs, or what is wrong with it."""
        return self.answer(self.current, requests)

    def answer(self, version: Version, requests: Sequence[Mapping[str, Array]]) -> list[Answer | Exception]:
        """The same from a version that the caller took."""
        return answer(version, requests, self._lookups_C)

    def filler(self, feature: str, count: int) -> Filler | None:
        """What writes so many rows of a feature where an answer will be; None where that takes more than one step."""
        version = self.current
        rows = version.plain.get(feature)
        if rows is None or not 0 < count <= FEW:
            return None
        here, mine = weakref.ref(self), weakref.ref(version)

        def is_served() -> bool:
            group = here()
            return group is not None and not group.closed and group._current is mine()

        return Filler(version.name, rows, count, self._lookups_C, is_served)

    def lookup(self, inputs: Mapping[str, Array | Tensor | Sequence[int]]) -> dict[str, Tensor]:
        """Rows of some features, or bags of rows: inputs as `requests.py` names them, outputs by feature."""
        request = {name: as_array(name, value) for name, value in inputs.items()}
        if isinstance(answer := self.infer([request])[0], Exception):
            raise answer
        return {name: torch.from_numpy(output) for name, output in answer.items()}

    def module(self) -> FrozenTables:
        """The tables as a module, for a PyTorch model that serves in this process."""
        return FrozenTables(self)

    def beside(self) -> Sequence[Model]:
        """What else these tables can answer: `rank`, where the checkpoint has a model around them that scores candidates."""
        from thermocline.serve.ranking import RankModel, ranks

        return [RankModel(self, "rank" if self.name == "tables" else f"{self.name}-rank")] if ranks(self.current) else []

    # -- cards --------------------------------------------------------------------------------------------------------------

    def cards(self) -> list[CardStatus]:
        """Each card: whether it is there, bytes that it holds, lookups that it answered, its process."""
        version = self.current
        pids, ready = [os.getpid()] * self.count, [True] * self.count
        if self._supervisor is not None:
            pids, ready = self._supervisor.pids, self._supervisor.ready
        for other in [] if self._hosts is None else self._hosts.others:
            there = len(cards_of(other.number, self._hosts.count, self.count))  # type: ignore[union-attr]
            known = other.cards.get(self._there, ([0] * there, [True] * there))
            gone = other.lost or self in other.without
            pids, ready = pids + known[0], ready + [each and not gone for each in known[1]]
        sizes, lookups = version.arrangement.sizes_C, self._lookups_C.tolist()
        return [CardStatus(n, ready[n], sizes[n], lookups[n], pids[n]) for n in range(self.count)]

    def close(self) -> None:
        """End the cards. Lookups that are under way end well: they have the memory. A load that is under way is not waited
        for, and refused when it would be served."""
        with self._ending:
            self._closed, self._current = True, None
        self._enlarging.stop()
        if self._supervisor is not None:
            self._supervisor.close()
        if self._hosts is not None:
            self._hosts.leave(self, self._there)
