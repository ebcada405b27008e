"""`thermocline doctor`: check this machine; every problem comes with a fix."""

from __future__ import annotations

from collections import Counter

import typer
from rich.console import Console
from rich.text import Text

from . import machine_checks
from .machine_checks import Finding
from .options import Debug, Json, Quiet
from .output import console, deliver

EXAMPLE = "Example:  thermocline doctor --json machine.json"

STYLES = {"ok": "green", "warn": "yellow", "broken": "bold red"}


def doctor(json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Check this machine; every problem comes with a fix."""
    findings = [check() for check in machine_checks.CHECKS]
    broken = any(finding.state == "broken" for finding in findings)
    checks = [{"name": each.name, "state": each.state, "found": each.found, "fix": each.fix} for each in findings]
    with deliver({"ok": not broken, "checks": checks}, json, False) as shown:
        if shown:
            out, count = console(), Counter(finding.state for finding in findings)
            for finding in findings:
                if finding.state != "ok" or not quiet:
                    _print(out, finding)
            out.print(f"{count['ok']} ok, {count['warn']} warnings, {count['broken']} broken")
    if broken:
        raise typer.Exit(1)


def _print(out: Console, finding: Finding) -> None:
    state = Text(f"{finding.state:6}", style=STYLES[finding.state])
    out.print(Text.assemble(state, f"  {finding.name:14}  {finding.found}"), soft_wrap=True)
    if finding.fix:
        out.print(Text(f"{'':24}fix: {finding.fix}"), soft_wrap=True)
