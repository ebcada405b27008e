"""Cases of the kernels and step benchmarks: shapes, workloads, and groups of rows that share one build of tables.

The name of a row is device/shape/ids/precision/operation, and on a CPU /threads:

    cpu/8x1M/zipf/int8/forward/2              against the best of the required peers
    cpu/8x1M/zipf/int8/step-sgd-vs-torch/2    a step is forward + backward + update
    cuda/A/uniform/int8/forward               fp32 output
    cuda/A/uniform/int8/forward-fp16          fp16 output
    cuda/A/uniform/int8/forward-of-ceiling    against the memory bandwidth of the GPU
    cuda/A/zipf/int8+5%/step-rowwise_adagrad  with a full-precision cache of 5% of the rows; peers have no cache

A `KernelPlan` lists the cases of one benchmark: `KERNELS`, and `STEPS`, training steps with a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

ZIPF, UNIFORM = "zipf", "uniform"
FORWARD, STEP_SGD, STEP_ROWWISE = "forward", "step-sgd", "step-rowwise_adagrad"


@dataclass(frozen=True)
class Shape:
    """Equal tables, each looked up by `batch` bags of `pooling` ids; unpooled, every id gives a row of output."""

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
        """Shape of the output of all tables."""
        return (self.batch, self.tables * self.dim) if self.pooled else (self.lookups, self.dim)

    def quick(self) -> Shape:
        """The same shape, small enough for a smoke test."""
        return replace(self, rows=max(1000, self.rows // 200), batch=max(32, self.batch // 32))


@dataclass(frozen=True)
class Workload:
    """The work of every contender of a race. `cache`: share of the rows that ours keeps in full precision."""

    shape: Shape
    precision: str
    operation: str
    output: str = "fp32"
    id_dtype: str = "int64"
    cache: float = 0.0
    staged: float = 0.0  # share of the rows that fits on the GPU as stored; 0: three batches

    @property
    def optimizer(self) -> str | None:
        return None if self.operation == FORWARD else self.operation.removeprefix("step-")

    @property
    def label(self) -> str:
        """Operation, as in the names of rows."""
        return self.operation if self.output == "fp32" else f"{self.operation}-{self.output}"

    @property
    def stored(self) -> str:
        """Precision, cache and staged share, as in the names of rows."""
        staged = f"+staged{self.staged:.0%}" if self.staged else ""
        return f"{self.precision}+{self.cache:.0%}{staged}" if self.cache else self.precision

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Workload:
        return cls(**{**value, "shape": Shape(**value["shape"])})


class Baseline(NamedTuple):
    """The peer of a row: the best contender of these libraries, all of which must be available."""

    suffix: str
    libraries: tuple[str, ...]
    without: tuple[str, ...] = ()  # excluded contenders


@dataclass(frozen=True)
class CaseGroup:
    """Rows that share one build of tables."""

    job: Workload
    baselines: tuple[Baseline, ...]
    kinds: tuple[str, ...] = (ZIPF,)
    ceiling: bool = False

    def case(self, device: str, kind: str, suffix: str = "", threads: int | None = None) -> str:
        parts = [device, self.job.shape.name, kind, self.job.stored, self.job.label + suffix]
        return "/".join(parts if threads is None else [*parts, str(threads)])

    def quick(self) -> CaseGroup:
        return replace(self, job=replace(self.job, shape=self.job.shape.quick()))


FBGEMM = Baseline("", ("fbgemm",))
# torch's quantized operators look up one table per call. Ours and FBGEMM's write all tables into one tensor, so torch is raced
# with joined outputs; without joining it is reported in a separate row.
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
    """Groups of the kernels benchmark on a CPU."""
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
    """Groups of the kernels benchmark on a GPU, required ones first.

    FBGEMM's inference kernels take int32 ids, so quantized lookups of all contenders do.
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
    """Training steps with a cache, on a GPU. Each kind of ids has its own group: the steady state of a
    cache differs between them."""
    gated, reported = [], []
    for shape in shapes or GPU_SHAPES:
        for kind in (ZIPF, UNIFORM):
            gated.append(CaseGroup(Workload(shape, "int8", STEP_ROWWISE, cache=0.05), (FBGEMM,), (kind,)))
            gated.append(CaseGroup(Workload(shape, "int4", STEP_ROWWISE, cache=0.05), (OURS_INT8, FBGEMM), (kind,)))
            reported.append(CaseGroup(Workload(shape, "int4", STEP_ROWWISE, cache=0.01), (FBGEMM,), (kind,)))
        reported += [CaseGroup(Workload(shape, p, STEP_ROWWISE), (FBGEMM,), (ZIPF, UNIFORM)) for p in ("int8", "int4")]
    return gated + reported


def cpu_cases(group: CaseGroup) -> list[str]:
    return [group.case("cpu", k, r.suffix, t) for k in group.kinds for r in group.baselines for t in CPU_THREADS]


def gpu_cases(group: CaseGroup) -> list[str]:
    cases = [group.case("cuda", kind, baseline.suffix) for kind in group.kinds for baseline in group.baselines]
    return [*cases, group.case("cuda", UNIFORM, "-of-ceiling")] if group.ceiling else cases


CEILINGS = ("cuda/ceiling/copy", "cuda/ceiling/gather-128", "cuda/ceiling/gather-512")


@dataclass(frozen=True)
class KernelPlan:
    """The cases of one benchmark. `mean_of`: stored rows whose step is also averaged over A, B and C (geometric mean)."""

    bench: str
    cpu: Callable[[], list[CaseGroup]]
    gpu: Callable[[], list[CaseGroup]]
    mean_of: str
    ceilings: tuple[str, ...] = ()

    @property
    def geomean(self) -> str:
        """Name of the averaged row."""
        return f"cuda/ABC/all/{self.mean_of}/{STEP_ROWWISE}"

    @property
    def averaged(self) -> list[str]:
        """Names of the rows that are averaged."""
        return [f"cuda/{shape}/{kind}/{self.mean_of}/{STEP_ROWWISE}" for shape in "ABC" for kind in (ZIPF, UNIFORM)]


KERNELS = KernelPlan("kernels", cpu_groups, gpu_groups, "fp32", CEILINGS)
STEPS = KernelPlan("step", step_cpu_groups, step_gpu_groups, "int8+5%")


def all_cases(plan: KernelPlan = KERNELS) -> list[str]:
    """The name of every row of a full run on both devices."""
    cases = [case for group in plan.cpu() for case in cpu_cases(group)] + list(plan.ceilings)
    return [*cases, *(case for group in plan.gpu() for case in gpu_cases(group)), plan.geomean]
