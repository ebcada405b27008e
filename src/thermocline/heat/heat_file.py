"""The heat file, `heat.tc`: a safetensors container. `docs/heat.md` describes it field by field.

Any safetensors reader opens it, and reading runs no code. Tables are numbered, so that their names may be anything. The file is
written piece by piece, because a profile may fill most of its memory; the same pieces without the time give its sha256, which
the file states, so that a flipped bit is found. Files of version 0.1 state none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput, FormatError, written_aside

from .profile import BatchRepeats, HeatProfile, LogSlice, TableHeat

VERSION = 1
_KEY, _CHECKSUM = "thermocline.heat", "thermocline.sha256"
_DTYPES = {"int64": "I64", "uint8": "U8", "int32": "I32"}
_ARRAYS = ("ids_H", "counts_H", "lengths_L", "bags_L")

Arrays = dict[str, NDArray[Any]]


def save(profile: HeatProfile, path: Path) -> None:
    arrays, text = _parts(profile)
    write_arrays(path, arrays, {_KEY: text, _CHECKSUM: profile.sha256})


def load(path: Path) -> HeatProfile:
    arrays, metadata = read_arrays(path, "a heat file; `thermocline heat profile` writes one")
    if _KEY not in metadata:
        message = f"'{path}' is a safetensors file without heat; `thermocline heat profile` writes heat files"
        raise FormatError(message, path=str(path))
    try:
        found = _read(json.loads(metadata[_KEY]), arrays, path)
        if metadata.get(_CHECKSUM, found.sha256) != found.sha256:
            raise _Damaged(f"its sha256 is {found.sha256[:12]}... and was {metadata[_CHECKSUM][:12]}...")
    except FormatError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        message = f"'{path}' is a damaged heat file ({type(error).__name__}: {error}); profile the log again"
        raise FormatError(message[:500], path=str(path)) from None
    return found


class _Damaged(ValueError):
    """Contents that do not fit each other."""


def _read(text: Any, arrays: Arrays, path: Path) -> HeatProfile:
    if text["version"] != VERSION:
        message = f"'{path}' is a heat file of version {str(text['version'])[:40]}; this thermocline reads version {VERSION}"
        raise FormatError(message, path=str(path), version=text["version"])
    tables = {}
    for number, stated in enumerate(text["tables"]):
        kept: Any = {name: _integers(arrays[f"{number}.{name}"]) for name in _ARRAYS}
        kept["batches"] = tuple(BatchRepeats(*each) for each in stated.pop("batches"))
        kept["slices"] = tuple(LogSlice(*each) for each in stated.pop("slices"))
        _check(stated, kept, registers := arrays.get(f"{number}.registers"))
        tables[stated["name"]] = TableHeat(**stated, **kept, registers=registers)
    if len(tables) < len(text["tables"]):
        raise _Damaged("two tables have the same name")
    return HeatProfile(tables, _text(text["source"]), _text(text["created"]))


def _integers(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype != np.int64 or array.ndim != 1:
        raise _Damaged(f"an array is {array.ndim}-D {array.dtype}, not flat int64")
    return array


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Damaged(f"{str(value)[:40]!r} is no text")
    return value


def _check(stated: Any, kept: Any, registers: NDArray[Any] | None) -> None:
    """Raise if the numbers of a table exclude each other."""
    _text(stated["name"])
    numbers = [stated[name] for name in ("samples", "lookups", "distinct", "missing", "slack")]
    numbers += [number for each in kept["batches"] for number in each]
    numbers += [number for each in kept["slices"] for number in (each.lookups, each.samples)]
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        raise _Damaged("a count is not a number from 0 to 2^63")
    if not all(0 <= share <= 1.0e18 for each in kept["slices"] for share in (each.kept_1, each.kept_5)):
        raise _Damaged("lookups of a slice are not a number")
    counts_H, ids_H = kept["counts_H"], kept["ids_H"]
    if len(ids_H) != len(counts_H) or len(kept["lengths_L"]) != len(kept["bags_L"]):
        raise _Damaged("two arrays that belong together have different lengths")
    if len(counts_H) and not (counts_H[-1] > 0 and (counts_H[1:] <= counts_H[:-1]).all()):
        raise _Damaged("counts do not fall")
    if any((kept[name] < 0).any() for name in ("lengths_L", "bags_L")):
        raise _Damaged("a length is negative")
    if stated["exact"] is not (registers is None) or (registers is not None and registers.dtype != np.uint8):
        raise _Damaged("a table has a sketch if, and only if, its counts are not exact")
    if stated["exact"] and stated["distinct"] != len(ids_H):
        raise _Damaged(f"{stated['distinct']} distinct ids are stated, and {len(ids_H)} are there")


def sha256(profile: HeatProfile) -> str:
    arrays, text = _parts(profile)
    digest = hashlib.sha256()
    for piece in _pieces(arrays, {_KEY: text}):
        digest.update(piece)
    return digest.hexdigest()


def _parts(profile: HeatProfile) -> tuple[Arrays, str]:
    """A profile as arrays, and everything else as JSON."""
    arrays: Arrays = {}
    tables = []
    for number, table in enumerate(profile.tables.values()):
        arrays |= {f"{number}.{name}": getattr(table, name) for name in _ARRAYS}
        if table.registers is not None:
            arrays[f"{number}.registers"] = table.registers
        plain = ("name", "samples", "lookups", "distinct", "exact", "missing", "slack", "batches", "slices")
        tables.append({name: getattr(table, name) for name in plain})
    text = {"version": VERSION, "source": profile.source, "created": profile.created, "tables": tables}
    return arrays, json.dumps(text, separators=(",", ":"))


# -- safetensors --


def write_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, which appears under its name when it is complete."""
    size = sum(array.nbytes for array in arrays.values())
    with written_aside(path, size) as aside, open(aside, "wb") as file:
        file.writelines(_pieces(arrays, metadata))


def read_arrays(path: Path, what: str) -> tuple[Arrays, dict[str, str]]:
    """The arrays and metadata of a safetensors file; `what` names the expected file in errors."""
    import safetensors

    if not path.is_file():
        raise BadInput(f"there is no file '{path}'; give {what}", path=str(path))
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (safetensors.SafetensorError, TypeError, ValueError, AttributeError) as error:  # also of types that numpy lacks
        raise FormatError(f"'{path}' is not {what} ({error})", path=str(path)) from None


def _pieces(arrays: Arrays, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in arrays.values():
        if array.nbytes:
            yield np.ascontiguousarray(array).data.cast("B")
