"""Quantities with units: "141GB", "2GiB", "450GB/s", "400Gbit/s", "10us". A plain number is bytes or seconds.

Decimal prefixes are powers of 1000, binary prefixes (KiB, MiB, ...) powers of 1024.
"""

from __future__ import annotations

import re

from thermocline.errors import BadInput

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
BYTES: dict[str, float] = {f"{prefix}B": size for prefix, size in (_DECIMAL | _BINARY).items()}
RATES: dict[str, float] = {f"{unit}/s": size for unit, size in BYTES.items()} | {
    f"{prefix}bit/s": size / 8 for prefix, size in _DECIMAL.items()
}
SECONDS: dict[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]+)\s*")

_SHARE = re.compile(r"\s*(?:([0-9]+)\s*/\s*([1-9][0-9]*)|(0?\.[0-9]+))\s*")


def read_bytes(given: object) -> int:
    """Bytes, from a number or from text such as "141GB"."""
    return round(_read(given, BYTES, "bytes, such as 141GB or 2GiB"))


def read_share(given: object) -> float | None:
    """A share above 0 and up to 1, from text such as "1/8" or "0.125"; None for anything else."""
    match = _SHARE.fullmatch(given) if isinstance(given, str) else None
    share = 0.0 if match is None else float(match[3]) if match[3] else int(match[1]) / int(match[2])
    return share if 0 < share <= 1 else None


def read_budget(given: object, whole: int) -> int:
    """Bytes, or a share of `whole` as `read_share` reads it."""
    share = read_share(given)
    return round(_read(given, BYTES, "bytes or a share, such as 40GiB or 1/2")) if share is None else int(share * whole)


def read_rate(given: object) -> float:
    """Bytes per second, from a number or from text such as "450GB/s"."""
    return _read(given, RATES, "a rate, such as 450GB/s or 400Gbit/s")


def read_seconds(given: object) -> float:
    """Seconds, from a number or from text such as "10us"."""
    return _read(given, SECONDS, "a time, such as 10us or 4ms")


def _read(given: object, units: dict[str, float], wanted: str) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return given
    match = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
    if match is None or match[2] not in units:
        number = isinstance(given, str) and given.strip().replace(".", "", 1).isdigit()
        raise BadInput(f"{given!r} is not {wanted}" + ("; the unit is missing" if number else ""), value=given)
    return float(match[1]) * units[match[2]]


def show_bytes(count: float) -> str:
    """Bytes with the unit that leaves one to three digits before the point: "1.37 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:,.2f} {unit}"


def show_rate(rate: float) -> str:
    """Bytes per second as in planning files: "450GB/s"."""
    return _show(rate, {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "B/s": 1.0})


def show_seconds(seconds: float) -> str:
    """Seconds as in planning files: "10us"."""
    return _show(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def _show(value: float, units: dict[str, float]) -> str:
    unit, size = next(((unit, size) for unit, size in units.items() if abs(value) >= size), list(units.items())[-1])
    return f"{value / size:.4g}{unit}"
