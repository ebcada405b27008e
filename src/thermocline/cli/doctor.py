"""`thermocline doctor`: check this machine; every problem comes with a fix."""

from __future__ import annotations

import time
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from . import machine_checks
from .machine_checks import Finding
from .options import Debug, Json, Quiet
from .output import console, deliver

EXAMPLE = "Example:  thermocline doctor --json machine.json"

STYLES = {"ok": "green", "warn": "yellow", "broken": "bold red"}


Compile = Annotated[bool, typer.Option("--compile", help="Compile the CPU kernels now, not at their first use.")]


def doctor(compile: Compile = False, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Check this machine; every problem comes with a fix."""
    findings = [check() for check in machine_checks.CHECKS]
    broken = any(finding.state == "broken" for finding in findings)
    compiled = _compile() if compile and not broken else None
    checks = [{"name": each.name, "state": each.state, "found": each.found, "fix": each.fix} for each in findings]
    result = {"ok": not broken, "checks": checks, **({"compiled": compiled} if compiled else {})}
    with deliver(result, json, False) as shown:
        if shown:
            out, count = console(), Counter(finding.state for finding in findings)
            for finding in findings:
                if finding.state != "ok" or not quiet:
                    _print(out, finding)
            if compiled and not quiet:
                out.print(
                    f"{compiled['kernels']} CPU kernels compiled in {compiled['cpu_seconds']:.1f} s, in {compiled['folder']}"
                )
            out.print(f"{count['ok']} ok, {count['warn']} warnings, {count['broken']} broken")
    if broken:
        raise typer.Exit(1)


def _compile() -> dict[str, int | float | str]:
    """Compile all CPU kernels that are not in the cache."""
    from thermocline.kernels.cpu.compile import cache_folder, prepare

    start = time.process_time()
    kernels = prepare()
    return {"kernels": kernels, "cpu_seconds": time.process_time() - start, "folder": str(cache_folder().parent)}


def _print(out: Console, finding: Finding) -> None:
    state = Text(f"{finding.state:6}", style=STYLES[finding.state])
    out.print(Text.assemble(state, f"  {finding.name:14}  {finding.found}"), soft_wrap=True)
    if finding.fix:
        out.print(Text(f"{'':24}fix: {finding.fix}"), soft_wrap=True)
