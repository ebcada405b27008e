"""`thermocline checkpoint`: inspects, compares, converts and compacts checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import Debug, Json, Quiet, check_file, check_folder, command_group
from .output import at_work, console, deliver, print_table

if TYPE_CHECKING:
    from thermocline.checkpoint import Checkpoint

_LONGEST, _NAMED = 240, 4  # characters of a value; id maps listed by name

app = command_group("Inspect, compare, convert and compact checkpoints.", "thermocline checkpoint inspect checkpoints/run1")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Checkpoint folder.")]


@app.command(epilog="Example:  thermocline checkpoint inspect checkpoints/run1")
def inspect(folder: Folder, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show the content of a checkpoint and verify the sha256 of every file."""
    from thermocline.checkpoint import Checkpoint

    with at_work(quiet, f"reading {folder}"):
        checkpoint = Checkpoint.open(folder)
        checkpoint.verify()
        found = _content(checkpoint)
    with deliver(found, json, quiet) as shown:
        if not shown:
            return
        about = found["about"] | {"id maps": _maps(found["about"]["id maps"])}
        lines = [f"{name:12}{_brief(value)}" for name, value in about.items() if value not in (None, "", [])]
        rows = [
            (
                each["name"], f"{each['rows']:,}", str(each["dim"] or ""), ", ".join(each["precisions"]), f"{each['cached']:,}",
                f"{each['bytes']:,}", ", ".join(each["features"]),
            )
            for each in [*found["tables"], *_sums(found["tables"])]
        ]  # fmt: skip
        heads = ("table", "rows", "dim", "precision", "in cache", "bytes", "features")
        console().print("\n".join(lines) + "\n", markup=False)
        print_table(heads, rows, ("table", "precision", "features"))
        console().print()
        for each in found["saves"]:
            ranks = f"{each['ranks']} rank" + "s" * (each["ranks"] > 1)
            text = f"save {each['number']}: {each['kind']}, step {each['step']:,}, {each['created']}, by {ranks}"
            console().print(f"{text}, {each['files']} files, {each['bytes']:,} bytes, sha256 verified", markup=False)


