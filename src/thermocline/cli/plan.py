"""`thermocline plan`: heat, budget and topology turned into decisions, shown, and held against what was measured."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thermocline.errors import BadInput

from .options import Debug, Json, Quiet
from .output import console, progress_bar, write_json

if TYPE_CHECKING:
    from thermocline.plan.cost.heat_input import HeatOfTables
    from thermocline.plan.tables import Tables

app = typer.Typer(
    help="Decide precision, copies and place of every row; explain it; check it against a run.",
    epilog="Example:  thermocline plan make --tables tables.yaml --heat heat.tc --topology hgx-h200 --nodes 4 -o plan.json",
    no_args_is_help=True,
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]
Html = Annotated[Path | None, typer.Option("--report", metavar="FILE.html", help="Write the plan as one HTML page.")]


class GoalName(str, Enum):
    """What to make fast."""

    train = "train"
    serve = "serve"


class WireName(str, Enum):
    """Gradients on the wire."""

    fp32 = "fp32"
    bf16 = "bf16"


@app.command(
    epilog="Example:  thermocline plan make --tables tables.yaml --heat heat.tc --topology hgx-h200 --nodes 4 --budget 40GiB "
    "--prune 1 --hash 0.125 -o plan.json --report plan.html"
)
def make(
    tables: Annotated[Path, typer.Option("--tables", metavar="FILE", help="Tables file.")],
    topology: Annotated[str, typer.Option("--topology", metavar="FILE", help="Topology file or preset.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PLAN", help="The plan.json to write.")],
    heat: Annotated[Path | None, typer.Option("--heat", metavar="FILE.tc", help="Heat file of the tables' features.")] = None,
    zipf: Annotated[float | None, typer.Option("--zipf", help="Without a log: Zipf's law with this exponent.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Plan for so many nodes of the topology.")] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="Memory of a card for tables.", show_default="all")] = None,
    goal: Annotated[GoalName, typer.Option("--goal", help="Training steps or requests.")] = GoalName.train,
    gradients: Annotated[WireName, typer.Option("--gradients", help="Their precision on the wire.")] = WireName.fp32,
    prune: Annotated[int | None, typer.Option("--prune", min=0, help="No rows for ids seen at most so often.")] = None,
    hash: Annotated[str | None, typer.Option("--hash", help="Rows by heat in so much of their bytes: 0.125, 20GiB.")] = None,
    unify: Annotated[int | None, typer.Option("--unify", min=1, help="Tables of at most so many rows share one.")] = None,
    shuffled: Annotated[bool, typer.Option("--shuffled", help="Samples are trained in random order, not the log's.")] = False,
    report: Html = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make a plan, and say why it is as it is.

    --prune, --hash and --unify change what a model learns: none is done unasked, but the plan says what each would save.
    """
    from thermocline.plan.make import make_plan
    from thermocline.plan.report.explain import as_json, explain
    from thermocline.plan.report.page import page
    from thermocline.plan.tables import Tables
    from thermocline.plan.topology import Topology

    for target in (output, report):
        if target is not None and not target.resolve().parent.is_dir():
            raise BadInput(f"the folder of '{target}' does not exist; make it first")
    with progress_bar(quiet) as progress:
        progress(0, 2, "reading heat")
        given = Tables.load(tables)
        known = _heat(given, heat, zipf)
        cluster = Topology.load(topology, nodes)
        progress(1, 2, "planning")
        plan = make_plan(given, known, cluster, budget, goal.value, gradients.value, shuffled, prune, hash, unify)
    plan.save(output)
    if report is not None:
        report.write_text(page(plan), encoding="utf-8")
    if json:
        write_json(as_json(plan), json)
    if json != "-" and not quiet:
        console().print(explain(plan), markup=False, soft_wrap=True, end="")


def _heat(tables: Tables, heat: Path | None, zipf: float | None) -> HeatOfTables:
    """The heat file, or the same law for all tables."""
    from thermocline.heat.curve import Curve
    from thermocline.heat.profile import HeatProfile

    if (heat is None) == (zipf is None):
        raise BadInput("give either --heat FILE.tc (from `thermocline heat profile`) or, before there is a log, --zipf 1.05")
    if heat is not None:
        return HeatProfile.load(heat)
    assert zipf is not None
    return {table.name: Curve.zipf(table.rows, zipf, 1e9) for table in tables.tables}


@app.command(epilog="Example:  thermocline plan show plan.json --report plan.html")
def show(
    plan: PlanFile,
    report: Html = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Explain a plan: what was chosen, the runner-up, what binds, what more would buy."""
    from thermocline.plan.model import Plan
    from thermocline.plan.report.explain import as_json, explain
    from thermocline.plan.report.page import page

    found = Plan.load(plan)
    if report is not None:
        report.write_text(page(found), encoding="utf-8")
    if json:
        write_json(as_json(found), json)
    if json != "-" and not quiet:
        console().print(explain(found), markup=False, soft_wrap=True, end="")


@app.command(epilog="Example:  thermocline plan check plan.json run.json")
def check(
    plan: PlanFile,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run.json of a run of this plan.")],
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Put what a run measured beside what its plan predicted; leaves with 1 where they differ by more than is asked."""
    from thermocline.plan.model import Plan
    from thermocline.plan.report.check_run import compare
    from thermocline.plan.run_file import Run

    compared = compare(Plan.load(plan), Run.load(run))
    if json:
        write_json(compared.to_json(), json)
    if json != "-" and not (quiet and compared.ok):
        console().print(str(compared), markup=False, soft_wrap=True)
    if not compared.ok:
        raise typer.Exit(1)
