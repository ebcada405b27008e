"""Commands for kernels, training steps and tables on one machine."""

from __future__ import annotations

import os
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thermocline.cli.options import Debug, Device, DeviceName, Json, Quiet
from thermocline.cli.output import ReportProgress
from thermocline.errors import BadInput

from .shared import Filter, PeerPython, Quick, Record, app, measure

if TYPE_CHECKING:
    from benchmarks.kernels.cases import KernelPlan

SmokeTest = Annotated[bool, typer.Option("--quick", help="Small tables, also on a CPU: a smoke test.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Measure the peers in the same run.")]


@app.command(epilog="Example:  python -m benchmarks kernels --device cpu --filter int8 --json kernels_cpu.json")
def kernels(
    device: Device = None,
    filter: Filter = None,
    quick: Quick = False,
    peers: Peers = True,
    peer_python: PeerPython = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time every kernel against its peers. Without --device, on every device found."""
    from benchmarks.kernels import cases

    _race(cases.KERNELS, device, filter, quick, peers, peer_python, json, quiet)


@app.command(epilog="Example:  python -m benchmarks step --device cpu --filter 26x100k --json step_cpu.json")
def step(
    device: Device = None,
    filter: Filter = None,
    quick: Quick = False,
    peers: Peers = True,
    peer_python: PeerPython = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time training steps of tables with a cache against full-precision peers without one."""
    from benchmarks.kernels import cases

    _race(cases.STEPS, device, filter, quick, peers, peer_python, json, quiet)


def _race(
    plan: KernelPlan, device: DeviceName | None, filter: str | None, quick: bool, peers: bool, peer_python: Path | None,
    json: str | None, quiet: bool,
) -> None:  # fmt: skip
    """Measure a plan against its peers."""
    from benchmarks.kernels import benchmark as bench

    def run(progress: ReportProgress) -> Record:
        return bench.run(
            device=device, filter=filter, quick=quick, peers=peers, peer_python=peer_python, progress=progress, plan=plan
        )

    measure(json, quiet, run)


@app.command(epilog="Example:  python -m benchmarks memory --device cpu --json memory.json")
def memory(device: Device = None, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Compare the bytes of tables with those of fp32 rows, and `memory()` with allocated bytes."""
    from benchmarks.kernels import benchmark as kernels
    from benchmarks.tables import memory as bench

    devices = kernels.devices(device)
    measure(json, quiet, lambda progress: bench.run(devices, progress))


@app.command(epilog="Example:  python -m benchmarks elastic --device cpu --json elastic_cpu.json")
def elastic(
    device: Device = None,
    quick: SmokeTest = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time tables whose ids come and go against tables with hashed ids. Without --device, on the GPU if there is one."""
    import torch

    from benchmarks.tables import elastic as bench

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    measure(json, quiet, lambda progress: bench.run(place, quick, progress))


@app.command(epilog="Example:  python -m benchmarks hits --data log.parquet --json hits.json")
def hits(
    data: Annotated[
        list[Path], typer.Option("--data", metavar="FILE", help="Parquet with C1 to C26, or item and user; may be repeated.")
    ],
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Replay real logs through the cache and through an optimal cache. With --json, a plot is written beside FILE."""
    from benchmarks.tables import hits as bench
    from benchmarks.tables import hits_plot

    measure(json, quiet, lambda progress: bench.run(data, progress), picture=hits_plot.draw)


@app.command(epilog="Example:  python -m benchmarks sweep --device cpu --threads 2 --seed 3 --json sweep_cpu.json")
def sweep(
    device: Device = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the workloads.")] = 1,
    workloads: Annotated[int, typer.Option("--workloads", min=1, help="Number of workloads.")] = 40,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads on a CPU.", show_default="those of torch")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Timed seconds of each workload.")] = 8.0,
    limit: Annotated[float, typer.Option("--limit", help="Seconds after which no workload starts.")] = 440.0,
    merge: Annotated[
        list[Path] | None,
        typer.Option("--merge", metavar="FILE", help="Sum up these results of earlier runs, measure nothing; may be repeated."),
    ] = None,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time workloads drawn from a family of production shapes against FBGEMM. With --json, a picture is written beside FILE.

    Without --device, on the GPU if there is one. FBGEMM is measured where `import fbgemm_gpu` works.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: idle threads of one contender must not spin
    import torch

    from benchmarks.sweep import benchmark as bench
    from benchmarks.sweep import summary

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place == "cuda" and not merge and not torch.cuda.is_available():
        raise BadInput("sweep --device cuda needs a CUDA GPU, and torch finds none; use --device cpu", feature="sweep")

    def run(progress: ReportProgress) -> Record:
        if merge:
            return summary.merge([loads(path.read_text(encoding="utf-8")) for path in merge])
        return bench.run(place, seed, workloads, threads, seconds, limit, quick, progress)

    measure(json, quiet, run, summary.table, summary.draw)


def gpu_or_quick(what: str, quick: bool) -> str:
    """The device of a benchmark that needs a GPU."""
    import torch

    if not torch.cuda.is_available() and not quick:
        raise BadInput(f"{what} needs a CUDA GPU, and torch finds none; --quick runs a smoke test on the CPU", feature=what)
    return "cuda" if torch.cuda.is_available() else "cpu"


@app.command(epilog="Example:  python -m benchmarks capacity --json capacity.json")
def capacity(
    quick: SmokeTest = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train as many rows as one GPU holds, and time steps on tables of 10M to 3,000M rows."""
    from benchmarks.tables import capacity as bench

    device = gpu_or_quick("capacity", quick)
    sizes = bench.QUICK if quick else bench.SIZES
    measure(json, quiet, lambda progress: bench.run(device, sizes, progress, judged=not quick))


@app.command(epilog="Example:  python -m benchmarks host --filter /B/ --json host.json")
def host(
    filter: Filter = None,
    quick: SmokeTest = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Time training steps on tables in host memory against FBGEMM with equal GPU memory."""
    from benchmarks.host import benchmark as bench
    from benchmarks.kernels import cases

    device = gpu_or_quick("host", quick)
    shapes = [shape.quick() if quick else shape for shape in cases.GPU_SHAPES]
    measure(json, quiet, lambda progress: bench.run(device, shapes, filter, not quick, progress))


@app.command(epilog="Example:  python -m benchmarks train --json train.json")
def train(
    quick: SmokeTest = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a DLRM end to end on tables in host memory: int8 and int4 rows against fp32 rows, with equal GPU memory."""
    from benchmarks.host import train as bench
    from benchmarks.kernels import cases

    device = gpu_or_quick("host", quick)
    shape = bench.QUICK_SHAPE if quick else cases.A
    measure(json, quiet, lambda progress: bench.run(device, shape, not quick, progress))


@app.command("lookup-tilings", epilog="Example:  python -m benchmarks lookup-tilings --json tilings.json")
def lookup_tilings(
    limit: Annotated[float, typer.Option("--limit", help="Seconds after which no workload starts.")] = 230.0,
    processes: Annotated[int, typer.Option("--processes", help="Processes that compile kernels.")] = 12,
    peers: Peers = True,
    quick: Quick = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Race tilings of the lookup of bags against the lookup in use. Needs a GPU; --quick runs in Triton's interpreter."""
    from benchmarks.tilings import benchmark as bench

    device = gpu_or_quick("lookup-tilings", quick)
    measure(json, quiet, lambda progress: bench.run(device, limit, quick, processes, peers=peers, progress=progress))
