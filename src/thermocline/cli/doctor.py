"""`thermocline doctor`: is this machine ready, and if not, which command makes it so?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from .machine_checks import Finding, examine
from .options import Debug, Json, Quiet
from .output import console, write_json

EXAMPLE = "Example:  thermocline doctor --json machine.json"

STYLES = {"ok": "green", "warn": "yellow", "broken": "bold red"}


def doctor(json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Look at this machine: every line is ok, warn or broken, with the command that mends it."""
    findings = examine()
    broken = any(finding.state == "broken" for finding in findings)
    if json:
        write_json({"ok": not broken, "checks": [asdict(finding) for finding in findings]}, json)
    if json != "-":
        out = console()
        for finding in findings:
            if finding.state != "ok" or not quiet:
                _print(out, finding)
        out.print(summary(findings))
    if broken:
        raise typer.Exit(1)


def _print(out: Console, finding: Finding) -> None:
    state = Text(f"{finding.state:6}", style=STYLES[finding.state])
    out.print(Text.assemble(state, f"  {finding.name:14}  {finding.found}"), soft_wrap=True)
    if finding.mend:
        out.print(Text(f"{'':24}mend it with: {finding.mend}"), soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """`N ok, M to look at, K broken`."""
    count = Counter(finding.state for finding in findings)
    return f"{count['ok']} ok, {count['warn']} to look at, {count['broken']} broken"
