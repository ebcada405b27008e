"""`IdMap`: how a raw 64-bit id becomes a row. A value: frozen, compared by what it does, written as JSON and arrays.

    IdMap.identity(1000)                  ids 0 to 999 are rows; others are errors
    IdMap.hashed(1000, salt=7)            any id; ids may share a row
    IdMap.pruned(kept, fallback=4)        any id; kept ids have rows of their own, others share the 4 that follow
    IdMap.hashed(1000).prune(kept)        hashed first; of the 1000 numbers some are kept
    ... .offset(500)                      any of these, from row 500 of a table that others share

Every map is these three steps, each of which may be absent, so one small kernel evaluates all of them:

    1. start    none, or Within(rows): refuse others, or Hash(rows, salt)
    2. kept     none, or: kept ids become their rank, others kept.count + hash to so many rows
    3. first    is added

Numbers, exactly (version 1; all arithmetic modulo 2^64 and unsigned; golden vectors in `docs/ids.md`):

    mix(z)      z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    key         mix(salt + 0x9E3779B97F4A7C15): what SplitMix64 seeded with the salt gives first
    hash        mix((id ^ key) * 0x9E3779B97F4A7C15)
    row         (hash * rows) >> 64, in 128 bits

A negative id is its two's complement; a 32-bit id is first made 64-bit with its sign. Rejected: a remainder in place of the
last line (a division for every id, and low bits decide); a seed that is added to the id (then neighbouring seeds are
neighbouring ids, and two features with nearby salts collide alike).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline.errors import BadInput, FormatError
from thermocline.kernels.ids.fields import GOLDEN, MIX1, MIX2, VERSION

from .kept_ids import Kept

MOST_ROWS = 1 << 40
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Within:
    """Ids that are rows already."""

    rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _check_rows("an identity map has", self.rows))


@dataclass(frozen=True)
class Hash:
    """A salted hash to so many rows."""

    rows: int
    salt: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _check_rows("ids are hashed to", self.rows))
        if not isinstance(self.salt, Integral):
            raise BadInput(f"salt is {self.salt!r}; use an int")
        object.__setattr__(self, "salt", int(self.salt) & _WORD)

    @property
    def key(self) -> int:
        """What ids are mixed with."""
        z = (self.salt + GOLDEN) & _WORD
        z = ((z ^ (z >> 30)) * MIX1) & _WORD
        z = ((z ^ (z >> 27)) * MIX2) & _WORD
        return z ^ (z >> 31)


@dataclass(frozen=True)
class IdMap:
    """From raw ids to rows. Make one with `identity`, `hashed` or `pruned`; compose with `prune` and `offset`."""

    start: Within | Hash | None = None
    kept: Kept | None = None
    others: Hash | None = None  # the rows of ids that are not kept
    first: int = 0

    def __post_init__(self) -> None:
        assert (self.kept is None) == (self.others is None)
        assert self.start is not None or self.kept is not None
        _check_rows("a map ends at", self.rows)

    @classmethod
    def identity(cls, rows: int) -> IdMap:
        """Ids are rows; an id that is none is an error."""
        return cls(Within(rows))

    @classmethod
    def hashed(cls, rows: int, salt: int = 0) -> IdMap:
        """Any id to one of so many rows, by a salted hash: no memory, but ids collide."""
        return cls(Hash(rows, salt))

    @classmethod
    def pruned(cls, kept: Kept | Tensor | NDArray[Any] | Iterable[int], fallback: int = 1, salt: int = 0) -> IdMap:
        """Kept ids have a row each, in rising order of the ids. All others share `fallback` rows after those, by hash."""
        return cls(None, kept if isinstance(kept, Kept) else Kept.of(kept), Hash(fallback, salt))

    def prune(self, kept: Kept | Tensor | NDArray[Any] | Iterable[int], fallback: int = 1, salt: int = 0) -> IdMap:
        """This map, then `pruned`: of its rows some are kept, and the others share `fallback` rows."""
        if self.kept is not None or self.first:
            raise BadInput(f"this map is {self}; rows are pruned once, and before an offset")
        return replace(self.pruned(kept, fallback, salt), start=self.start)

    def offset(self, first: int) -> IdMap:
        """This map, its rows moved up by `first`: its part of a table that features share."""
        if first < 0:
            raise BadInput(f"offset is {first}; rows begin at 0")
        return replace(self, first=self.first + int(first))

    @property
    def span(self) -> int:
        """Rows that the map uses, beginning at `first`."""
        if self.kept is not None and self.others is not None:
            return self.kept.count + self.others.rows
        assert self.start is not None
        return self.start.rows

    @property
    def rows(self) -> int:
        """Rows that a table needs for this map: all that it returns are below."""
        return self.first + self.span

    @property
    def bytes(self) -> int:
        """What the map keeps in memory, but for a few numbers."""
        return 0 if self.kept is None else self.kept.bytes

    @property
    def is_identity(self) -> bool:
        """Whether rows are the ids themselves."""
        return isinstance(self.start, Within) and self.kept is None and self.first == 0

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows of ids, of the same shape and on the same device."""
        from .feature_maps import IdMaps

        offsets = torch.tensor([0, ids.numel()], device=ids.device)
        return IdMaps([self], ids.device)(ids.reshape(-1), offsets).view(ids.shape)

    def __str__(self) -> str:
        text = []
        if isinstance(self.start, Within):
            text.append(f"identity({self.start.rows})")
        elif self.start is not None:
            text.append(f"hashed({self.start.rows}, salt={self.start.salt})")
        if self.kept is not None and self.others is not None:
            ids = f"{self.kept.count} ids, sha256 {self.kept.sha256[:12]}"
            text.append(f"pruned({ids}, fallback={self.others.rows}, salt={self.others.salt})")
        return " -> ".join(text) + (f" + {self.first}" if self.first else "")

    # -- files --------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What a manifest holds, for `json.dumps`; kept ids by their sha256, their array is in `arrays`."""
        json: dict[str, Any] = {"version": VERSION}
        if isinstance(self.start, Within):
            json["identity"] = {"rows": self.start.rows}
        elif self.start is not None:
            json["hashed"] = {"rows": self.start.rows, "salt": self.start.salt}
        if self.kept is not None and self.others is not None:
            json["pruned"] = {"kept": self.kept.to_json(), "fallback": self.others.rows, "salt": self.others.salt}
        return json | ({"offset": self.first} if self.first else {})

    def arrays(self) -> dict[str, Tensor]:
        """What belongs to `to_json` beside it: int64 on the CPU, by name."""
        return {} if self.kept is None else {"kept": self.kept.words}

    @classmethod
    def from_json(cls, json: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> IdMap:
        """What `to_json` and `arrays` gave."""
        if json.get("version") != VERSION:
            raise FormatError(f"the id map has version {json.get('version')!r}; this package reads version {VERSION}")
        known = {"version", "identity", "hashed", "pruned", "offset"}
        if set(json) - known or ("identity" in json and "hashed" in json) or not set(json) & {"identity", "hashed", "pruned"}:
            raise FormatError(
                f"the id map has the fields {', '.join(sorted(json))}; expected one start, pruned or both, offset"
            )
        try:
            start = Within(**json["identity"]) if "identity" in json else Hash(**json["hashed"]) if "hashed" in json else None
            if "pruned" not in json:
                return cls(start, first=json.get("offset", 0))
            pruned = json["pruned"]
            if arrays is None or "kept" not in arrays:
                raise FormatError("the id map is pruned, but the array 'kept' of its ids is missing")
            kept, others = Kept.from_json(pruned["kept"], arrays["kept"]), Hash(pruned["fallback"], pruned["salt"])
            return cls(start, kept, others, json.get("offset", 0))
        except (KeyError, TypeError) as error:
            raise FormatError(f"the id map {dict(json)} cannot be read: {error}") from None


def _check_rows(what: str, rows: int) -> int:
    """As a plain int: those of numpy cannot be written into a state or a manifest."""
    if not isinstance(rows, Integral):
        raise BadInput(f"{what} {rows!r} rows; use an int")
    if not 1 <= rows <= MOST_ROWS:
        raise BadInput(f"{what} {rows} rows; use 1 to 2^40")
    return int(rows)
