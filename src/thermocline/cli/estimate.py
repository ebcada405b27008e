"""`thermocline estimate`: what tables take at each precision, and how many cards hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .options import Debug, Json, Quiet
from .output import console, write_json

if TYPE_CHECKING:
    from thermocline.plan.estimate import Estimate, Fit
    from thermocline.plan.tables import Tables
    from thermocline.plan.topology import Topology

EXAMPLE = "Example:  thermocline estimate --tables tables.yaml --topology hgx-h200"

_SHOWN = 30  # tables that are listed one by one


def estimate(
    tables: Annotated[
        str,
        typer.Option("--tables", metavar="FILE", help="Tables file, or model.py:Model, an nn.Module made without arguments."),
    ],
    topology: Annotated[
        str | None, typer.Option("--topology", metavar="FILE", help="Topology file or preset, to count its cards.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Bytes of tables at each precision and cache, on card and host, and the fewest cards that hold them."""
    from thermocline.plan.estimate import estimate as estimate_all
    from thermocline.plan.estimate import notes
    from thermocline.plan.topology import Topology

    cluster = Topology.load(topology) if topology else None
    found, batch = _read(tables)
    estimates = estimate_all(found, cluster, batch)
    said = list(notes(found, estimates, cluster, batch))
    if json:
        write_json(_as_json(found, cluster, estimates, said), json)
    if json != "-":
        _print(found, cluster, estimates, [] if quiet else said)


def _read(given: str) -> tuple[Tables, int | None]:
    """The tables of a file or of a model, which does not know its batch (0)."""
    from thermocline.errors import BadInput
    from thermocline.plan.io import read_data
    from thermocline.plan.tables import Tables

    path, _, name = given.rpartition(":")
    if not path.endswith(".py"):
        if given.endswith(".py"):
            raise BadInput(f"{given} is a Python file; name the model in it too, as in {given}:Model")
        return Tables.load(given), None
    from thermocline.nn.find_tables import find_tables, load_model, optimizers

    model = load_model(path, name)
    tables, used = find_tables(model), optimizers(model)
    if not tables:
        raise BadInput(f"{name} of {path} has no nn.Embedding, nn.EmbeddingBag or module of thermocline")
    if len(used) > 1:
        raise BadInput(f"the modules of {name} have different optimizers ({', '.join(sorted(used))}); estimate them one by one")
    data: dict[str, Any] = {"batch": 1, "tables": tables} | ({"optimizer": used.pop()} if used else {})
    return read_data(Tables, data, given), 0


def _as_json(tables: Tables, topology: Topology | None, estimates: Sequence[Estimate], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "tables": [{"name": table.name, "rows": table.rows, "dim": table.dim} for table in tables.tables],
        "optimizer": tables.optimizer,
        "topology": topology.model_dump(mode="json") if topology else None,
        "estimates": [found.to_json() for found in estimates],
        "notes": list(notes),
    }


def _print(tables: Tables, topology: Topology | None, estimates: Sequence[Estimate], notes: Sequence[str]) -> None:
    from thermocline.plan.cost.memory import PARTS
    from thermocline.plan.units import show_bytes

    out = console()
    whole = Table("rows kept as", *PARTS, "all", "on hosts, if codes are", box=None, pad_edge=False)
    fits = Table("cards needed", "everything on cards", "codes on hosts", box=None, pad_edge=False)
    for column in whole.columns[1:]:
        column.justify = "right"
    for found in estimates:
        sizes = [show_bytes(found.parts[part]) for part in PARTS]
        whole.add_row(found.choice.name, *sizes, show_bytes(found.total), show_bytes(found.host))
        fits.add_row(found.choice.name, _cards(found.on_card), _cards(found.on_host))
    out.print(whole)
    if topology:
        out.print(f"\n{topology.name or 'cards'}: {show_bytes(topology.card.memory)} a card, {topology.cards_per_node} a node")
        out.print(fits)
    out.print()
    out.print(_by_table(tables, estimates))
    for note in notes:
        out.print(f"[dim]{note}[/dim]")


def _cards(fit: Fit | None) -> str:
    from thermocline.plan.units import show_bytes

    if fit is None:
        return "-"
    host = f", {show_bytes(fit.host_bytes)} a host" if fit.host_bytes else ""
    nodes = f" on {fit.nodes:,} nodes" if fit.nodes > 1 else ""
    return f"{fit.cards:,}{nodes} ({show_bytes(fit.card_bytes)} a card{host})"


def _by_table(tables: Tables, estimates: Sequence[Estimate]) -> Table:
    from thermocline.plan.units import show_bytes

    table = Table("table", "rows", "dim", *(found.choice.name for found in estimates), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    largest = sorted(tables.tables, key=lambda t: -t.rows * t.dim)[:_SHOWN]
    for given in largest:
        sizes = (show_bytes(found.tables[given.name]) for found in estimates)
        table.add_row(given.name, f"{given.rows:,}", str(given.dim), *sizes)
    if len(tables.tables) > len(largest):
        table.add_row(f"and {len(tables.tables) - len(largest):,} smaller ones")
    return table
