"""The `thermocline` command: one verb for each step from a log to a server, each a thin cover of the library.

The style every verb keeps:

* `--help` ends with an example;
* a result can be had as JSON (`--json FILE`, `-` for standard output, which then carries nothing else);
* `--quiet` prints only what needs attention, and progress shows on a terminal only;
* an error is one paragraph on standard error, and `--debug` shows where it came from;
* the exit code is 0 when all is well, 1 when a check failed, 2 for bad input, 3 for a fault of ours, 130 after Ctrl-C.

Verbs import what they need when they run. Nothing here may import torch at the top: `thermocline --help` and shell
completion have to answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from thermocline import __version__
from thermocline.errors import ThermoclineError

from . import calibrate, checkpoint, data, demo, doctor, estimate, heat, plan, serve, serve_status, simulate, train, verify
from .options import Debug

BAD_INPUT, OUR_FAULT, INTERRUPTED = 2, 3, 130

app = typer.Typer(
    name="thermocline",
    help="Embedding tables that do not fit: heat decides each row's precision, copies and place.",
    epilog="Example:  thermocline doctor",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(name="doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command(name="verify", epilog=verify.EXAMPLE)(verify.verify)
app.command(name="demo", epilog=demo.EXAMPLE)(demo.demo)
app.command(name="calibrate", epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.command(name="estimate", epilog=estimate.EXAMPLE)(estimate.estimate)
app.command(name="simulate", epilog=simulate.EXAMPLE)(simulate.simulate)
app.add_typer(train.app, name="train")
app.add_typer(data.app, name="data")
app.add_typer(heat.app, name="heat")
app.add_typer(plan.app, name="plan")
app.add_typer(checkpoint.app, name="checkpoint")
serve.app.command(name="status", epilog=serve_status.EXAMPLE)(serve_status.status)
app.add_typer(serve.app, name="serve")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thermocline {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Options that come before the verb."""


def main(command: typer.Typer = app, name: str = "thermocline") -> None:
    """Run a command line, by default this package's, and exit with its code."""
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        message, code = explain(error)
        print(f"{name}: {message}", file=sys.stderr)
        sys.exit(code)


def explain(error: Exception) -> tuple[str, int]:
    """What to tell the user about `error` in one paragraph, and the exit code that goes with it."""
    if isinstance(error, ThermoclineError):
        return str(error), BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", BAD_INPUT
    return f"unexpected {type(error).__name__}: {error} (run again with --debug to see where)", OUR_FAULT
