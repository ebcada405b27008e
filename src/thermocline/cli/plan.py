"""`thermocline plan`: make a plan, explain it, and compare it with a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from thermocline.errors import BadInput, write_text

from .options import Debug, Json, Page, Quiet, check_file, command_group
from .output import console, deliver, known_width, progress_bar

if TYPE_CHECKING:
    from thermocline.plan import Plan, TablesConfig
    from thermocline.plan.cost.heat_input import HeatInput

app = command_group(
    "Plan precision, replicas and placement of every row; explain a plan; compare it with a run.",
    "thermocline plan make --tables tables.yaml --heat heat.tc --topology hgx-h200 --nodes 4 -o plan.json",
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file (plan.json).")]


@app.command(
    epilog="Example:  thermocline plan make --tables tables.yaml --heat heat.tc --topology hgx-h200 --nodes 4 --budget 40GiB "
    "--prune 1 --hash 0.125 -o plan.json --report plan.html"
)
def make(
    tables: Annotated[Path, typer.Option("--tables", metavar="FILE", help="Tables file.")],
    topology: Annotated[str, typer.Option("--topology", metavar="FILE", help="Topology file or preset.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PLAN", callback=check_file, help="Plan file to write (plan.json).")
    ],
    heat: Annotated[Path | None, typer.Option("--heat", metavar="FILE.tc", help="Heat file, written by heat profile.")] = None,
    zipf: Annotated[float | None, typer.Option("--zipf", help="Exponent of Zipf's law, in place of a heat file.")] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Number of nodes, in place of that of the topology.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="GPU memory for tables: 40GiB, or a share such as 1/2.", show_default="all")
    ] = None,
    goal: Annotated[Literal["train", "serve"], typer.Option("--goal", help="Optimize training or serving.")] = "train",
    gradients: Annotated[
        Literal["fp32", "bf16", "int8"], typer.Option("--gradients", help="Precision of gradients on the wire.")
    ] = "fp32",
    sums: Annotated[
        Literal["fp32", "bf16", "int8"],
        typer.Option("--sums", help="Precision of pooled sums on the wire; bf16 and int8 round them."),
    ] = "fp32",
    backend: Annotated[
        Literal["gloo", "nccl"] | None, typer.Option("--backend", help="Backend of the run.", show_default="of the topology")
    ] = None,
    prune: Annotated[int | None, typer.Option("--prune", min=0, help="Drop the rows of ids seen at most this often.")] = None,
    hash: Annotated[str | None, typer.Option("--hash", help="Bytes of all rows after hashing by heat: 0.125, 20GiB.")] = None,
    unify: Annotated[int | None, typer.Option("--unify", min=1, help="Join tables of at most this many rows.")] = None,
    shuffled: Annotated[bool, typer.Option("--shuffled", help="Samples are trained in random order.")] = False,
    report: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make a plan and explain it.

    --prune, --hash and --unify change what a model learns. Without them, the plan reports what each would save.
    """
    from thermocline.plan import TablesConfig, Topology, make_plan

    with progress_bar(quiet) as progress:
        progress(0, 2, "reading heat")
        given = TablesConfig.load(tables)
        known = _heat(given, heat, zipf)
        cluster = Topology.load(topology, nodes)
        progress(1, 2, "planning")
        plan = make_plan(given, known, cluster, budget, goal, gradients, shuffled, prune, hash, unify, backend, sums)
    _hand_out(plan, report, json, quiet, output)


def _hand_out(plan: Plan, report: Path | None, json: str | None, quiet: bool, output: Path | None = None) -> None:
    from thermocline.plan import explain, plan_page
    from thermocline.plan.report.explain import as_json

    with deliver(as_json(plan) if json else None, json, quiet) as shown:
        if shown:
            console().print(explain(plan, known_width()), markup=False, soft_wrap=True, end="")
        if output is not None:
            plan.save(output)
        if report is not None:
            write_text(report, plan_page(plan))


def _heat(tables: TablesConfig, heat: Path | None, zipf: float | None) -> HeatInput:
    """The heat file, or Zipf's law for all tables."""
    from thermocline.heat import Curve, HeatProfile

    if (heat is None) == (zipf is None):
        words = "give either --heat FILE.tc (from `thermocline heat profile`) or, without a log, --zipf 1.05"
        raise BadInput(words, parameter="heat")
    if heat is not None:
        return HeatProfile.load(heat)
    assert zipf is not None
    return {table.name: Curve.zipf(table.rows, zipf, 1e9) for table in tables.tables}


@app.command(epilog="Example:  thermocline plan show plan.json --report plan.html")
def show(
    plan: PlanFile,
    report: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Explain a plan: the choice for each table, its runner-up, the limiting constraint, the value of more hardware."""
    from thermocline.plan import Plan

    _hand_out(Plan.load(plan), report, json, quiet)


@app.command(epilog="Example:  thermocline plan check plan.json run.json")
def check(
    plan: PlanFile,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run file of this plan (run.json).")],
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare a run with the predictions of its plan. Exit code 1: a number is outside its tolerance."""
    from thermocline.plan import MeasuredRun, Plan, check_run

    compared = check_run(Plan.load(plan), MeasuredRun.load(run))
    with deliver(compared.to_json(), json, quiet and compared.ok) as shown:
        if shown:
            console().print(str(compared), markup=False, soft_wrap=True)
    if not compared.ok:
        raise typer.Exit(1)
