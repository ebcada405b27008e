"""`RowsModule`, the base of all modules: an arena and a trainer as an `nn.Module`.

The arrays of the arena are neither parameters nor buffers, because casts such as `.half()` would change them. Instead:

* `_apply` (`.to`, `.half`, `.cuda`, `share_memory`) changes devices and not values (`device_moves.py`). A float that it shows
  tells the new output type of the module.
* `_save_to_state_dict` writes the arrays under the names below; `_load_from_state_dict` reads them, or a plain `weight`.
* deepcopy and pickle copy arena and trainer as Python objects.

    key in state_dict        what
    codes, meta              rows, as stored
    state0, state1           optimizer state of the rows, as many as the optimizer keeps
    hyper, clock             learning rate and the like; seed and step of stochastic rounding
    cache_*                  the cache, cached rows in full precision; none where there is no cache
    tables                   sizes and precisions as text (uint8), compared on loading
    ids                      id maps as text, compared on loading; none where ids are rows
    row_state                all of these, packed, beside `weight`: only in checkpoints of transformers' Trainer
    elastic*_*               ids that have rows, with their counts (`ids/elastic.py`)

A lookup trains if gradients are enabled and the placeholder parameter requires a gradient, also in eval(), as in torch.
Otherwise a backward through its output changes no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from thermocline import formats as F
from thermocline._lazy import uncompiled
from thermocline.errors import BadInput, IdOutOfRange
from thermocline.heat.profile import HeatProfile
from thermocline.kernels import ops
from thermocline.kernels.arguments import LookupCall
from thermocline.kernels.layout import Cache
from thermocline.rows.memory import MemoryUsage, pin
from thermocline.rows.training import Trainer

from .backward_pass import OpenLookup, OpenRows
from .config import RowConfig, TableRequest, arena_text, make_arena
from .device_moves import as_integers, check_keeps, materialize, move_tensors
from .elastic_maps import ElasticIds, elastic_ids
from .heat_profile import heat_of
from .id_maps import FeatureMaps
from .inputs import Given, check_integers, check_is_tensor, is_transformed, refuse_torchscript, refuse_transforms
from .many_ranks import check_placeholder, ranks, refuse_ddp, refuse_unsharded
from .optimizer import FusedOptimizer, Trained, deferred_lookup
from .placeholder import PlaceholderParameter
from .prefetch import AT_ONCE, PrefetchedBatches, PrefetchedInput, PrefetchRequest, prefetch_loop
from .read_only import StoredArray
from .saved_rows import load_state, maps_as_text, unpack, without_rows

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK = 1 << 16  # rows that are drawn, copied or quantized at a time
T = TypeVar("T")


class RowsModule(nn.Module):
    """Base of the modules: rows of one or more tables, trained in place."""

    placeholder: PlaceholderParameter
    follows_autocast = False  # whether the output has the type of autocast; torch's modules do not
    prefetch_request: Callable[..., PrefetchRequest]  # takes the arguments of forward

    def __init__(
        self, tables: Sequence[TableRequest], features: Sequence[int], rows: RowConfig, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rows = rows
        wanted: Any = torch.get_default_dtype() if dtype is None else dtype
        if not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
            message = f"dtype is {wanted!r}; use a float, the type of the output. Rows are stored in `precision`"
            raise BadInput(message, parameter="dtype", value=wanted)
        self.dtype = wanted
        self.arena, self.tiers = make_arena(tables, features, device, rows)
        self.trainer = Trainer(self.arena, rows.optimizer, seed=rows.seed)
        self.placeholder = PlaceholderParameter(rows.update, torch.zeros(1, dtype=torch.float32, device=self.arena.device))
        self.trained = Trained(self.arena, self.trainer, self.placeholder, rows.independent)
        self._fused: FusedOptimizer | None = None
        self._prefetched = PrefetchedBatches()
        self.maps: FeatureMaps | None = None  # from ids to rows; None: ids are rows

    @classmethod
    def without_values(cls, *args: Any, **keywords: Any) -> Self:
        """Construct a module without drawing initial rows."""
        bare = type(cls.__name__, (cls,), {"reset_parameters": lambda self: None})
        module: Self = bare(*args, **keywords)
        module.__class__ = cls
        return module

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer of this module's rows, for schedulers, `zero_grad` and, with update="step", `step`."""
        if self._fused is None:
            self._fused = FusedOptimizer([self.trained])
        return self._fused

    def _trains(self) -> bool:
        """Whether the backward of what is read now updates rows."""
        if not torch.compiler.is_compiling() and not self.trained.placeholder.read_by(self._parameters["placeholder"]):
            return False
        trains = torch.is_grad_enabled() and self.trained.placeholder.requires_grad
        refuse_ddp(trains)
        if trains and not self.rows.independent and (count := ranks()) > 1:
            if not self.training:  # an evaluation without no_grad: rows stay as they are
                return False
            if not torch.compiler.is_compiling():  # the operator refuses: no error of a traced function reaches the user
                refuse_unsharded(count)
        return trains

    def look_up(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str, padding: int = -1) -> Tensor:
        """Look up rows of all features (see `rows.lookup`), to be trained by backward or, with update="step", later.

        Compiled graphs give the id of their padding; else ids come without it.
        """
        arena, trainer, dtype, maps = self.arena, self.trainer, self.dtype, self.maps
        if (elastic := maps is not None and maps.elastic) and torch.compiler.is_compiling():
            return _look_up_uncompiled(self, ids, offsets, weights, mode)
        trains, factors = self._trains(), None
        if self.follows_autocast and torch.is_autocast_enabled(arena.device.type):
            dtype = torch.get_autocast_dtype(arena.device.type)
        kernel_dtype = torch.float32 if dtype == torch.float64 else dtype  # kernels stop at fp32
        with self.trained.placeholder.lock if elastic and trains else nullcontext():  # until the rows are known to be in use
            try:
                rows = ids if maps is None else maps.admit(self, ids, offsets) if elastic else maps(ids, offsets)
                if elastic and trains and maps is not None:
                    weights, factors = maps.factors(rows, offsets, weights, mode)
                call = LookupCall(rows, offsets, weights, F.MODES.index(mode), kernel_dtype)
                if not trains:
                    out = ops.lookup(arena.arrays, call, padding=padding)
                elif torch.compiler.is_compiling():
                    out = ops.lookup(arena.arrays, call, *self.trained.in_graph(), padding)
                elif self.rows.update == "step":
                    out = deferred_lookup(arena, call, self.trained.placeholder)
                    if elastic:
                        out.grad_fn.opened = OpenRows(self.trained)  # type: ignore[union-attr]
                else:
                    out = ops.lookup(arena.arrays, call, trainer.arrays, self.trained.placeholder)
                    out.grad_fn.opened = OpenLookup(self.trained)  # type: ignore[union-attr]
            except IdOutOfRange as error:
                names = [arena.tables[table].name for table in arena.features]
                raise (error if maps is None else maps.name(error, names)) from None
        if factors is not None:
            out = out * factors.to(out.dtype)
        return out.double() if dtype == torch.float64 else out

    def prefetched(
        self, loader: Iterable[T], ids: Callable[[T], Any] | None = None, at_once: int = AT_ONCE
    ) -> Iterator[tuple[T, PrefetchedInput]]:
        """Iterate over batches, and prefetch the rows of later ones to the GPU (residency="host"; else nothing is read ahead).

        Args:
            loader: batches on the device of the tables.
            ids: returns the input of forward for a batch (a tuple has several arguments); by default the batch.
            at_once: batches whose rows are copied together, which is faster and takes as many times the memory. Twice as many
                batches are read ahead.

        Yields:
            Each batch and its input, which forward takes. A forward with the same tensors recognises them as well.

        Raises:
            BadInput: `at_once` is less than 1.

        Example::

            for batch, rows in tables.prefetched(loader, ids=lambda batch: batch["ids"]):
                loss = model(tables(rows), batch["label"])
        """

        def prefetch(inputs: list[tuple[Any, ...]]) -> None:
            self.prefetch_rows(*(self.prefetch_request(*arguments) for arguments in inputs))

        return prefetch_loop(loader, ids, prefetch if self.arena.prefetches else None, at_once)

    def prefetch(self, *arguments: Any, **keywords: Any) -> None:
        """Start copying the rows of a later batch to the GPU (residency="host"; else does nothing).

        Until the backward of that batch its ids must not be changed in ways that autograd does not see: by collectives, through
        `.data` or DLPack, or by other kernels. `prefetched` prefetches all batches of a loop.

        Args:
            arguments: the arguments of forward.
            keywords: its keyword arguments.
        """
        if self.arena.prefetches:
            self.prefetch_rows(self.prefetch_request(*arguments, **keywords))

    def prefetch_rows(self, *requests: PrefetchRequest) -> None:
        """Copy the rows of batches to the GPU, together."""
        batches = [(request.ids, request.offsets) for request in requests]
        self.arena.prefetch(*(batches if self.maps is None else [(self.maps.rows_now(*one), one[1]) for one in batches]))
        self._prefetched.add(requests)

    def take_prefetched(self, given: Sequence[Given]) -> Any:
        """The parsed input of a batch that was prefetched, once, and None for other batches (see `PrefetchedBatches.take`).

        Every forward calls it. By its tensors the update finds the sorted rows of the prefetch (`kernels/stage/gpu_area.py`).
        """
        if torch.compiler.is_compiling():  # compiled code does not depend on what was prefetched
            return None
        if is_transformed():
            refuse_transforms()
        if not self._prefetched or not given or (self.arena.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None  # a captured graph runs again, with other ids in the same memory
        return self._prefetched.take(given, self.arena.arrive)

    def stats(self) -> dict[str, int]:
        """Counts of the cache: lookups, hits, admissions, evictions, write-backs, promotions, bytes moved.

        Rows that begin in the cache (small tables of a collection, and those of `warm`) count as admitted. Lookups are counted
        in steps that refresh the cache: none with policy "fixed"; once an "lfu" cache has settled, one in four of the steps
        with 65,536 lookups or more.

        Returns:
            The counts by name; after `prefetch` also rows and bytes that it moved, after `warm` also the predicted hits. Empty
            without a cache. Elastic ids add those of `elastic().state()`, summed.
        """
        return self.arena.stats() | ({} if self.maps is None else self.maps.totals())

    def elastic(self, feature: str | None = None) -> ElasticIds:
        """The ids that have rows of an elastic table: their numbers, pinned ids, and what becomes of evicted ones.

        Args:
            feature: a feature of the table; needed where there are several elastic tables.

        Raises:
            BadInput: there is no such feature, or its ids are not elastic.
        """
        return elastic_ids(self, feature)

    def heat(self) -> HeatProfile:
        """The recent heat of rows: counts of cached rows, and an estimate of the others. Waits for the GPU.

        Returns:
            A profile by row, not by raw id (see `nn/heat_profile.py`).

        Raises:
            BadInput: there is no cache, or its policy is "lru", which does not count.
        """
        return heat_of(self.arena, self.trainer.states)

    def memory(self) -> MemoryUsage:
        """Bytes of rows, cache, id maps and optimizer state: `.total`, `.parts`, and `.ratio` to fp32 rows."""
        memory = self.arena.memory(self.trainer.states)
        if self.maps is not None:
            self.maps.count_bytes(memory, self)
        return memory

    def flush(self) -> None:
        """Round cached rows into the table and empty the cache: rows are then as a low-precision copy would serve them."""
        self.arena.flush()

    def read_table(self, table: int, ids: Tensor | None = None) -> Tensor:
        """Rows of one table, dequantized to fp32; all of them without ids."""
        if ids is not None:
            self._check_ids(table, ids)
        return self.arena.read(table, slice(None) if ids is None else ids.reshape(-1).long())

    def write_table(self, table: int, values_RD: Tensor, ids_N: Tensor | None = None) -> None:
        """Set rows of one table, all of them without ids, a block at a time."""
        spec, device = self.arena.tables[table], self.arena.device
        if device.type == "meta":
            return
        if ids_N is not None:
            self._check_ids(table, ids_N)
            ids_N = ids_N.reshape(-1)
        check_is_tensor(values_RD, "values", kind="floats")
        values_RD = values_RD.as_subclass(Tensor)  # `weight` of another module is a subclass
        count = spec.rows if ids_N is None else ids_N.numel()
        if tuple(values_RD.shape) != (count, spec.dim):
            message = f"values are {tuple(values_RD.shape)}; use {(count, spec.dim)}"
            raise BadInput(message, parameter="values", value=tuple(values_RD.shape), needed=(count, spec.dim))
        if self.maps is not None:
            self.maps.check_zeros(table, ids_N, values_RD)
        for first, last in blocks(count):
            rows_N = torch.arange(first, last, device=device) if ids_N is None else ids_N[first:last].to(device).long()
            self.arena.write(table, rows_N, values_RD[first:last].detach().to(device, torch.float32))

    def draw_rows(self, table: int, begin: int, end: int, draw: Callable[[Tensor], Tensor]) -> None:
        """Set rows `begin` to `end` of a table to random values, which `draw` fills in a block at a time."""
        device = self.arena.device
        for first, last in blocks(0 if device.type == "meta" else end - begin):
            values_ND = torch.empty(last - first, self.arena.tables[table].dim, device=device, dtype=torch.float32)
            self.arena.write(table, torch.arange(begin + first, begin + last, device=device), draw(values_ND))

    def _check_ids(self, table: int, ids: Tensor) -> None:
        rows, name = self.arena.tables[table].rows, self.arena.tables[table].name
        check_integers(ids)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
            message = f"table {name!r} has rows 0 to {rows - 1}; ids run from {int(ids.min())} to {int(ids.max())}"
            raise BadInput(message, parameter="ids", table=name, value=(int(ids.min()), int(ids.max())), available=rows)

    # -- nn.Module ----------------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        check_placeholder(name, value)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowsModule:
        if materialize(self, fn):  # to_empty, from the meta device
            return self
        check_keeps(fn, self.arena.device)
        if self.maps is not None:
            self.maps.check_device(fn(torch.empty(0, dtype=torch.float32, device=self.arena.device)).device)
        move = as_integers(fn)
        self.arena.unstage()  # staged rows are found by distances between arrays
        on_cpu, codes = self.arena.cache[-2:], self.arena.codes
        self.dtype = fn(torch.zeros(1, dtype=self.dtype, device=self.arena.device)).dtype
        for held in (self.arena, self.trainer, *([] if self.maps is None else [self.maps])):
            move_tensors(held, move)
        if self.rows.residency == "host" and self.arena.device.type == "cuda":
            self.arena.codes = codes if codes.is_pinned() else pin(codes.cpu(), self.arena.device)
        self.arena.cache[-2:] = on_cpu  # steps and home: the host reads them in every step
        self.trainer.placeholder.requires_grad_()
        self.placeholder.data = move(self.placeholder.data)
        if self.placeholder.pending is not None:
            move_tensors(self.placeholder.pending, move)
        return self

    def _arrays(self) -> dict[str, Tensor]:
        trainer = self.trainer
        self.arena.settle()
        states = {f"state{i}": state for i, state in enumerate(trainer.states)}
        parts = zip(Cache._fields, self.arena.cache, strict=False)
        cache = {f"cache_{name}": part for name, part in parts if part.numel() and name != "home"}
        rows = {"codes": self.arena.codes, "meta": self.arena.meta}
        keys = {} if self.maps is None else self.maps.tensors()
        return {**rows, **states, "hyper": trainer.hyper, "clock": trainer.clock, **cache, **keys}

    def weight_keys(self) -> Mapping[str, int]:
        """Names under which plain fp32 rows of a table are accepted."""
        return {"weight": 0}

    def _text(self) -> Tensor:
        return arena_text(self.arena)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in ({} if without_rows.get() else vars(self._state)).items():
            destination[prefix + name] = tensor

    @property
    def _state(self) -> SimpleNamespace:
        """The tensors of `state_dict` as attributes."""
        maps = maps_as_text(self.maps)
        texts = {"tables": self._text()} | ({} if maps is None else {"ids": maps})
        arrays = {name: tensor.detach().as_subclass(StoredArray) for name, tensor in self._arrays().items()}
        return SimpleNamespace(**arrays, **texts)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Where torch.distributed.checkpoint.state_dict, which takes keys for attributes, finds those of `state_dict`."""
        return dict.fromkeys(vars(self._state), "_state")

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        given = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        state = unpack(given, self._arrays(), self._text())
        load_state(self, state, prefix, (missing_keys, unexpected_keys) if strict else ([], []), error_msgs)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_torchscript("torch.jit.script")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fused": None, "_prefetched": PrefetchedBatches()}


_look_up_uncompiled = uncompiled(RowsModule.look_up)


def fused_optimizer(model: nn.Module) -> FusedOptimizer:
    """Make one optimizer for the rows of all thermocline modules of a model.

    Args:
        model: the model.

    Returns:
        An optimizer with one parameter group for each module, for schedulers, `zero_grad` and, with update="step", `step`.

    Raises:
        BadInput: the model has no thermocline module.

    Example::

        rows = thermocline.fused_optimizer(model)
        schedule = torch.optim.lr_scheduler.StepLR(rows, step_size=1000)
    """
    return FusedOptimizer(m.trained for m in model.modules() if isinstance(m, RowsModule))


def blocks(count: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))
