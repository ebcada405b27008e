"""Ids that come and go: `ElasticRows`, the rule of an `IdMap.elastic`, and `KeyTable`, the ids that have rows now.

    rows of a table     | rows that ids have to themselves, in buckets of 64 | shared rows |

`kernels/elastic/reference.py` defines how ids get and lose rows, `docs/decisions/elastic_ids.md` has the reasons. A key table
changes only in training steps; everything about it is in tensors, so that state dicts and checkpoints hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.elastic import fields as K
from thermocline.kernels.elastic.fields import KeyArrays, KeyRules
from thermocline.kernels.elastic.reference import as_bytes, bucket_of, placing_order, score
from thermocline.kernels.ids.reference import hash_ids, right, signed

EVICTIONS = ("lfu", "lru")
_SWEEPS = 8  # in a time to live: expired rows leave at the next
_MARKS = 2 * _SWEEPS  # times of the log in `max_age`
_MOST_STEPS = 1 << 30
_SHARED_KEY = 0x5EED_54A4ED  # of the first values of shared rows
_CHANCE_KEY = 0x5EED_C4A9CE
_COUNTS = (
    "admitted", "evicted", "expired", "refused", "dropped", "lookups", "shared_lookups", "eval_lookups", "shared_eval_lookups",
    "waiting", "steps",
)  # fmt: skip
(
    ADMITTED, EVICTED, EXPIRED, REFUSED, DROPPED, LOOKUPS, SHARED, EVAL_LOOKUPS, EVAL_SHARED, WAITING, STEPS,
    BARRIER, WINDOW,
) = range(13)  # fmt: skip


@dataclass(frozen=True)
class ElasticRows:
    """How ids share and leave the rows of a table; `IdMap.elastic` documents the fields."""

    rows: int
    admit_after: int = 1
    shared: int = 16
    evict: str = "lfu"
    half_life: int = 100
    ttl: int | None = None
    salt: int = 0
    init: float | None = None
    admit_chance: float = 1.0
    max_age: float | None = None

    def __post_init__(self) -> None:
        for name, low, high in (("shared", 0, 1 << 20), ("admit_after", 1, K.MOST), ("half_life", 1, _MOST_STEPS)):
            _check_int(name, getattr(self, name), low, high)
        _check_int("rows", self.rows, self.others + 1, 1 << 31, f": {self.others} shared rows, and one for each id")
        if self.ttl is not None:
            _check_int("ttl", self.ttl, 1, _MOST_STEPS, ", training steps")
        if self.evict not in EVICTIONS:
            raise BadInput(f"evict is {self.evict!r}; use one of {', '.join(EVICTIONS)}", parameter="evict", value=self.evict)
        if not isinstance(self.salt, Integral):
            raise BadInput(f"salt is {self.salt!r}; use an int", parameter="salt", value=self.salt)
        if self.init is not None and not (isinstance(self.init, Real) and 0 <= float(self.init) < float("inf")):
            raise BadInput(f"init is {self.init!r}; use the bound of uniform first values", parameter="init", value=self.init)
        _check_number("admit_chance", self.admit_chance, 1.0, "the chance of a lookup to give its id a row, above 0 to 1")
        if self.max_age is not None:
            _check_number("max_age", self.max_age, math.inf, "a time, in the unit of elastic().advance(now)")
        for name in ("rows", "admit_after", "shared", "half_life"):
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "salt", int(self.salt) & ((1 << 64) - 1))
        object.__setattr__(self, "ttl", None if self.ttl is None else int(self.ttl))
        object.__setattr__(self, "init", None if self.init is None else float(self.init))

    @property
    def own(self) -> int:
        """Rows that ids have to themselves."""
        return self.rows - self.others

    @property
    def others(self) -> int:
        """Rows that all other ids read: shared ones, or one of zeros."""
        return max(1, self.shared)

    @property
    def bound(self) -> float:
        """Bound of the first values of rows."""
        return self.own**-0.5 if self.init is None else self.init


def _check_int(name: str, value: object, low: int, high: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise BadInput(f"{name} is {value!r}; use an int from {low} to {high}{why}", parameter=name, value=value, needed=low)


def _check_number(name: str, value: object, most: float, use: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= most or math.isinf(float(value)):
        raise BadInput(f"{name} is {value!r}; use {use}", parameter=name, value=value)


Evicted = Callable[[Tensor, Tensor], None]  # gets ids and the values of their rows


class Moved(NamedTuple):
    """The ids that came and went in a training step."""

    came_K: Tensor
    rows_K: Tensor  # of the ids that came
    went_E: Tensor
    left_E: Tensor  # rows of the ids that went


_NONE = Moved(*(torch.zeros(0, dtype=torch.int64) for _ in range(4)))


class KeyTable:
    """The ids that have rows of an elastic table, and their heat. Rows count from the first row of the map.

    With `buckets` it is the part of one rank: those buckets, for ids of which it is asked alone.
    """

    def __init__(
        self, policy: ElasticRows, key: int, device: torch.device | str = "cpu", buckets: range | None = None
    ) -> None:  # fmt: skip
        self.policy, self.buckets = policy, range(-(-policy.own // K.BUCKET)) if buckets is None else buckets
        rules = (policy.own, policy.others, signed(key), policy.half_life, policy.evict == "lru")
        self.rules = KeyRules(*rules, first=K.BUCKET * self.buckets.start)
        self.on_evict: Evicted | None = None
        if policy.admit_chance < 1.0 and torch.device(device).type == "cuda":
            message = f"admit_chance is {policy.admit_chance}, which GPUs do not have yet; use admit_after"
            raise BadInput(message, parameter="admit_chance", value=policy.admit_chance)
        words, rows = K.BUCKET // 4, max(0, min(policy.own, K.BUCKET * self.buckets.stop) - self.rules.first)
        self.keys = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tags, self.heat = (torch.zeros(words * len(self.buckets), dtype=torch.int32, device=device) for _ in range(2))
        self.sketch = torch.zeros(K.DEPTH * K.CELLS // 4 * len(self.buckets), dtype=torch.int32, device=device)
        self.counts = torch.zeros(WINDOW + 1, dtype=torch.int64, device=device)
        unset = [-math.inf] * (_MARKS + 2) + [0.0] * (_MARKS + 2)  # times of marks, the newest first, and their steps
        self.clock = None if policy.max_age is None else torch.tensor(unset, dtype=torch.float64)

    @property
    def arrays(self) -> KeyArrays:
        return KeyArrays(self.keys, self.last, self.tags, self.heat, self.sketch)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name."""
        clock = {} if self.clock is None else {"clock": self.clock}
        return {**self.arrays._asdict(), "counts": self.counts, **clock}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"on_evict": None}  # it belongs to the process

    @property
    def _kernels(self) -> Any:
        return implementation_for("elastic", self.keys)

    def state(self) -> dict[str, float]:
        """Numbers of the table; `ElasticIds.state` documents them."""
        used = self.occupied().numel()
        sizes = {"rows": self.keys.numel(), "used": used, "pinned": int((self.last == K.PINNED).sum())}
        return {**sizes, "load": used / max(1, self.keys.numel()), **dict(zip(_COUNTS, self.counts.tolist(), strict=False))}

    def occupied(self) -> Tensor:
        """The places in `keys` that belong to ids, ascending."""
        return (as_bytes(self.tags)[: self.keys.numel()] != 0).nonzero()[:, 0]

    def find(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """(the row of each id, its own or a shared one; positions of ids that have none)."""
        rows_N, missed_M = self._kernels.find(self.arrays, self.rules, ids_N)
        return rows_N, missed_M

    def read(self, ids_N: Tensor, trains: bool) -> Tensor:
        """`find` outside of training steps; if gradients may follow, rows stay until no lookup waits for its backward."""
        (rows_N, missed_M), counts = self.find(ids_N), self.counts.numpy()
        counts[EVAL_LOOKUPS] += ids_N.numel()
        counts[EVAL_SHARED] += missed_M.numel()
        if trains:
            counts[BARRIER] = 0
        return rows_N

    def step(self, ids_N: Tensor, protect: bool) -> tuple[Tensor, Moved]:
        """Look up a batch in training: (the row of each id, the ids that came and went).

        With `protect`, rows that were used since the last step without it stay: gradients for them may still come.
        """
        if self.clock is not None and self.clock[0] == -math.inf:
            message = "max_age needs the time of the log; call elastic().advance(now) before the first training step"
            raise BadInput(message, parameter="max_age", value=self.policy.max_age)
        self._rebase()
        counts = self.counts.numpy()
        counts[STEPS] += 1
        step = int(counts[STEPS])
        if not protect:
            counts[BARRIER] = step
        expired_E = self._expire(step)
        rows_N, missed_M = self.find(ids_N)
        self._kernels.touch(self.arrays, self.rules, rows_N, step)
        moved = self._admit(ids_N[missed_M], expired_E) if missed_M.numel() + expired_E.numel() else _NONE
        shared = missed_M.numel()
        if moved.came_K.numel():
            rows_N[missed_M], left_M = self.find(ids_N[missed_M])
            shared = left_M.numel()
        counts[LOOKUPS] += ids_N.numel()
        counts[SHARED] += shared
        if not missed_M.numel():
            counts[WAITING] = 0
        return rows_N, moved

    def _admit(self, ids_M: Tensor, expired_E: Tensor) -> Moved:
        """Count lookups of ids without a row, and give rows to those with enough."""
        counts, (arrays, rules, kernels) = self.counts.numpy(), (self.arrays, self.rules, self._kernels)
        ids_U, counts_U = ids_M.unique(return_counts=True)
        heat_U = kernels.count(arrays, rules, ids_U, counts_U)
        self._age_sketch(ids_M.numel())
        ready_U = (heat_U >= self.policy.admit_after) & self._drawn(ids_U, counts_U)
        ids_C = ids_U[ready_U]
        went_E = self.keys[expired_E - rules.first]
        rows_C, before_C, left_C = kernels.place(
            arrays, rules, ids_C, heat_U[ready_U], int(counts[STEPS]), int(counts[BARRIER])
        )
        placed_C = rows_C >= 0
        moved = Moved(
            ids_C[placed_C], rows_C[placed_C], torch.cat([went_E, before_C[left_C]]), torch.cat([expired_E, rows_C[left_C]])
        )
        counts[ADMITTED] += moved.came_K.numel()
        counts[EVICTED] += moved.went_E.numel()
        counts[EXPIRED] += expired_E.numel()
        counts[REFUSED] += ids_C.numel() - moved.came_K.numel()
        counts[WAITING] = ids_U.numel() - moved.came_K.numel()
        return moved

    def _drawn(self, ids_U: Tensor, counts_U: Tensor) -> Tensor:
        """Which ids the chance of their lookups in this step admits: a function of id, step and salt."""
        if self.policy.admit_chance == 1.0:
            return torch.ones_like(ids_U, dtype=torch.bool)
        missed = [(1.0 - self.policy.admit_chance) ** n for n in range(K.MOST + 1)]  # no id admitted by n lookups
        least_N = torch.tensor([int(each * (1 << 32)) for each in missed], device=ids_U.device)
        draws_U = right(hash_ids(hash_ids(ids_U, self.rules.key), signed(int(self.counts[STEPS]) ^ _CHANCE_KEY)), 32)
        return draws_U >= least_N[counts_U.clamp(max=K.MOST)]

    def advance(self, now: float) -> Moved:
        """Set the time of the log, and free the rows whose ids were not looked up for `max_age` of it.

        A mark is a time and the step that it had, 16 in `max_age`; so rows need no times of their own.
        """
        clock = self.clock
        if clock is None:
            message = "this table has no time to live in the log's own time; make it with IdMap.elastic(..., max_age=...)"
            raise BadInput(message, parameter="max_age")
        if not math.isfinite(now):
            raise BadInput(f"now is {now!r}; use the time of the log, as in elastic().advance(1700000000.0)", parameter="now")
        age, clock = self.policy.max_age, clock.view(2, -1)
        assert age is not None
        if now < float(clock[0, 0]) + age / _MARKS:
            return _NONE
        clock.copy_(clock.roll(1, dims=1))
        clock[:, 0] = torch.tensor([float(now), float(self.counts[STEPS])])
        steps = clock[1, clock[0] <= now - age]
        went_E, places_E = self._free(int(steps.max()) + 1) if steps.numel() else (_NONE.went_E, _NONE.left_E)
        self.counts[EXPIRED] += places_E.numel()
        self.counts[EVICTED] += places_E.numel()
        return _NONE._replace(went_E=went_E, left_E=places_E)

    def pin(self, ids: Tensor) -> Moved:
        """Give ids a row, if they have none, and keep it for good."""
        counts, ids_U = self.counts.numpy(), ids.reshape(-1).long().unique()
        ids_C = ids_U[self.find(ids_U)[1]]
        before = [tensor.clone() for tensor in self.arrays]
        rows_C, before_C, left_C = self._kernels.place(
            self.arrays, self.rules, ids_C, torch.full_like(ids_C, K.MOST), int(counts[STEPS]), max(1, int(counts[BARRIER]))
        )
        if failed := int((rows_C < 0).sum()):
            for tensor, old in zip(self.arrays, before, strict=True):
                tensor.copy_(old)
            message = f"{failed} of {ids_C.numel()} ids find only pinned rows, or rows in use, in their bucket; pin fewer ids"
            raise BadInput(message, parameter="ids", value=ids_C.numel(), needed=failed)
        self.last[self.find(ids_U)[0] - self.rules.first] = K.PINNED
        counts[ADMITTED] += ids_C.numel()
        counts[EVICTED] += int(left_C.sum())
        return Moved(ids_C, rows_C, before_C[left_C], rows_C[left_C])

    def unpin(self, ids: Tensor) -> None:
        """Let pinned ids go again, as if they were looked up now."""
        rows_U = self.find(ids.reshape(-1).long())[0].unique()
        rows_U = rows_U[rows_U < self.rules.rows] - self.rules.first
        self.last[rows_U[self.last[rows_U] == K.PINNED]] = int(self.counts[STEPS])

    def _age_sketch(self, lookups: int) -> None:
        """Halve the counters of the sketch after every `width` lookups that it counted."""
        counts = self.counts.numpy()
        counts[WINDOW] += lookups
        halvings, counts[WINDOW] = divmod(int(counts[WINDOW]), self.rules.width)
        if halvings:
            cells = as_bytes(self.sketch)
            cells.copy_((cells.int() >> min(halvings, 8)).byte())

    def _expire(self, step: int) -> Tensor:
        """Free the rows that were not used for more than `ttl` steps, eight times in `ttl`; returns them."""
        ttl = self.policy.ttl
        if ttl is None or step % max(1, ttl // _SWEEPS):
            return _NONE.left_E
        return self._free(step - ttl)[1]

    def _free(self, step: int) -> tuple[Tensor, Tensor]:
        """Free the rows that were last used before a step and are not in use: (their ids, the rows)."""
        old = (
            (self.last != K.PINNED)
            & (self.last < min(step, int(self.counts[BARRIER])))
            & (as_bytes(self.tags)[: self.keys.numel()] != 0)
        )
        places_E = old.nonzero()[:, 0]
        as_bytes(self.tags)[places_E] = 0
        return self.keys[places_E], places_E + self.rules.first

    def _rebase(self) -> None:
        """Subtract whole half-lives from all steps before they pass 31 bits."""
        counts, half_life = self.counts.numpy(), self.policy.half_life
        if counts[STEPS] < _MOST_STEPS:
            return
        base = int(counts[STEPS]) // 2 // half_life * half_life
        self.last.copy_(torch.where(self.last == K.PINNED, self.last, (self.last - base).clamp(min=0)))
        for field in (STEPS, BARRIER):
            counts[field] = max(0, int(counts[field]) - base)
        if self.clock is not None:
            self.clock.view(2, -1)[1] -= base

    def take_over(self, saved: KeyTable) -> Tensor:
        """Become a saved table of another size: the new row of each of its rows, shared ones included, or -1 if dropped.

        Where a bucket has fewer rows than ids, the coldest are dropped. Ids that wait for a row are counted anew.
        """
        own, rows_K = self.rules.rows, saved.occupied()
        ids_K, last_K = saved.keys[rows_K], saved.last[rows_K]
        hashes_K = hash_ids(ids_K, self.rules.key)
        heat_K = score(saved.arrays, saved.rules, rows_K, int(saved.counts[STEPS]))
        heat_K = last_K.long() if self.rules.lru else heat_K
        order_K = placing_order(hashes_K, torch.where(last_K == K.PINNED, 1 << 40, heat_K), own)
        bucket_K = bucket_of(hashes_K[order_K], own)
        begins_K = torch.searchsorted(bucket_K, bucket_K)
        place_K = K.BUCKET * bucket_K + torch.arange(rows_K.numel()) - begins_K
        fits_K = (place_K < K.BUCKET * (bucket_K + 1)) & (place_K < own)
        kept_K, place_K = order_K[fits_K], place_K[fits_K]
        remap = torch.full((saved.policy.rows,), -1)
        remap[rows_K[kept_K]] = place_K
        remap[saved.rules.rows :] = own + torch.arange(saved.policy.others)
        for tensor in self.arrays:
            tensor.zero_()
        self.keys[place_K], self.last[place_K] = ids_K[kept_K], last_K[kept_K]
        as_bytes(self.tags)[place_K] = (hashes_K[kept_K] & 255).clamp(min=1).byte()
        as_bytes(self.heat)[place_K] = as_bytes(saved.heat)[rows_K[kept_K]]
        self.counts.copy_(saved.counts)
        self.counts[DROPPED] += rows_K.numel() - kept_K.numel()
        self.counts[WINDOW] = 0
        if self.clock is not None and saved.clock is not None:
            self.clock.copy_(saved.clock)
        return remap

    def first_values(self, ids_K: Tensor, dim: int) -> Tensor:
        """Values with which the rows of ids begin."""
        return self._values(ids_K, self.rules.key, dim)

    def shared_values(self, dim: int) -> Tensor:
        """Values with which shared rows begin."""
        values_SD = self._values(torch.arange(self.policy.others), self.rules.key ^ _SHARED_KEY, dim)
        return values_SD if self.policy.shared else values_SD.zero_()

    def _values(self, ids_K: Tensor, key: int, dim: int) -> Tensor:
        values_KD: Tensor = self._kernels.first_values(ids_K, key, dim, self.policy.bound)
        return values_KD


def refuse_elastic(where: str, way: str, **fields: object) -> NoReturn:
    """Raise for a combination that elastic ids do not have yet."""
    raise BadInput(f"elastic ids do not work {where} yet; {way}, or use IdMap.hashed", parameter="ids", **fields)


def refuse_export(elastic: bool) -> None:
    """Raise for state dicts of other libraries, which would have rows without their ids."""
    if elastic:
        refuse_elastic("in state dicts of other libraries", "save a checkpoint")
