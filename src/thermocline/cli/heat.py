"""`thermocline heat`: profile, merge, show and compare the heat of rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box

from thermocline.errors import BadInput, write_text

from .options import Debug, Json, Quiet, check_file, column_names, command_group
from .output import console, deliver, print_table, progress_bar, stop_on_interrupt

if TYPE_CHECKING:
    from thermocline.heat import HeatProfile

_LINED: dict[str, Any] = {"box": box.HEAVY_HEAD, "pad_edge": True}  # lines around the cells

app = command_group(
    "Profile how often each row is looked up; merge, show and compare heat files.",
    "thermocline heat profile log.parquet --columns user,item -o heat.tc",
)

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE.tc", callback=check_file, help="Heat file to write.")]
Page = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", callback=check_file, help="Write an HTML page with charts."),
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="Heat file.")]


@app.command(epilog="Example:  thermocline heat profile day_*.parquet --columns C1..C26 -o heat.tc")
def profile(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Parquet, CSV with a header, or Criteo TSV, oldest first.")
    ],
    output: Output,
    columns: Annotated[
        str, typer.Option("--columns", help="Columns of ids, such as user,item or C1..C26.", show_default="C1, C2, ...")
    ] = "",
    memory: Annotated[
        str, typer.Option("--memory", help="Memory limit of the process; counts that do not fit are sketched.")
    ] = "1GiB",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples per GPU and step, to count repeats.")] = 2048,
    cards_per_node: Annotated[int, typer.Option("--cards-per-node", min=1, help="GPUs per node, to count repeats.")] = 8,
    skip_bad: Annotated[
        int, typer.Option("--skip-bad", min=0, metavar="LINES", help="Leave out up to this many bad lines of text files.")
    ] = 0,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Count the lookups of a log. Ctrl-C saves the state; the same command continues."""
    from thermocline.heat import ProfilerSettings, ProfilingInterrupted
    from thermocline.heat.log_files import count_files
    from thermocline.heat.log_reader import open_logs
    from thermocline.plan.units import read_bytes

    settings = ProfilerSettings(read_bytes(memory), batch, cards_per_node)
    start, partial = time.perf_counter(), Path(f"{output}.partial")
    try:
        with progress_bar(quiet) as progress, stop_on_interrupt() as stop:
            progress(0, 1, "opening")
            files, names = open_logs(logs, column_names(columns), skip_bad)
            heat = count_files(files, names, settings, partial, progress, stop)
    except ProfilingInterrupted as kept:
        print(f"thermocline: {kept}", file=sys.stderr)
        raise
    skipped = {str(file.path): file.skipped for file in files if file.skipped}
    with _shown(heat, json, quiet, f"{output}: {time.perf_counter() - start:.1f} s", skipped):
        heat.save(output)
        partial.unlink(missing_ok=True)


