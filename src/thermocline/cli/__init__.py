"""The `thermocline` command: one subcommand for each step from a log to a server, each a thin layer over the library.

Conventions of every subcommand:

* `--help` ends with an example;
* `--json FILE` writes the result as JSON; with `-`, standard output carries nothing else;
* `--quiet` prints only problems, and progress bars show on a terminal only;
* an error is one paragraph on standard error, and `--debug` shows the traceback;
* exit codes: 0 success, 1 a check failed, 2 bad input, 3 internal error, 130 Ctrl-C.

Subcommands import what they need when they run: `thermocline --help` and shell completion must not load torch.
"""

from __future__ import annotations

import errno
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer

from thermocline import __version__
from thermocline.errors import ThermoclineError

from . import calibrate, checkpoint, data, doctor, estimate, heat, plan, publishes, serve, simulate, train, verify
from .options import Debug

BAD_INPUT, INTERNAL_ERROR, INTERRUPTED = 2, 3, 130

app = typer.Typer(
    name="thermocline",
    help="Embedding tables larger than memory: precision, copies and placement of each row by access frequency.",
    epilog="Example:  thermocline doctor",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(name="doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command(name="verify", epilog=verify.EXAMPLE)(verify.verify)
app.command(name="calibrate", epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.command(name="estimate", epilog=estimate.EXAMPLE)(estimate.estimate)
app.command(name="simulate", epilog=simulate.EXAMPLE)(simulate.simulate)
app.add_typer(train.app, name="train")
app.add_typer(data.app, name="data")
app.add_typer(heat.app, name="heat")
app.add_typer(plan.app, name="plan")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(serve.app, name="serve")
serve.app.command(name="publishes", epilog=publishes.LIST)(publishes.show)
serve.app.command(name="rollback", epilog=publishes.ROLL_BACK)(publishes.roll_back)
serve.app.command(name="resume", epilog=publishes.RESUME)(publishes.resume)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thermocline {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Options before the subcommand."""


def _without_flag_types(command: Any) -> Any:
    """Show flags in help texts as `--quiet`, not as `--quiet <bool>`."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _without_flag_types(child)
    return command


def main(command: typer.Typer = app, name: str = "thermocline") -> None:
    """Run a command line, by default this package's, and exit with its code."""
    pressed = _remember_interrupts()
    try:
        _without_flag_types(typer.main.get_command(command))()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if pressed:  # a compiled module that was being imported turned the interrupt into an error of its own
            sys.exit(INTERRUPTED)
        message, code = explain(error)
        print(f"{name}: {message}", file=sys.stderr)
        sys.exit(code)


def _remember_interrupts() -> list[int]:
    """A list that Ctrl-C appends to, besides what it does anyway."""
    pressed: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores Ctrl-C
        signal.signal(signal.SIGINT, interrupt)
    return pressed


def explain(error: Exception) -> tuple[str, int]:
    """Message and exit code for an error."""
    if isinstance(error, ThermoclineError):
        return str(error), BAD_INPUT
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", BAD_INPUT
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return f"standard output could not be written: {error.strerror}", BAD_INPUT
    return f"unexpected {type(error).__name__}: {error} (run again with --debug to see where)", INTERNAL_ERROR
