"""`thermocline plan`: heat, budget and topology turned into decisions."""

from __future__ import annotations

import typer

app = typer.Typer(help="Decide precision, copies and place of every row.", no_args_is_help=True)
