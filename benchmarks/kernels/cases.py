"""What is raced: shapes of tables and lookups, jobs on them, and the groups of rows that one build of tables serves.

The name of a row is device/shape/ids/precision/operation, and on a CPU /threads:

    cpu/8x1M/zipf/int8/forward/2              against the best of the peers that the issue names
    cpu/8x1M/zipf/int8/step-sgd-vs-torch/2    a step is forward + backward + update
    cuda/A/uniform/int8/forward               fp32 output
    cuda/A/uniform/int8/forward-fp16          fp16 output
    cuda/A/uniform/int8/forward-of-ceiling    against the memory of the card
    cuda/A/zipf/int8+5%/step-rowwise_adagrad  with a full-precision cache of 5% of the rows, which the peers do not have

A `KernelPlan` is what one bench measures: `KERNELS`, and `STEPS`, the training steps with a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

ZIPF, UNIFORM = "zipf", "uniform"
FORWARD, STEP_SGD, STEP_ROWWISE = "forward", "step-sgd", "step-rowwise_adagrad"


@dataclass(frozen=True)
class Shape:
    """Equal tables, each looked up by `batch` bags of `pooling` ids; not pooled, every id gives a row of output."""

    name: str
    tables: int
    rows: int
    dim: int
    batch: int
    pooling: int
    pooled: bool = True

    @property
    def lookups(self) -> int:
        return self.tables * self.batch * self.pooling

    @property
    def out_shape(self) -> tuple[int, int]:
        """Of the output with all tables in it."""
        return (self.batch, self.tables * self.dim) if self.pooled else (self.lookups, self.dim)

    def quick(self) -> Shape:
        """The same shape, small enough for a smoke test."""
        return replace(self, rows=max(1000, self.rows // 200), batch=max(32, self.batch // 32))


@dataclass(frozen=True)
class Workload:
    """What every contender of a race has to do. `cache`: the share of rows that ours keeps in full precision."""

    shape: Shape
    precision: str
    operation: str
    output: str = "fp32"
    id_dtype: str = "int64"
    cache: float = 0.0
    staged: float = 0.0  # share of the rows that ours has room for on the card as stored; 0: for three batches

    @property
    def optimizer(self) -> str | None:
        return None if self.operation == FORWARD else self.operation.removeprefix("step-")

    @property
    def label(self) -> str:
        """The operation as rows name it."""
        return self.operation if self.output == "fp32" else f"{self.operation}-{self.output}"

    @property
    def stored(self) -> str:
        """Precision, cache and room for staged rows, as rows name them."""
        staged = f"+staged{self.staged:.0%}" if self.staged else ""
        return f"{self.precision}+{self.cache:.0%}{staged}" if self.cache else self.precision

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Workload:
        return cls(**{**value, "shape": Shape(**value["shape"])})


class Baseline(NamedTuple):
    """One row of a group: the best contender of these libraries, all of which must be there."""

    suffix: str
    libraries: tuple[str, ...]
    without: tuple[str, ...] = ()  # contenders that do not count here


@dataclass(frozen=True)
class CaseGroup:
    """The rows that one build of the tables serves."""

    job: Workload
    rivals: tuple[Baseline, ...]
    kinds: tuple[str, ...] = (ZIPF,)
    ceiling: bool = False

    def case(self, device: str, kind: str, suffix: str = "", threads: int | None = None) -> str:
        parts = [device, self.job.shape.name, kind, self.job.stored, self.job.label + suffix]
        return "/".join(parts if threads is None else [*parts, str(threads)])

    def quick(self) -> CaseGroup:
        return replace(self, job=replace(self.job, shape=self.job.shape.quick()))


FBGEMM = Baseline("", ("fbgemm",))
# torch's quantized ops serve one table a call. What counts is the output that ours and FBGEMM's have, all tables in one
# tensor; the same without joining them is reported as a row of its own.
APART = "torch quantized"
FBGEMM_AND_TORCH = Baseline("", ("fbgemm", "torch"), (APART,))
TORCH = Baseline("-vs-torch", ("torch",))
OURS_INT8 = Baseline("-vs-int8", ("ours-int8",))

CPU_THREADS = (1, 2)
CPU_SHAPES = (
    Shape("26x100k", tables=26, rows=100_000, dim=64, batch=4096, pooling=1),
    Shape("8x1M", tables=8, rows=1_000_000, dim=128, batch=2048, pooling=20),
)

A = Shape("A", tables=26, rows=1_000_000, dim=128, batch=16384, pooling=1)
B = Shape("B", tables=8, rows=4_000_000, dim=128, batch=8192, pooling=32)
C = Shape("C", tables=1, rows=10_000_000, dim=128, batch=1024, pooling=512, pooled=False)
GPU_SHAPES = (A, B, C)
GPU_OTHERS = (
    replace(A, name="A-d32", dim=32),
    replace(A, name="A-d256", dim=256),
    replace(A, name="A-b512", batch=512),
    Shape("200x10k", tables=200, rows=10_000, dim=128, batch=2048, pooling=1),
)


def cpu_groups(shapes: tuple[Shape, ...] | None = None) -> list[CaseGroup]:
    """Everything the CPU benchmark measures."""
    groups = []
    for shape in shapes or CPU_SHAPES:
        groups += [
            CaseGroup(Workload(shape, "fp32", FORWARD), (FBGEMM,)),
            CaseGroup(Workload(shape, "int8", FORWARD), (FBGEMM_AND_TORCH, TORCH)),
            CaseGroup(Workload(shape, "int4", FORWARD), (FBGEMM_AND_TORCH, TORCH)),
            CaseGroup(Workload(shape, "int8", STEP_SGD), (FBGEMM, TORCH)),
            CaseGroup(Workload(shape, "int8", STEP_ROWWISE), (FBGEMM,)),
        ]
    return groups


def gpu_groups(shapes: tuple[Shape, ...] | None = None, others: tuple[Shape, ...] | None = None) -> list[CaseGroup]:
    """Everything the GPU benchmark measures, what is asked for first.

    FBGEMM's inference kernels take int32 ids, so the quantized lookups of both sides do.
    """
    shapes, both = GPU_SHAPES if shapes is None else shapes, (ZIPF, UNIFORM)
    gated, reported = [], []
    for shape in shapes:
        gated.append(CaseGroup(Workload(shape, "fp32", FORWARD), (FBGEMM, TORCH), both))
        gated += [
            CaseGroup(Workload(shape, p, FORWARD, id_dtype="int32"), (FBGEMM,), both, ceiling=p == "int8")
            for p in ("int8", "int4")
        ]
        gated.append(CaseGroup(Workload(shape, "fp32", STEP_ROWWISE), (FBGEMM,), both))
        reported += [CaseGroup(Workload(shape, p, STEP_ROWWISE), (FBGEMM,), both) for p in ("int8", "int4")]
        reported.append(CaseGroup(Workload(shape, "fp32", FORWARD, output="fp16"), (FBGEMM,), both))
        reported += [
            CaseGroup(Workload(shape, p, FORWARD, output="fp16", id_dtype="int32"), (FBGEMM,), both) for p in ("int8", "int4")
        ]
    for shape in GPU_OTHERS if others is None else others:
        reported += [
            CaseGroup(Workload(shape, "fp32", FORWARD), (FBGEMM,)),
            CaseGroup(Workload(shape, "int8", FORWARD, id_dtype="int32"), (FBGEMM,)),
            CaseGroup(Workload(shape, "fp32", STEP_ROWWISE), (FBGEMM,)),
        ]
    return gated + reported


def step_cpu_groups(shapes: tuple[Shape, ...] | None = None) -> list[CaseGroup]:
    """Training steps with a cache, on a CPU."""
    groups = []
    for shape in shapes or CPU_SHAPES:
        groups.append(CaseGroup(Workload(shape, "int8", STEP_ROWWISE, cache=0.05), (FBGEMM,)))
        groups.append(CaseGroup(Workload(shape, "int8", STEP_SGD, cache=0.05), (TORCH,)))
    return groups


def step_gpu_groups(shapes: tuple[Shape, ...] | None = None) -> list[CaseGroup]:
    """Training steps with a cache, on a GPU. Each kind of ids has a group of its own: a cache that has learnt one kind of ids
    is not in its steady state for the other."""
    gated, reported = [], []
    for shape in shapes or GPU_SHAPES:
        for kind in (ZIPF, UNIFORM):
            gated.append(CaseGroup(Workload(shape, "int8", STEP_ROWWISE, cache=0.05), (FBGEMM,), (kind,)))
            gated.append(CaseGroup(Workload(shape, "int4", STEP_ROWWISE, cache=0.05), (OURS_INT8, FBGEMM), (kind,)))
            reported.append(CaseGroup(Workload(shape, "int4", STEP_ROWWISE, cache=0.01), (FBGEMM,), (kind,)))
        reported += [CaseGroup(Workload(shape, p, STEP_ROWWISE), (FBGEMM,), (ZIPF, UNIFORM)) for p in ("int8", "int4")]
    return gated + reported


def cpu_cases(group: CaseGroup) -> list[str]:
    return [group.case("cpu", k, r.suffix, t) for k in group.kinds for r in group.rivals for t in CPU_THREADS]


def gpu_cases(group: CaseGroup) -> list[str]:
    cases = [group.case("cuda", kind, rival.suffix) for kind in group.kinds for rival in group.rivals]
    return [*cases, group.case("cuda", UNIFORM, "-of-ceiling")] if group.ceiling else cases


CEILINGS = ("cuda/ceiling/copy", "cuda/ceiling/gather-128", "cuda/ceiling/gather-512")


@dataclass(frozen=True)
class KernelPlan:
    """What one bench measures. `mean_of`: the rows whose step is also given as a geometric mean over A, B and C."""

    bench: str
    cpu: Callable[[], list[CaseGroup]]
    gpu: Callable[[], list[CaseGroup]]
    mean_of: str
    ceilings: tuple[str, ...] = ()

    @property
    def geomean(self) -> str:
        """The row over A, B and C, both kinds of ids."""
        return f"cuda/ABC/all/{self.mean_of}/{STEP_ROWWISE}"

    @property
    def averaged(self) -> list[str]:
        """The rows that it is the mean of."""
        return [f"cuda/{shape}/{kind}/{self.mean_of}/{STEP_ROWWISE}" for shape in "ABC" for kind in (ZIPF, UNIFORM)]


KERNELS = KernelPlan("kernels", cpu_groups, gpu_groups, "fp32", CEILINGS)
STEPS = KernelPlan("step", step_cpu_groups, step_gpu_groups, "int8+5%")


def all_cases(plan: KernelPlan = KERNELS) -> list[str]:
    """The name of every row of a full run on both devices."""
    cases = [case for group in plan.cpu() for case in cpu_cases(group)] + list(plan.ceilings)
    return [*cases, *(case for group in plan.gpu() for case in gpu_cases(group)), plan.geomean]
