"""The cases of a race between commits: shapes, ids, stored precision, operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.kernels.cases import CPU_SHAPES, GPU_SHAPES, UNIFORM, ZIPF, A, Shape

LOOKUP, STEP, HOST_STEP, SERVED = "lookup", "step", "host-step", "served"
STORED = (("fp32", 0.0), ("int8", 0.05), ("int4", 0.01))
SETTLE = {"cpu": 64, "cuda": 320}  # steps before a cache is timed
SMALL_BATCH = replace(A, name="A-b512", batch=512)  # launches and Python take longer than kernels


@dataclass(frozen=True)
class Case:
    """What both checkouts do."""

    device: str
    shape: Shape
    ids: str
    precision: str
    cache: float
    operation: str
    settle: int = 0

    @property
    def name(self) -> str:
        stored = f"{self.precision}+{self.cache:.0%}" if self.cache else self.precision
        return f"{self.device}/{self.shape.name}/{self.ids}/{stored}/{self.operation}"

    @property
    def stored(self) -> tuple[object, ...]:
        """Equal for cases that share their tables."""
        place = {HOST_STEP: "host", SERVED: self.ids}.get(self.operation, "device")
        return self.device, self.shape, self.precision, self.cache, place

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Case:
        return cls(**{**value, "shape": Shape(**value["shape"])})


def all_cases(device: str, quick: bool) -> Iterator[Case]:
    """Every case of a device; cases that share tables follow each other, and steps come before lookups."""
    settle = 8 if quick else SETTLE[device]
    shapes = [shape.quick() if quick else shape for shape in (GPU_SHAPES if device == "cuda" else CPU_SHAPES)]
    kinds = (ZIPF, UNIFORM) if device == "cuda" else (ZIPF,)
    for shape in shapes:
        for precision, cache in STORED:
            for kind in kinds:
                yield Case(device, shape, kind, precision, cache, STEP, settle if cache else 4)
                yield Case(device, shape, kind, precision, cache, LOOKUP)
    if device != "cuda":
        return
    small = SMALL_BATCH.quick() if quick else SMALL_BATCH
    yield Case(device, small, ZIPF, "int8", 0.05, STEP, settle)
    yield Case(device, small, ZIPF, "int8", 0.05, LOOKUP)
    for shape in shapes:
        for precision, cache in STORED[1:]:
            yield Case(device, shape, ZIPF, precision, cache, HOST_STEP, settle)
    for shape in shapes:
        yield Case(device, shape, ZIPF, "int8", 0.0, SERVED)
