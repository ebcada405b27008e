"""The heat file, `heat.tc`: a safetensors container. `docs/heat.md` describes it field by field.

Any safetensors reader opens it, and reading runs no code. Tables are numbered, so that their names may be anything. The file is
written piece by piece, because a profile may fill most of its memory; the same pieces without the time give its sha256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadInput, FormatError, explain_failed_write

from .profile import BatchRepeats, HeatProfile, LogSlice, TableHeat

VERSION = 1
_KEY = "thermocline.heat"
_DTYPES = {"int64": "I64", "uint8": "U8", "int32": "I32"}
_ARRAYS = ("ids_H", "counts_H", "lengths_L", "bags_L")

Arrays = dict[str, NDArray[Any]]


def save(profile: HeatProfile, path: Path) -> None:
    arrays, text = _parts(profile)
    write_arrays(path, arrays, {_KEY: text})


def load(path: Path) -> HeatProfile:
    arrays, metadata = read_arrays(path, "a heat file; `thermocline heat profile` writes one")
    if _KEY not in metadata:
        message = f"'{path}' is a safetensors file without heat; `thermocline heat profile` writes heat files"
        raise FormatError(message, path=str(path))
    try:
        return _read(json.loads(metadata[_KEY]), arrays, path)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        message = f"'{path}' is a damaged heat file ({type(error).__name__}: {error}); profile the log again"
        raise FormatError(message, path=str(path)) from None


def _read(text: Any, arrays: Arrays, path: Path) -> HeatProfile:
    if text["version"] != VERSION:
        message = f"'{path}' is a heat file of version {text['version']}; this thermocline reads version {VERSION}"
        raise FormatError(message, path=str(path), version=text["version"])
    tables = {}
    for number, stated in enumerate(text["tables"]):
        kept: Any = {name: arrays[f"{number}.{name}"] for name in _ARRAYS}
        kept["batches"] = tuple(BatchRepeats(*each) for each in stated.pop("batches"))
        kept["slices"] = tuple(LogSlice(*each) for each in stated.pop("slices"))
        tables[stated["name"]] = TableHeat(**stated, **kept, registers=arrays.get(f"{number}.registers"))
    return HeatProfile(tables, text["source"], text["created"])


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


@contextmanager
def written_aside(path: Path, size: int | None = None) -> Iterator[Path]:
    """A temporary name to write `size` bytes to; the file takes the place of `path` when it is complete."""
    aside = path.with_name(path.name + ".part")
    try:
        with explain_failed_write(path, size):
            yield aside
            aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


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
    except safetensors.SafetensorError as error:
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
