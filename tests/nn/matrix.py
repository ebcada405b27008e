"""What works with what: every module, precision, residency and update mode in every way to run and use it.

`verdict` states for each cell whether it works or is refused, and why; `test_matrix.py` runs the cells, and
`python tests/nn/matrix.py` prints docs/matrix.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

MODULES = ("EmbeddingBag", "Embedding", "EmbeddingCollection")
PRECISIONS = ("fp32", "int8 with cache", "by heat")
RESIDENCIES = ("device", "host")
UPDATES = ("backward", "step")
RUNS = ("eager", "torch.compile", "CUDA graph")
USES = (
    "single step", "accumulation", "GradScaler", "clipping", "DDP of the dense part", "FSDP2 of the dense part", "resume",
    "deepcopy", "pickle",
)  # fmt: skip


class Cell(NamedTuple):
    """One combination."""

    module: str
    precision: str
    residency: str
    update: str
    run: str
    use: str


class Refusal(NamedTuple):
    """Why a cell is refused, and the fields of its error."""

    sentence: str
    parameter: str
    value: object = None


_STEP = "use `RowConfig(update='step')`."
REFUSALS = {
    "accumulation": Refusal(
        f"Each backward pass updates rows, so a second one before the next optimizer step raises; {_STEP}", "update", "backward"
    ),
    "GradScaler": Refusal(f"Rows are updated in backward, before their gradients are unscaled; {_STEP}", "update", "backward"),
    "clipping": Refusal(f"Rows are updated in backward, before their gradients are clipped; {_STEP}", "update", "backward"),
    "CUDA graph": Refusal(
        "Summing the gradients of distinct rows waits for the GPU, which a captured graph cannot do; use "
        "`RowConfig(update='backward')`.",
        "update",
    ),
    "ranks": Refusal(
        "Each rank would train its own copy of unsharded rows, and the copies would diverge. Call "
        "[`shard_`](sharding.md#combinations) before the dense part is wrapped: DDP and FSDP2 then work with all three modules "
        "and both updates. Or freeze the rows, or set `RowConfig(independent=True)`.",
        "independent", False,
    ),
}  # fmt: skip


def verdict(cell: Cell) -> str | None:
    """The refusal of a cell, a key of `REFUSALS`; None if it works."""
    if cell.use in ("DDP of the dense part", "FSDP2 of the dense part"):
        return "ranks"
    if cell.update == "backward":
        return cell.use if cell.use in REFUSALS else None
    return "CUDA graph" if cell.run == "CUDA graph" else None


def cells() -> Iterator[Cell]:
    """The complete product."""
    return (Cell(*values) for values in product(MODULES, PRECISIONS, RESIDENCIES, UPDATES, RUNS, USES))


def covering(among: Sequence[Cell]) -> list[Cell]:
    """Few of the cells that have every pair of values of two axes that any of them has."""

    def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(cell), 2))

    missing = set().union(*map(pairs, among)) if among else set()
    chosen = []
    while missing:
        best = max(among, key=lambda cell: (len(pairs(cell) & missing), cell))
        chosen.append(best)
        missing -= pairs(best)
    return sorted(chosen)


def page() -> str:
    """docs/matrix.md."""
    notes = list(REFUSALS)

    def entry(update: str, run: str, use: str) -> str:
        found = {verdict(cell) for cell in cells() if (cell.update, cell.run, cell.use) == (update, run, use)}
        (refused,) = found  # modules, precisions and residencies behave alike
        return "works" if refused is None else f"refused ({notes.index(refused) + 1})"

    columns = list(product(RUNS, UPDATES))
    lines = [
        "# What works with what",
        "",
        "<!-- Written by `python tests/nn/matrix.py > docs/matrix.md`. -->",
        "",
        f"All modules ({', '.join(f'`{name}`' for name in MODULES)}), precisions (fp32, int8 with a cache,",
        "[by heat](modules.md#precision-by-heat)) and residencies (`device`, `host`) in every way to run and to use them are",
        f"{len(list(cells()))} combinations. Each works or raises an error that names the way out. Modules, precisions and",
        "residencies behave alike, so the table has one entry for all eighteen.",
        "",
        "| | " + " | ".join(f"{run}, `update={update!r}`" for run, update in columns) + " |",
        "|---|" + "---|" * len(columns),
        *(f"| {use} | " + " | ".join(entry(update, run, use) for run, update in columns) + " |" for use in USES),
        "",
        *(f"{number}. {refusal.sentence}" for number, refusal in enumerate(REFUSALS.values(), 1)),
        "",
        "*Works* means: after several steps, the bits of rows, cache and optimizer state equal those of an eager module on the",
        "device; fp32 rows equal those of torch's modules with torch's optimizer within rounding. *Resume* loads a",
        "`state_dict` into a new module. *CUDA graph* is a whole step captured with `torch.cuda.graph`",
        "([how](modules.md#compile-capture-export)); a copy or a new module has other memory and is captured again. Its tests",
        "need a GPU. Frozen rows work everywhere.",
        "",
        "`tests/nn/test_matrix.py` runs every pair of values and every refusal; `pytest -m exhaustive` runs",
        "the rest of the product. [Sharded modules](sharding.md#combinations) have their own tests (`tests/distributed`).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
