"""The notebook in `examples/`: its code runs from top to bottom, and what it shows is what it would show now.

    python tests/test_notebook.py         runs it and writes its outputs into it

Cells are run as a notebook runs them: one after the other in one namespace, printed text is their output, and so is the value
of a last expression that can draw itself. No Jupyter is needed for that. Outputs of cells tagged `predicted` come from the
planner, whose choices may change with its formulas: that there is something is all that is asked of them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "examples" / "heat.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook):
    """The outputs of each cell with code."""
    namespace, found = {"__name__": "__main__"}, []
    for number, cell in enumerate(code_cells(notebook), 1):
        tree, last = ast.parse("".join(cell["source"])), None
        if isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"cell {number}", "exec"), namespace)
            value = None if last is None else eval(compile(last, f"cell {number}", "eval"), namespace)
        outputs = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
        if hasattr(value, "_repr_svg_"):
            data = {"image/svg+xml": value._repr_svg_().splitlines(keepends=True)}
            outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
        found.append(outputs)
    return found


def write():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook), strict=True), 1):
        cell["execution_count"], cell["outputs"] = number, outputs
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def test_the_notebook_shows_what_its_code_gives():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    # In a process of its own: it draws from torch's generator and fills a folder.
    code = f"import json, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_notebook as t; t.tell()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for cell, now in zip(code_cells(notebook), json.loads(done.stdout), strict=True):
        if "predicted" in cell["metadata"].get("tags", ()):
            assert now and cell["outputs"]
        else:
            told = "the notebook shows something else; run: python tests/test_notebook.py"
            assert now == cell["outputs"], f"{''.join(cell['source'])}\n{told}"
    assert sum(len(cell["outputs"]) for cell in code_cells(notebook)) >= 7


def tell():
    print(json.dumps(run(json.loads(NOTEBOOK.read_text(encoding="utf-8")))))


def test_the_notebook_is_small_and_says_nothing_of_where_it_was_made():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 40_000
    assert str(Path.home()) not in text and "Traceback" not in text


if __name__ == "__main__":
    write()
