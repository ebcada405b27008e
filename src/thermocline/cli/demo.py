"""`thermocline demo`: the whole story, small enough for a laptop. `make demo` runs it."""

from __future__ import annotations

from thermocline.cli.checkup import examine
from thermocline.cli.doctor import summary
from thermocline.cli.options import Debug
from thermocline.cli.output import console

EXAMPLE = "Example:  thermocline demo"


def demo(debug: Debug = False) -> None:
    """Show in a few minutes, on any machine, what this version can do."""
    run_demo()


def run_demo() -> None:
    """Look at the machine. The steps of the story are added here as they come to exist."""
    console().print(summary(examine()))
