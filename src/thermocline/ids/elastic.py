"""Ids that come and go: `ElasticRows`, the rule of an `IdMap.elastic`, and `KeyTable`, the ids that have rows now.

    rows of a table     | rows that ids have to themselves, in buckets of 64 | shared rows |

`kernels/elastic/reference.py` defines how ids get and lose rows, `docs/decisions/elastic_ids.md` has the reasons. A key table
changes only in training steps; everything about it is in tensors, so that state dicts and checkpoints hold it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline.errors import BadInput
from thermocline.kernels.cpu.huge_pages import huge_page_zeros
from thermocline.kernels.dispatch import implementation_for
from thermocline.kernels.elastic import fields as K
from thermocline.kernels.elastic.fields import (
    ADMITTED,
    BARRIER,
    DROPPED,
    EVAL_LOOKUPS,
    EVAL_SHARED,
    EVICTED,
    EXPIRED,
    LOOKUPS,
    REFUSED,
    SHARED,
    STEPS,
    WAITING,
    WINDOW,
    KeyArrays,
    KeyRules,
    TableRows,
)
from thermocline.kernels.elastic.reference import as_bytes, bucket_of, first_values, tags_of
from thermocline.kernels.ids.reference import hash_ids, reduce_to, signed

from .elastic_rows import MOST_STEPS, ElasticRows
from .growth import PlaceOrder, opened
from .moved_ids import Moved, MovedIds

_MOVES = 256  # records of moved rows that are merged into one
_SWEEPS = 8  # in a time to live: expired rows leave at the next
_MARKS = 2 * _SWEEPS  # times of the log in `max_age`
_SHARED_KEY = 0x5EED_54A4ED  # of the first values of shared rows
_COUNTS = (
    "admitted", "evicted", "expired", "refused", "dropped", "lookups", "shared_lookups", "eval_lookups", "shared_eval_lookups",
    "waiting", "steps",
)  # fmt: skip


Evicted = Callable[[Tensor, Tensor], None]  # gets ids and the values of their rows


_NONE = Moved.none()


class KeyTable:
    """The ids that have rows of an elastic table, and their heat. Rows count from the first row of the map.

    With `buckets` it is the part of one rank: those buckets, for ids of which it is asked alone.
    """

    def __init__(
        self, policy: ElasticRows, key: int, device: torch.device | str = "cpu", buckets: range | None = None
    ) -> None:  # fmt: skip
        self.policy, self.buckets = policy, range(-(-policy.own // K.BUCKET)) if buckets is None else buckets
        rules = (policy.own, policy.others, signed(key), policy.half_life, policy.evict == "lru")
        self.places = PlaceOrder(policy.own // K.BUCKET if policy.grows else 0)
        self.rules = KeyRules(*rules, first=K.BUCKET * self.buckets.start)
        self.on_evict: Evicted | None = None
        self.moved: list[Tensor] | None = None  # rows whose id changed since they were published
        self.gpu_steps = 0  # of this process
        words, rows = K.BUCKET // 4, max(0, min(policy.own, K.BUCKET * self.buckets.stop) - self.rules.first)
        zeros = huge_page_zeros if torch.device(device).type == "cpu" else partial(torch.zeros, device=device)
        self.keys, self.last = zeros(rows, dtype=torch.int64), zeros(rows, dtype=torch.int32)
        self.tags, self.heat = (zeros(words * len(self.buckets), dtype=torch.int32) for _ in range(2))
        self.sketch = zeros(K.DEPTH * K.CELLS // 4 * len(self.buckets), dtype=torch.int32)
        self.counts = torch.zeros(WINDOW + 1, dtype=torch.int64, device=device)
        unset = [[-math.inf] * (_MARKS + 2), [0.0] * (_MARKS + 2)]  # times of marks, the newest first, and their steps
        self.clock = None if policy.max_age is None else np.array(unset)  # on the CPU: steps on a GPU do not wait for it
        self.open = torch.tensor([policy.open], dtype=torch.int64, device=device)  # places of each bucket that ids may have

    @property
    def arrays(self) -> KeyArrays:
        return KeyArrays(self.keys, self.last, self.tags, self.heat, self.sketch)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by name."""
        clock = {} if self.clock is None else {"clock": torch.from_numpy(self.clock).view(-1)}
        return {**self.arrays._asdict(), "counts": self.counts, **clock, **({"open": self.open} if self.policy.grows else {})}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"on_evict": None, "moved": None}  # they belong to the process

    @property
    def kernels(self) -> Any:
        return implementation_for("elastic", self.keys)

    def state(self) -> dict[str, float]:
        """Numbers of the table; `ElasticIds.state` documents them."""
        used, rows, open = self.occupied().numel(), self.keys.numel(), int(self.open)
        last = rows % K.BUCKET
        here = rows // K.BUCKET * open + min(last, open)
        sizes = {"rows": here, "most_rows": rows, "used": used, "pinned": int((self.last == K.PINNED).sum())}
        return {**sizes, "load": used / max(1, here), **dict(zip(_COUNTS, self.counts.tolist(), strict=False))}

    def occupied(self) -> Tensor:
        """The places in `keys` that belong to ids, ascending."""
        return (as_bytes(self.tags)[: self.keys.numel()] != 0).nonzero()[:, 0]

    @property
    def on_gpu(self) -> bool:
        """Whether lookups are those of `gpu_keys.py`, in place of `step` and `read`."""
        return self.keys.is_cuda

    def find(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """(the row of each id, its own or a shared one; positions of ids that have none)."""
        place_N, missed_M = self._find(ids_N)
        return self.places.rows(place_N), missed_M

    def _find(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """(the place of each id, or a shared row; positions of ids that have none)."""
        place_N, missed_M = self.kernels.find(self.arrays, self.rules, ids_N)
        return place_N, missed_M

    @property
    def _open_rules(self) -> KeyRules:
        return self.rules._replace(open=int(self.open))

    def read(self, ids_N: Tensor, trains: bool) -> Tensor:
        """`find` outside of training steps; if gradients may follow, rows stay until no lookup waits for its backward."""
        (rows_N, missed_M), counts = self.find(ids_N), self.counts.numpy()
        counts[EVAL_LOOKUPS] += ids_N.numel()
        counts[EVAL_SHARED] += missed_M.numel()
        if trains:
            self.keep_rows()
        return rows_N

    def keep_rows(self) -> None:
        """Give no row away until a step finds that no lookup waits for its backward."""
        self.counts[BARRIER] = 0

    def step(self, ids_N: Tensor, protect: bool) -> tuple[Tensor, Moved]:
        """Look up a batch in training: (the row of each id, the ids that came and went).

        With `protect`, rows that were used since the last step without it stay: gradients for them may still come.
        """
        self.check_clock()
        self.rebase()
        counts = self.counts.numpy()
        counts[STEPS] += 1
        step = int(counts[STEPS])
        if not protect:
            counts[BARRIER] = step
        expired_E = self.expire(step, int(counts[BARRIER]))
        place_N, missed_M = self.kernels.look_up(self.arrays, self.rules, ids_N, step)
        moved = Moved.none()._replace(went_E=self.keys[expired_E - self.rules.first], left_E=expired_E)
        counts[LOOKUPS] += ids_N.numel()
        counts[WAITING] = 0
        if missed_M.numel():
            moved = self._admit(ids_N, place_N, missed_M, moved)
        counts[EVICTED] += moved.went_E.numel()
        counts[EXPIRED] += expired_E.numel()
        self.grow()
        return self.places.rows(place_N), self._noted(moved)

    def check_clock(self) -> None:
        """Raise if time has not begun."""
        if self.clock is not None and self.clock[0, 0] == -math.inf:
            message = "max_age needs the time of the log; call elastic().advance(now) before the first training step"
            raise BadInput(message, parameter="max_age", value=self.policy.max_age)

    def _noted(self, moved: Moved) -> Moved:
        """What moved, with rows for places; recorded for the next publish."""
        moved = moved._replace(rows_K=self.places.rows(moved.rows_K), left_E=self.places.rows(moved.left_E))
        self.note_moved(moved.rows_K, moved.left_E)
        return moved

    @property
    def used(self) -> int:
        """Ids with a row, of all ranks."""
        came, *went = (int(self.counts[field]) for field in (ADMITTED, EVICTED, DROPPED))
        return came - sum(went)

    def grow(self) -> None:
        """Open more rows once ids have three quarters of the open ones. Every training step ends with it."""
        if self.policy.grows:
            self.open.clamp_(min=opened(self.used, self.policy.own))

    def _admit(self, ids_N: Tensor, place_N: Tensor, missed_M: Tensor, expired: Moved) -> Moved:
        """Count lookups of ids without a row, and give rows to those with enough."""
        counts, policy = self.counts.numpy(), self.policy
        rule = (policy.admit_after, policy.admit_chance, int(counts[STEPS]), int(counts[BARRIER]))
        found = self.kernels.admit(self.arrays, self._open_rules, ids_N, place_N, missed_M, *rule)
        self._age_sketch(missed_M.numel())
        came = found.came_K.numel()
        counts[ADMITTED] += came
        counts[REFUSED] += found.ready - came
        counts[WAITING] = found.distinct - came
        counts[SHARED] += found.shared
        if expired.went_E.numel():
            went_E, left_E = (torch.cat(each) for each in ((expired.went_E, found.went_E), (expired.left_E, found.left_E)))
            return Moved(found.came_K, found.rows_K, went_E, left_E)
        return Moved(*found[:4])

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
        age = self.policy.max_age
        assert age is not None
        if now < clock[0, 0] + age / _MARKS:
            return _NONE
        clock[:] = np.roll(clock, 1, axis=1)
        clock[:, 0] = now, int(self.counts[STEPS])
        steps = clock[1, clock[0] <= now - age]
        went_E, places_E = (
            self._free(min(int(steps.max()) + 1, int(self.counts[BARRIER]))) if steps.size else (_NONE.went_E, _NONE.left_E)
        )
        self.counts[EXPIRED] += places_E.numel()
        self.counts[EVICTED] += places_E.numel()
        return self._noted(_NONE._replace(went_E=went_E, left_E=places_E))

    def pin(self, ids: Tensor) -> Moved:
        """Give ids a row, if they have none, and keep it for good."""
        counts, ids_U = self.counts.numpy(), ids.reshape(-1).long().unique()
        ids_C = ids_U[self._find(ids_U)[1]]
        before = [tensor.clone() for tensor in self.arrays]
        step, barrier = (max(1, int(counts[field])) for field in (STEPS, BARRIER))  # at 0, ids would take each other's rows
        heat_C = torch.full_like(ids_C, K.MOST)
        rows_C, before_C, left_C = self.kernels.place(self.arrays, self._open_rules, ids_C, heat_C, step, barrier)
        if failed := int((rows_C < 0).sum()):
            for tensor, old in zip(self.arrays, before, strict=True):
                tensor.copy_(old)
            message = f"{failed} of {ids_C.numel()} ids find only pinned rows, or rows in use, in their bucket; pin fewer ids"
            raise BadInput(message, parameter="ids", value=ids_C.numel(), needed=failed)
        self.last[self._find(ids_U)[0] - self.rules.first] = K.PINNED
        counts[ADMITTED] += ids_C.numel()
        counts[EVICTED] += int(left_C.sum())
        return self._noted(Moved(ids_C, rows_C, before_C[left_C], rows_C[left_C]))

    def unpin(self, ids: Tensor) -> None:
        """Let pinned ids go again, as if they were looked up now."""
        rows_U = self._find(ids.reshape(-1).long())[0].unique()
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

    @property
    def sweep(self) -> int:
        """Steps after which expired rows are freed."""
        return max(1, (self.policy.ttl or 0) // _SWEEPS)

    def expire(self, step: int, barrier: int) -> Tensor:
        """Free the rows that were not used for more than `ttl` steps, eight times in `ttl`; returns them."""
        ttl = self.policy.ttl
        if ttl is None or step % self.sweep:
            return _NONE.left_E
        return self._free(min(step - ttl, barrier))[1]

    def _free(self, before: int) -> tuple[Tensor, Tensor]:
        """Free the rows that were last used before a step: (their ids, the rows)."""
        tags = as_bytes(self.tags)[: self.keys.numel()]
        places_E = ((self.last != K.PINNED) & (self.last < before) & (tags != 0)).nonzero()[:, 0]
        tags[places_E] = 0
        return self.keys[places_E], places_E + self.rules.first

    def rebase(self) -> None:
        """Subtract whole half-lives from all steps before they pass 31 bits."""
        steps, half_life = int(self.counts[STEPS]), self.policy.half_life
        if steps < MOST_STEPS:
            return
        base = steps // 2 // half_life * half_life
        self.last.copy_(torch.where(self.last == K.PINNED, self.last, (self.last - base).clamp(min=0)))
        for field in (STEPS, BARRIER):
            self.counts[field] = max(0, int(self.counts[field]) - base)
        if self.clock is not None:
            self.clock[1] -= base

    def note_moved(self, *rows: Tensor) -> None:
        """Record that these rows have other ids now, for the next publish."""
        if self.moved is not None and any(each.numel() for each in rows):
            self.moved += [each.to(self.keys.device) for each in rows]
            if len(self.moved) > _MOVES:
                self.moved = [torch.cat(self.moved).unique()]

    def take_moved(self) -> MovedIds:
        """The ids of the recorded rows, and forget that they were recorded."""
        rows_K, self.moved = torch.cat([self.keys[:0], *(self.moved or ())]).unique(), []
        return MovedIds(*(each.cpu() for each in self.read_rows(rows_K)))

    def read_rows(self, rows_K: Tensor) -> MovedIds:
        """The ids of rows."""
        here_K = self.places.of(rows_K) - self.rules.first
        return MovedIds(rows_K, self.keys[here_K], as_bytes(self.tags)[here_K] != 0)

    def put(self, moved: MovedIds) -> None:
        """Give rows to ids as another table did, without counts."""
        here_K, tags_K = self.places.of(moved.rows_K) - self.rules.first, tags_of(hash_ids(moved.ids_K, self.rules.key))
        self.keys[here_K] = moved.ids_K
        as_bytes(self.tags)[here_K] = torch.where(moved.used_K, tags_K, 0)

    def fits(self, moved: MovedIds) -> bool:
        """Whether rows are rows of ids, and each id lies in its bucket."""
        bucket_K = bucket_of(hash_ids(moved.ids_K, self.rules.key), self.rules.rows)
        right_K = ~moved.used_K | (bucket_K == self.places.of(moved.rows_K) // K.BUCKET)
        return bool((right_K & (moved.rows_K >= 0) & (moved.rows_K < self.rules.rows)).all())

    def shared_rows(self, ids_N: Tensor) -> Tensor:
        """The rows that ids without their own read."""
        return self.rules.rows + reduce_to(hash_ids(ids_N, self.rules.key), self.rules.shared)

    def begin_rows(self, table: TableRows, ids_K: Tensor, rows_K: Tensor) -> None:
        """Begin rows of a table, which new ids have now: first values, no optimizer state, and outside of the cache."""
        self.kernels.begin_rows(table, ids_K, rows_K, self.rules.key, self.policy.bound)

    def shared_values(self, dim: int) -> Tensor:
        """Values with which shared rows begin."""
        if not self.policy.shared:
            return torch.zeros(self.policy.others, dim, dtype=torch.float32, device=self.keys.device)
        shared_S = torch.arange(self.policy.shared)
        return first_values(shared_S, self.rules.key ^ _SHARED_KEY, dim, self.policy.bound).to(self.keys.device)
