"""`thermocline calibrate`: measure memory and links of this machine, or under torchrun of the cluster."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from thermocline.errors import write_text

from .options import Debug, Json, Quiet, check_file
from .output import deliver, print_table, progress_bar

EXAMPLE = (
    "Example:  thermocline calibrate -o cluster.yaml   (a cluster: torchrun --nnodes 2 --nproc-per-node 8 ... "
    "-m thermocline calibrate -o cluster.yaml)"
)


def calibrate(
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=check_file, help="Topology file to write (default: standard output)."
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
    with deliver(found.model_dump(mode="json"), json, quiet) as shown:
        if shown:
            sys.stdout.write(text)
        if output:
            write_text(output, text)


def _list_presets(json: str | None) -> None:
    from thermocline.plan.topology import presets
    from thermocline.plan.units import show_bytes, show_rate

    found, rows = presets(), []
    with deliver({name: topology.model_dump(mode="json") for name, topology in found.items()}, json, False) as shown:
        if not shown:
            return
        for name, one in found.items():
            network = show_rate(one.links.cluster.bandwidth) if one.links.cluster else "-"
            rates = (show_bytes(one.gpu.memory), show_rate(one.gpu.bandwidth), show_rate(one.links.node.bandwidth), network)
            rows.append((name, str(one.gpus_per_node), *rates, one.date, one.source))
        heads = ("preset", "GPUs per node", "memory", "reads", "node link", "network", "date", "source")
        print_table(heads, rows, heads)
