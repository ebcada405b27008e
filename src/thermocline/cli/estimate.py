"""`thermocline estimate`: bytes of tables in each precision, and the GPUs that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Debug, Json, Quiet
from .output import console, deliver, print_table

if TYPE_CHECKING:
    from thermocline.plan import TablesConfig, Topology
    from thermocline.plan.estimate import Estimate, GpuFit

EXAMPLE = "Example:  thermocline estimate --tables tables.yaml --memory 24GiB"

_MOST_TABLES = 30  # listed one by one


def estimate(
    tables: Annotated[
        str,
        typer.Option("--tables", metavar="FILE", help="Tables file, or model.py:Model for an nn.Module without arguments."),
    ],
    topology: Annotated[
        str | None, typer.Option("--topology", metavar="FILE", help="Topology file or preset, to count GPUs.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help="Memory of one GPU, such as 24GiB, in place of a topology.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Estimate the bytes of tables in each precision, on GPU and host, and the fewest GPUs that hold them.

    With --topology or --memory, the last lines are a verdict and what to run next.
    """
    from thermocline.plan import Topology, estimate_memory
    from thermocline.plan.estimate import notes

    if topology and memory:
        from thermocline.errors import BadInput

        raise BadInput(f"--memory {memory} and --topology {topology} both state GPU memory; give one", parameter="memory")
    preset, cluster = _one_gpu(memory) if memory else (topology, Topology.load(topology) if topology else None)
    found, batch = _read(tables)
    estimates = estimate_memory(found, cluster, batch)
    assumptions = list(notes(found, estimates, cluster, batch))
    ending = _verdict(tables, preset, memory, estimates, cluster) if cluster else None
    with deliver(_as_json(found, cluster, estimates, assumptions) | {"verdict": ending}, json, False) as shown:
        if shown:
            _print(found, cluster, estimates, [] if quiet else assumptions)
            for name, words in (ending or {}).items():
                console().print(f"{name + ':':9}{words}", markup=False, soft_wrap=name == "run")


def _one_gpu(memory: str) -> tuple[str, Topology]:
    """One GPU with this memory, and the preset that is nearest to it."""
    from thermocline.plan.topology import presets
    from thermocline.plan.units import read_bytes

    room = read_bytes(memory)
    single = {name: one for name, one in presets().items() if name.startswith("gpu-")}
    name = min(single, key=lambda name: abs(single[name].gpu.memory - room))
    gpu = single[name].gpu.model_copy(update={"memory": room})
    return name, single[name].model_copy(update={"gpu": gpu, "name": f"one GPU with {memory}"})


def _verdict(
    tables: str, preset: str | None, memory: str | None, estimates: Sequence[Estimate], cluster: Topology
) -> dict[str, str]:
    """Whether the tables fit, and what to run next: Python for a model, `plan make` for a tables file."""
    from thermocline.plan.estimate import AS_GIVEN, verdict
    from thermocline.plan.topology import Topology, presets

    found, words = verdict(estimates, cluster)
    if found is None:
        least, known = min(each.total for each in estimates), presets()
        larger = [name for name, one in known.items() if one.gpu.memory * one.world_size > least]
        name = min(larger, key=lambda name: known[name].gpu.memory * known[name].world_size, default="cluster.yaml")
        return {"verdict": words, "run": f"thermocline estimate --tables {tables} --topology {name}"}
    if ":" in tables:
        cache = f", cache={found.choice.cache}" if found.choice.cache else ""
        changed = f"thermocline.convert_(model, thermocline.RowConfig({found.choice.precision!r}{cache}))"
        return {"verdict": words, "run": "the model as it is" if found.choice == AS_GIVEN else changed}
    assert preset is not None
    budget = f" --budget {memory}" if memory and cluster.gpu.memory < Topology.load(preset).gpu.memory else ""
    return {
        "verdict": words,
        "run": f"thermocline plan make --tables {tables} --zipf 1.05 --topology {preset}{budget} -o plan.json",
    }


