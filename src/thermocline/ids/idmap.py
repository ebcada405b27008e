"""`IdMap`: the map from a raw 64-bit id to a row, compared by content and stored as JSON and arrays.

    IdMap.identity(1000)                  ids 0 to 999 are rows; other ids are errors
    IdMap.hashed(1000, salt=7)            any id; ids may share a row
    IdMap.pruned(kept, fallback=4)        any id; kept ids have rows of their own, others share the 4 rows after them
    IdMap.hashed(1000).prune(kept)        hashed first; some of the 1000 numbers are kept
    IdMap.elastic(1000)                   any id; ids come and go: a module gives rows to the ids that it trains (`elastic.py`)
    ... .offset(500)                      any of these, from row 500 of a shared table

One kernel evaluates every map in three optional steps:

    1. start    RowRange(rows) refuses other ids, SaltedHash(rows, salt) hashes; ElasticRows hashes to its shared rows
    2. kept     kept ids become their rank, others kept.count + hash
    3. first    is added

Arithmetic (version 1; modulo 2^64 and unsigned; golden vectors in `docs/ids.md`):

    mix(z)      z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    key         mix(salt + 0x9E3779B97F4A7C15): the first output of SplitMix64 seeded with the salt
    hash        mix((id ^ key) * 0x9E3779B97F4A7C15)
    row         (hash * rows) >> 64, in 128 bits

A negative id is its two's complement; a 32-bit id is sign-extended. Rejected: a remainder in the last line (a division per id,
and low bits decide); a seed added to the id (features with nearby salts would collide alike).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput, FormatError
from thermocline.kernels.ids.fields import GOLDEN, MIX1, MIX2, VERSION

from .elastic_rows import ElasticRows
from .kept_ids import KeptIds

MOST_ROWS = 1 << 40
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class RowRange:
    """Ids that are rows already."""

    rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _check_rows("an identity map has", self.rows))


@dataclass(frozen=True)
class SaltedHash:
    """A salted hash to `rows` rows."""

    rows: int
    salt: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _check_rows("ids are hashed to", self.rows))
        if not isinstance(self.salt, Integral):
            raise BadInput(f"salt is {self.salt!r}; use an int", parameter="salt", value=self.salt)
        object.__setattr__(self, "salt", int(self.salt) & _WORD)

    @property
    def key(self) -> int:
        """The key that ids are mixed with."""
        z = (self.salt + GOLDEN) & _WORD
        z = ((z ^ (z >> 30)) * MIX1) & _WORD
        z = ((z ^ (z >> 27)) * MIX2) & _WORD
        return z ^ (z >> 31)


@dataclass(frozen=True)
class IdMap:
    """A map from raw ids to rows. Make one with `identity`, `hashed`, `pruned` or `elastic`; compose with `prune` and `offset`.

    Attributes:
        start: first step: a range of rows, a salted hash, or the rule of elastic rows; None with `kept` ids only.
        kept: ids, or rows of the first step, that keep a row of their own; None for all.
        others: the rows of ids that are not kept; None if all ids are kept.
        first: offset that is added to the row.

    Raises:
        BadInput: a number of rows, a salt or the kept ids have a wrong type or value; `error.parameter` names it.

    Example::

        ids = IdMap.pruned([7, 42, 1 << 40], fallback=4)
        rows = ids(torch.tensor([42, 99]))  # row 1, and one of the shared rows 3 to 6
    """

    start: RowRange | SaltedHash | ElasticRows | None = None
    kept: KeptIds | None = None
    others: SaltedHash | None = None
    first: int = 0

    def __post_init__(self) -> None:
        assert (self.kept is None) == (self.others is None)
        assert self.start is not None or self.kept is not None
        _check_rows("a map ends at", self.rows)

    @classmethod
    def identity(cls, rows: int) -> IdMap:
        """Ids are rows; others than 0 to rows - 1 raise `IdOutOfRange`."""
        return cls(RowRange(rows))

    @classmethod
    def hashed(cls, rows: int, salt: int = 0) -> IdMap:
        """Hash any id to one of `rows` rows, which ids may share."""
        return cls(SaltedHash(rows, salt))

    @classmethod
    def pruned(cls, kept: KeptIds | Tensor | NDArray[Any] | Iterable[int], fallback: int = 1, salt: int = 0) -> IdMap:
        """Give each kept id its own row, and all others `fallback` shared rows.

        Args:
            kept: ids with a row of their own; rows are in rising order of the ids.
            fallback: rows after those of the kept ids, which all other ids share by hash.
            salt: seed of the hash.
        """
        return cls(None, kept if isinstance(kept, KeptIds) else KeptIds.of(kept), SaltedHash(fallback, salt))

    @classmethod
    def elastic(
        cls, rows: int, *, admit_after: int = 1, shared: int = 16, evict: str = "lfu", half_life: int = 100,
        ttl: int | None = None, salt: int = 0, init: float | None = None, admit_chance: float = 1.0,
        max_age: float | None = None, grow_from: int | None = None,
    ) -> IdMap:  # fmt: skip
        """Let ids come and go: a module gives rows to ids while it trains, and takes them from cold ones when they run out.

        An id that has no row reads and trains one of the shared rows, by hash; `module.elastic().state()` counts these lookups.
        In eval() nothing comes or goes. A *step* is a forward in train().

        Args:
            rows: rows of the table, `shared` ones included; with `grow_from`, those that it may have in the end.
            admit_after: lookups after which an id gets a row of its own, 1 to 255; estimated in bounded memory, never too low.
            shared: rows at the end of the table for all other ids. With 0 these read zeros, from one row, and train nothing.
            evict: which row of a full bucket goes: "lfu", with counts that halve every `half_life` steps, or "lru".
            half_life: steps; a small part of those that an id lives. Too few are better than too many: few mean "lru".
            ttl: steps without a lookup after which an id loses its row; by default none does.
            salt: seed of the hash and of first values.
            init: the rows of new ids are uniform in [-init, init), by id and salt; default: 1 / sqrt(rows for ids).
            admit_chance: chance of each lookup to admit its id, beside `admit_after`; drawn by id, step and salt.
            max_age: time without a lookup after which an id loses its row, in the log's own time: `elastic().advance(now)`.
            grow_from: rows at first; the table grows whenever ids have three quarters of its rows. By default it has all rows.

        Raises:
            BadInput: an argument has a wrong type or value; `error.parameter` names it.
        """
        rule = ElasticRows(rows, admit_after, shared, evict, half_life, ttl, salt, init, admit_chance, max_age, grow_from)
        return cls(rule)

    def prune(self, kept: KeptIds | Tensor | NDArray[Any] | Iterable[int], fallback: int = 1, salt: int = 0) -> IdMap:
        """Apply this map, then `pruned`."""
        if self.kept is not None or self.first or self.is_elastic:
            raise BadInput(f"this map is {self}; prune once, and before an offset", parameter="kept")
        return replace(self.pruned(kept, fallback, salt), start=self.start)

    def offset(self, first: int) -> IdMap:
        """Add `first` to the rows, for a part of a shared table."""
        if first < 0:
            raise BadInput(f"offset is {first}; rows begin at 0", parameter="first", value=first)
        return replace(self, first=self.first + int(first))

    @property
    def span(self) -> int:
        """Rows that the map uses, from `first` on."""
        if self.kept is not None and self.others is not None:
            return self.kept.count + self.others.rows
        assert self.start is not None
        return self.start.rows

    @property
    def rows(self) -> int:
        """Rows that a table needs for this map."""
        return self.first + self.span

    @property
    def bytes(self) -> int:
        """Bytes of the map, without a few numbers."""
        return 0 if self.kept is None else self.kept.bytes

    @property
    def is_identity(self) -> bool:
        """Whether ids are rows, unchanged."""
        return isinstance(self.start, RowRange) and self.kept is None and self.first == 0

    @property
    def is_elastic(self) -> bool:
        """Whether ids come and go."""
        return isinstance(self.start, ElasticRows)

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows of ids, with the same shape and device."""
        from .feature_maps import IdMaps

        offsets = torch.tensor([0, ids.numel()], device=ids.device)
        return IdMaps([self], ids.device)(ids.reshape(-1), offsets).view(ids.shape)

    def __str__(self) -> str:
        text = []
        if isinstance(self.start, RowRange):
            text.append(f"identity({self.start.rows})")
        elif isinstance(self.start, ElasticRows):
            others = (f"{f.name}={getattr(self.start, f.name)!r}" for f in fields(self.start) if f.name != "rows")
            text.append(f"elastic({self.start.rows}, {', '.join(others)})")
        elif self.start is not None:
            text.append(f"hashed({self.start.rows}, salt={self.start.salt})")
        if self.kept is not None and self.others is not None:
            ids = f"{self.kept.count} ids, sha256 {self.kept.sha256[:12]}"
            text.append(f"pruned({ids}, fallback={self.others.rows}, salt={self.others.salt})")
        return " -> ".join(text) + (f" + {self.first}" if self.first else "")

    def to_json(self) -> dict[str, Any]:
        """The map for `json.dumps`; kept ids by their sha256, with their array in `arrays`."""
        json: dict[str, Any] = {"version": VERSION}
        if self.start is not None:
            json[next(name for name, kind in _STARTS.items() if isinstance(self.start, kind))] = asdict(self.start)
        if self.kept is not None and self.others is not None:
            json["pruned"] = {"kept": self.kept.to_json(), "fallback": self.others.rows, "salt": self.others.salt}
        return json | ({"offset": self.first} if self.first else {})

    def arrays(self) -> dict[str, Tensor]:
        """The arrays of `to_json` by name: int64 on the CPU."""
        return {} if self.kept is None else {"kept": self.kept.words}

    @classmethod
    def from_json(cls, json: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> IdMap:
        """Restore a map from the results of `to_json` and `arrays`; raises `FormatError` for unknown or damaged contents."""
        version = json.get("version")
        if version != VERSION:
            raise FormatError(f"the id map has version {version!r}; this package reads {VERSION}", version=version)
        starts = set(json) & set(_STARTS)
        if set(json) - {"version", *_STARTS, "pruned", "offset"} or len(starts) > 1 or not (starts or "pruned" in json):
            message = f"the id map has the fields {', '.join(sorted(json))}; use identity, hashed or elastic, pruned, offset"
            raise FormatError(message, parameter="fields", value=sorted(json))
        try:
            start: Any = next((_STARTS[kind](**json[kind]) for kind in starts), None)
            if "pruned" not in json:
                return cls(start, first=json.get("offset", 0))
            pruned = json["pruned"]
            if arrays is None or "kept" not in arrays:
                raise FormatError("the id map is pruned, but its array 'kept' is missing", parameter="kept")
            kept, others = KeptIds.from_json(pruned["kept"], arrays["kept"]), SaltedHash(pruned["fallback"], pruned["salt"])
            return cls(start, kept, others, json.get("offset", 0))
        except BadInput:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise FormatError(f"the id map {str(dict(json))[:200]} cannot be read: {error}", parameter="fields") from None


_STARTS: dict[str, Any] = {"identity": RowRange, "hashed": SaltedHash, "elastic": ElasticRows}


def _check_rows(what: str, rows: int) -> int:
    """A plain int, because a state or manifest cannot hold those of numpy."""
    if not (isinstance(rows, Integral) and 1 <= rows <= MOST_ROWS):
        raise BadInput(f"{what} {rows!r} rows; use an int from 1 to 2^40", parameter="rows", value=rows)
    return int(rows)


def check_map(map: IdMap, rows: int, table: str, feature: str) -> None:
    """Raise unless `map` is an `IdMap` to rows of its table."""
    if not isinstance(map, IdMap):
        raise BadInput(
            f"ids of feature {feature!r} is a {type(map).__name__}; use a thermocline.IdMap, as in IdMap.hashed(1000)",
            parameter="ids", feature=feature, value=map,
        )  # fmt: skip
    if map.rows > rows:
        raise BadInput(
            f"feature {feature!r} is mapped to {map.rows} rows ({map}), but table {table!r} has {rows}; make them equal",
            parameter="ids", feature=feature, table=table, needed=map.rows, available=rows,
        )  # fmt: skip