@app.command(epilog="Example:  thermocline heat merge monday.tc tuesday.tc -o week.tc")
def merge(
    parts: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Heat files of the parts of a log, oldest first.")],
    output: Output,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Merge profiles of parts of a log; exact for tables that are exact in all parts."""
    from thermocline.heat import HeatProfile
    from thermocline.heat import merge as merge_profiles

    heat = merge_profiles([HeatProfile.load(part) for part in parts])
    with _shown(heat, json, quiet, f"{output}: {len(parts)} {'part' if len(parts) == 1 else 'parts'}"):
        heat.save(output)


@app.command(epilog="Example:  thermocline heat show heat.tc --report heat.html")
def show(
    file: File,
    html: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show a heat profile."""
    from thermocline.heat import HeatProfile, heat_page

    heat = HeatProfile.load(file)
    with _shown(heat, json, quiet, str(file)):
        if html is not None:
            write_text(html, heat_page(heat))


@app.command(epilog="Example:  thermocline heat diff monday.tc tuesday.tc")
def diff(old: File, new: File, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Compare two profiles: the change of the hot set, and the lookups lost by keeping the old one."""
    from thermocline.heat import HeatProfile, compare_profiles

    profiles = HeatProfile.load(old), HeatProfile.load(new)
    changes = compare_profiles(*profiles)
    if not changes:
        tables = [", ".join(profile.tables) for profile in profiles]
        raise BadInput(f"'{old}' has the tables {tables[0]}, '{new}' {tables[1]}: none in both", parameter="new")
    with deliver([vars(change) | {"lost": change.lost} for change in changes], json, quiet) as shown:
        if not shown:
            return
        alone = sorted(set(profiles[0].tables) ^ set(profiles[1].tables))
        caption = "percent of rows and of the new lookups" + (f"; in one profile only: {', '.join(alone)}" if alone else "")
        heads = ("table", "hottest", "rows", "changed", "new choice", "old choice", "lost")
        shares = [[f"{100 * share:.1f}" for share in (each.changed, each.best, each.kept, each.lost)] for each in changes]
        rows = [(each.table, f"{each.part:.0%}", f"{each.rows:,}", *own) for each, own in zip(changes, shares, strict=True)]
        print_table(heads, rows, ("table",), title=f"From {old} to {new}", caption=caption, **_LINED)


@app.command(epilog="Example:  thermocline heat ids clicks.parquet --columns item --time ts --report ids.html")
def ids(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Parquet, CSV with a header, or Criteo TSV, oldest first.")
    ],
    columns: Annotated[
        str, typer.Option("--columns", help="Columns of ids, such as user,item or C1..C26.", show_default="C1, C2, ...")
    ] = "",
    time: Annotated[
        str | None, typer.Option("--time", metavar="COLUMN", help="Column of times. [default: 100 periods of equal length]")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples of a training step, on all GPUs.")] = 2048,
    keep: Annotated[
        float, typer.Option("--keep", min=0.01, max=1.0, help="Share of the lookups of known ids that shall find their rows.")
    ] = 0.95,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples to read, from the end of the log.")] = 5_000_000,
    html: Page = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure births and deaths of ids, and recommend the rows and the rule of an IdMap.elastic."""
    from dataclasses import asdict

    from thermocline.data.id_replay import measure_turnover
    from thermocline.heat.turnover import turnover_page

    with progress_bar(quiet) as progress:
        progress(0, 1, "reading")
        found = measure_turnover(logs, column_names(columns), time, batch, keep, samples, progress)
    result = [asdict(each) | {"text": each.text} for each in found] if json else None
    with deliver(result, json, quiet) as shown:
        if html is not None:
            write_text(html, turnover_page(found, ", ".join(log.name for log in logs)))
        if not shown:
            return
        per = "an hour" if time else "a period"
        heads = ("column", "lookups", "ids", f"born\n{per}", f"died\n{per}", "seen\nbefore", "kept", "recommended")
        rows = [
            (
                each.name, f"{each.lookups:,}", f"{each.distinct:,}", f"{each.rate('born'):,.0f}", f"{each.rate('died'):,.0f}",
                f"{each.again:.1%}", f"{each.kept:.1%}", each.text,
            )
            for each in found
        ]  # fmt: skip
        caption = "seen before: of the lookups of the second half; kept: of those, by own rows of the recommended table"
        print_table(heads, rows, ("column", "recommended"), title=", ".join(map(str, logs)), caption=caption, **_LINED)


@contextmanager
def _shown(
    heat: HeatProfile, json: str | None, quiet: bool, title: str, skipped: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Print a profile, let the caller write its files, and then write the JSON."""
    from thermocline.heat.show import numbers

    more = {} if skipped is None else {"skipped": dict(skipped)}
    with deliver(numbers(heat) | more if json else None, json, quiet) as shown:
        if shown:
            _print(heat, title)
            for path, lines in (skipped or {}).items():
                console().print(f"{path}: {lines:,} bad {'line' if lines == 1 else 'lines'} skipped", markup=False)
        yield


def _print(heat: HeatProfile, title: str) -> None:
    from thermocline.heat.show import PARTS, length, small_curve

    sizes = list(dict.fromkeys(size for each in heat.tables.values() for size in each.repeats))
    hottest = [f"hottest\n{100 * part:g}%" for part in PARTS]
    repeats = [f"repeats\nin {size:,}" for size in sizes]
    counts = ("lookups", "missing", "distinct", "per sample\nmedian, max")
    rows = []
    for each in heat.tables.values():
        distinct = f"{each.distinct:,}" + ("" if each.exact else f" ±{100 * each.error:.1f}%")
        shares = [each.hottest(part) for part in PARTS] + [each.repeats.get(size) for size in sizes]
        shares += [each.kept.get(part) for part in (0.01, 0.05)]
        cells = ["-" if share is None else f"{100 * share:.1f}" for share in shares]
        lengths = f"{length(each, 0.5)}, {length(each, 1)}"
        rows.append((each.name, f"{each.lookups:,}", f"{each.missing:,}", distinct, lengths, *cells, small_curve(each)))
    caption = f"hottest, repeats, kept: percent of lookups; curve: from 0.001% of the rows to all; {heat.source}"
    heads = ("table", *counts, *hottest, *repeats, "kept by\n1%", "kept by\n5%", "curve")
    print_table(heads, rows, ("table", "curve"), title=title, caption=caption, **_LINED)