def _read(given: str) -> tuple[TablesConfig, int | None]:
    """The tables of a file, or of a model with batch 0, because a model does not know its batch."""
    from thermocline.errors import BadInput
    from thermocline.plan import TablesConfig
    from thermocline.plan.io import read_data

    path, _, name = given.rpartition(":")
    if not path.endswith(".py"):
        if given.endswith(".py"):
            words = f"{given} is a Python file; name its model too, as in {given}:Model"
            raise BadInput(words, parameter="tables", value=given)
        return TablesConfig.load(given), None
    from thermocline.nn.interop.find_tables import find_tables, load_model, optimizers

    model = load_model(path, name)
    tables, used = find_tables(model), optimizers(model)
    if not tables:
        words = f"{name} of {path} has no nn.Embedding, nn.EmbeddingBag or thermocline module"
        raise BadInput(words, parameter="tables", value=given)
    if len(used) > 1:
        names = ", ".join(sorted(used))
        words = f"the modules of {name} have different optimizers ({names}); estimate them one by one"
        raise BadInput(words, parameter="optimizer")
    data: dict[str, Any] = {"batch": 1, "tables": tables} | ({"optimizer": used.pop()} if used else {})
    return read_data(TablesConfig, data, given), 0


def _as_json(
    tables: TablesConfig, topology: Topology | None, estimates: Sequence[Estimate], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "tables": [{"name": table.name, "rows": table.rows, "dim": table.dim} for table in tables.tables],
        "optimizer": tables.optimizer,
        "topology": topology.model_dump(mode="json") if topology else None,
        "estimates": [found.to_json() for found in estimates],
        "notes": list(notes),
    }


def _print(tables: TablesConfig, topology: Topology | None, estimates: Sequence[Estimate], notes: Sequence[str]) -> None:
    from thermocline.plan.cost.memory import PARTS
    from thermocline.plan.units import show_bytes

    out = console()
    sizes, fits = [], []
    for found in estimates:
        parts = [show_bytes(found.parts[part]) for part in PARTS]
        sizes.append((found.choice.name, *parts, show_bytes(found.total), show_bytes(found.host)))
        fits.append((found.choice.name, _fit_words(found.on_gpu), _fit_words(found.on_host)))
    parts_heads = [part.replace(" ", "\n") for part in PARTS]
    print_table(("precision", *parts_heads, "total", "on hosts,\nif codes are"), sizes, ("precision",))
    if topology:
        memory = show_bytes(topology.gpu.memory)
        out.print(f"\n{topology.name or 'topology'}: {memory} per GPU, {topology.gpus_per_node} GPUs per node")
        heads = ("GPUs needed", "everything on GPUs", "codes on hosts")
        print_table(heads, fits, heads)
    out.print()
    largest = sorted(tables.tables, key=lambda t: -t.rows * t.dim)[:_MOST_TABLES]
    rows = [(t.name, f"{t.rows:,}", str(t.dim), *(show_bytes(each.tables[t.name]) for each in estimates)) for t in largest]
    if len(tables.tables) > len(largest):
        rows.append((f"and {len(tables.tables) - len(largest):,} smaller tables",))
    print_table(("table", "rows", "dim", *(found.choice.name.replace(" + ", "\n+ ") for found in estimates)), rows, ("table",))
    for note in notes:
        out.print(f"[dim]{note}[/dim]")


def _fit_words(fit: GpuFit | None) -> str:
    from thermocline.plan.units import show_bytes

    if fit is None:
        return "-"
    host = f", {show_bytes(fit.host_bytes)} per host" if fit.host_bytes else ""
    nodes = f" on {fit.nodes:,} nodes" if fit.nodes > 1 else ""
    return f"{fit.gpus:,}{nodes} ({show_bytes(fit.gpu_bytes)} per GPU{host})"
