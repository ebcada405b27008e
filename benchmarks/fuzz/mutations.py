"""Mutations of files: bytes, values of JSON, numbers in its text, and what lies at a path.

A mutation of a manifest is signed again, as its author could: only the contents can give it away.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_DEEP: Any = []
for _ in range(300):
    _DEEP = [_DEEP]
STRANGE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 39, 2**31, 2**62, 2**63, 2**64, 10**40, -(2**63), 1.5, -0.5, 1e308, "", "x", "..", "\x00",
    "../../../etc/passwd", "/etc/passwd", "save-000001-00000000/../x", "max", "int8", "fp32", "user", "item", [], {}, [[]], [0],
    {"a": 1}, _DEEP,
)  # fmt: skip
NUMBERS = ("9" * 5000, "-" + "9" * 30, "1e999", "NaN", "-Infinity", "0", "1", "-1", "1.5", "4294967296")
HUGE = 1 << 40  # bytes of a sparse file


def spoil_bytes(draw: random.Random, data: bytes) -> bytes:
    """Flip bits, cut, insert or repeat bytes."""
    kind, at = draw.randrange(4), draw.randrange(len(data))
    if kind == 0:
        spoiled = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 8))):
            spoiled[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(spoiled)
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + draw.randbytes(draw.choice((1, 8, 64))) + data[at:]
    return data[:at] + data[draw.randrange(len(data)) :]


def spoil_numbers(draw: random.Random, text: str) -> str:
    """Replace one number in the text of JSON, or nest all of it too deep."""
    if draw.random() < 0.05:
        depth = draw.choice((2_000, 200_000))
        return "[" * depth + text + "]" * depth
    ends = [at for at, sign in enumerate(text) if sign in ",}\n]" and at and text[at - 1].isdigit()]
    end = draw.choice(ends)
    begin = end
    while text[begin - 1] in "-+.eE0123456789":
        begin -= 1
    return text[:begin] + draw.choice(NUMBERS) + text[end:]


def spoil_json(draw: random.Random, content: Any) -> Any:
    """Replace, remove, repeat or exchange values of JSON."""
    content = json.loads(json.dumps(content))
    for _ in range(draw.choice((1, 1, 2))):
        places = list(_places(content))
        inside, key = draw.choice(places)
        kind = draw.randrange(4)
        if kind == 0:
            inside[key] = draw.choice(STRANGE)
        elif kind == 1:
            del inside[key]
        elif kind == 2 and isinstance(inside, list):
            inside.insert(draw.randrange(len(inside) + 1), inside[key])
        else:
            other, theirs = draw.choice(places)
            same = [each for each in places if type(each[0][each[1]]) is type(inside[key])]
            other, theirs = draw.choice(same)
            inside[key] = json.loads(json.dumps(other[theirs]))
    return content


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every (list or object, index or field)."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield content, key
        yield from _places(value)


def signed(manifest: Any) -> str:
    """A manifest with the sha256 of its contents."""
    if not isinstance(manifest, dict):
        return json.dumps(manifest)
    own = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**own, "sha256": digest}, indent=1)


# -- what lies at a path --


def _pipe(draw: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _gone(draw: random.Random, path: Path) -> None:
    path.unlink()


def _loop(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _device(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _huge(draw: random.Random, path: Path) -> None:
    os.truncate(path, HUGE)


def _spoiled(draw: random.Random, path: Path) -> None:
    path.write_bytes(spoil_bytes(draw, path.read_bytes()))


SPOIL_FILE: tuple[Callable[[random.Random, Path], None], ...] = (_pipe, _folder, _gone, _loop, _device, _huge, *[_spoiled] * 6)


def spoil_header(draw: random.Random, path: Path) -> None:
    """Change the JSON header of a safetensors file, or its length."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if draw.random() < 0.1:
        path.write_bytes(draw.choice((0, 1, 2**63, 2**31, len(data))).to_bytes(8, "little") + data[8:])
        return
    text = data[8 : 8 + length].decode()
    text = json.dumps(spoil_json(draw, json.loads(text))) if draw.random() < 0.7 else spoil_numbers(draw, text)
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data[8 + length :])


def restore(good: Path, folder: Path) -> None:
    """Make a folder equal to another one."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
