"""`thermocline calibrate`: measure memory and links of this machine, or under torchrun of the cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import Debug, Json, Quiet, check_folder
from .output import console, deliver, progress_bar, table

EXAMPLE = (
    "Example:  thermocline calibrate -o cluster.yaml   (a cluster: torchrun --nnodes 2 --nproc-per-node 8 ... "
    "-m thermocline calibrate -o cluster.yaml)"
)


def calibrate(
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=check_folder, help="Topology file to write (default: standard output)."
        ),
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List known machines instead of measuring.")] = False,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure memory and link bandwidths of this machine, or under torchrun of the cluster, in under two minutes."""
    if presets:
        _list_presets(json)
        return
    from thermocline.distributed import calibrate as measure
    from thermocline.plan.calibration import to_yaml

    with progress_bar(quiet) as progress:
        found = measure(progress)
    if found is None:  # not the first rank
        return
    text = to_yaml(found)
    if output:
        Path(output).write_text(text, encoding="utf-8")
    if deliver(found.model_dump(mode="json"), json, quiet):
        sys.stdout.write(text)


def _list_presets(json: str | None) -> None:
    from thermocline.plan.topology import presets
    from thermocline.plan.units import show_bytes, show_rate

    found, rows = presets(), []
    if not deliver({name: topology.model_dump(mode="json") for name, topology in found.items()}, json, False):
        return
    for name, one in found.items():
        network = show_rate(one.links.cluster.bandwidth) if one.links.cluster else "-"
        rates = (show_bytes(one.gpu.memory), show_rate(one.gpu.bandwidth), show_rate(one.links.node.bandwidth), network)
        rows.append((name, str(one.gpus_per_node), *rates, one.date, one.source))
    heads = ("preset", "GPUs per node", "memory", "reads", "node link", "network", "date", "source")
    console().print(table(heads, rows, heads))