def _sums(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums over all tables, if there are several."""
    sums = {name: sum(table[name] for table in tables) for name in ("rows", "cached", "bytes")}
    return [{"name": "all", "dim": None, "precisions": [], "features": [], **sums}] if len(tables) > 1 else []


def _maps(maps: dict[str, str]) -> str:
    """Id maps by name, or counts by kind."""
    if len(maps) <= _NAMED:
        return ", ".join(f"{feature}: {map}" for feature, map in maps.items())
    kinds = Counter(map.partition("(")[0] for map in maps.values())
    return ", ".join(f"{kind} for {count} features" for kind, count in kinds.items())


def _brief(value: Any) -> str:
    """A shortened value; `--json` has all of it."""
    return text if len(text := str(value)) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _content(checkpoint: Checkpoint) -> dict[str, Any]:
    from thermocline.checkpoint.format.folder import kept_manifests, leftovers
    from thermocline.rows.precision import bytes_per_row

    manifest = checkpoint.manifest
    plan, chain = manifest.plan, {save.number for save in manifest.saves}
    kept = {each.saves[-1].number for each in kept_manifests(checkpoint.folder)} - chain
    about = {
        "folder": str(checkpoint.folder),
        "format": f"version {manifest.version}, written by thermocline {manifest.package}",
        "step": manifest.step,
        "optimizer": ", ".join(dict.fromkeys(_numbers(module.optimizer) for module in manifest.modules)),
        "id maps": {name: str(map) for name, map in checkpoint.id_maps.items() if not map.is_identity},
        "plan": plan and f"{plan['topology']['nodes']} x {plan['topology']['cards_per_node']} cards",
        "heat": manifest.heat and f"sha256 {manifest.heat[:12]}",
        "dense part": f"{dense:,} numbers" if (dense := sum(t.numel() for t in checkpoint.dense().values())) else None,
        "progress": manifest.progress or None,
        "kept saves": ", ".join(map(str, sorted(kept))),
        "unfinished": ", ".join(leftovers(checkpoint.folder, manifest)),
    }
    tables = [
        {
            "name": t.name, "rows": t.rows, "dim": t.dim, "precisions": list(t.precisions), "features": list(t.features),
            "cached": len(checkpoint.cache.scores(t)[0]),
            "bytes": sum(s.count * bytes_per_row(s.precision, t.dim) for s in checkpoint.sections(t.name)),
        }
        for t in manifest.tables
    ]  # fmt: skip
    saves = [
        {name: getattr(save, name) for name in ("number", "kind", "step", "created", "ranks", "bytes")}
        | {"files": len(save.files)}
        for save in manifest.saves
    ]
    return {"about": about, "tables": tables, "saves": saves}


def _numbers(optimizer: dict[str, Any]) -> str:
    return f"{optimizer['name']} (" + ", ".join(f"{k} {v}" for k, v in optimizer.items() if k != "name") + ")"


@app.command(epilog="Example:  thermocline checkpoint diff monday tuesday")
def diff(
    first: Folder,
    second: Annotated[Path, typer.Argument(metavar="FOLDER", help="Second checkpoint folder.")],
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare two checkpoints by value. The exit code is 1 if they differ."""
    from thermocline.checkpoint import diff as compare

    with at_work(quiet, "comparing rows"):
        found = compare(first, second)
    with deliver(asdict(found) | {"same": found.same}, json, quiet) as shown:
        if shown:
            rows = []
            for each in found.tables:
                states = "-" if each.states is None else f"{each.states:,}"
                cells = (f"{each.total:,}", " -> ".join(each.precision), f"{each.rows:,}", f"{each.largest:.3g}", states)
                rows.append((each.table, *cells))
            heads = ("table", "rows", "precisions", "rows that differ", "largest difference", "states that differ")
            print_table(heads, rows, ("table", "precisions"))
            others = {
                f"only in {first}": found.only[0], f"only in {second}": found.only[1], "of another size": found.other_size,
                "other id maps": found.maps, "dense part": found.dense,
            }  # fmt: skip
            for what, names in others.items():
                if names:
                    console().print(f"{what}: {', '.join(names)}", markup=False)
            console().print(f"steps {found.steps[0]:,} and {found.steps[1]:,}: {'the same' if found.same else 'they differ'}")
    if not found.same:
        raise typer.Exit(1)


def _check_target(target: Path) -> Path | None:
    return check_file(target) if target.suffix == ".safetensors" else check_folder(target)


@app.command(epilog="Example:  thermocline checkpoint convert run1 run1-int4 --precision int4")
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Checkpoint folder, or .safetensors file with a state dict.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", callback=_check_target, help="New folder, or new .safetensors file.")
    ],
    precision: Annotated[str | None, typer.Option("--precision", help="Row precision of the target checkpoint.")] = None,
    style: Annotated[
        Literal["torchrec", "torch", "fused"], typer.Option("--as", help="Key names of the target state dict.")
    ] = "torchrec",
    tables: Annotated[
        str, typer.Option("--tables", help="Table names in a state dict of torch, separated by commas.", show_default="all")
    ] = "",
    bits: Annotated[int | None, typer.Option("--bits", help="Bits of torch's fused tables: 8, 4 or 2.")] = None,
    json: Json = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Convert a checkpoint to another precision, or from and to state dicts of torch and TorchRec."""
    from thermocline.checkpoint import convert as make

    with at_work(quiet, f"writing {target}"):
        make(source, target, precision, style, tables.split(",") if tables else None, bits)
    with deliver({"source": str(source), "target": str(target), "precision": precision}, json, quiet) as shown:
        if shown:
            console().print(f"{target}: written", markup=False)


@app.command(epilog="Example:  thermocline checkpoint compact checkpoints/run1")
def compact(folder: Folder, json: Json = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Merge a full save and its incremental saves into one full save."""
    from thermocline.checkpoint import compact as make
    from thermocline.checkpoint.format.manifest import Manifest

    before = Manifest.read(folder)
    with at_work(quiet, f"compacting {folder}"):
        after = make(folder)
    sizes = [sum(save.bytes for save in manifest.saves) for manifest in (before, after)]
    result = {"folder": str(folder), "saves_before": len(before.saves), "bytes_before": sizes[0], "bytes": sizes[1]}
    with deliver(result, json, quiet) as shown:
        if shown:
            merged = (
                f"merged {len(before.saves)} save{'s' * (len(before.saves) > 1)} of {sizes[0]:,} bytes into one of {sizes[1]:,}"
            )
            console().print(f"{folder}: {merged}", markup=False)
