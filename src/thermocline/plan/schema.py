"""JSON schemas of the four planning files, one per format version, for editors and for programs that write such files.

They are generated from the pydantic models and shipped; a test compares both. After a change of a model, run
`python -m thermocline.plan.schema`. A change that breaks old files needs a new version.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from thermocline.errors import BadInput

from .model import Plan
from .run_file import MeasuredRun
from .tables import TablesConfig
from .topology import Topology

MODELS: dict[str, type[BaseModel]] = {"tables": TablesConfig, "topology": Topology, "plan": Plan, "run": MeasuredRun}
SCHEMAS = files(__package__) / "schemas"


def file_name(kind: str) -> str:
    """The file name of a schema, which contains the format version."""
    return f"{kind}-{MODELS[kind].model_fields['version'].default}.json"


def generate(kind: str) -> dict[str, Any]:
    """The schema of the current model. A description is a docstring without its sections."""

    def summarize(part: dict[str, Any]) -> dict[str, Any]:
        text = part.get("description")
        return part | ({"description": re.split(r"\n\n(?:Attributes|Example):", text)[0]} if isinstance(text, str) else {})

    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"thermocline/{file_name(kind)}"}
    schema: dict[str, Any] = json.loads(json.dumps(MODELS[kind].model_json_schema()), object_hook=summarize)
    return about | schema


def shipped(kind: str) -> str:
    """Read the JSON schema of a planning file.

    Args:
        kind: "tables", "topology", "plan" or "run".

    Returns:
        The text of the schema.

    Raises:
        BadInput: There is no such schema.

    Example::

        Path("plan-1.json").write_text(shipped("plan"))
    """
    if kind not in MODELS:
        message = f"there is no schema {kind!r}; schemas are {', '.join(MODELS)}"
        raise BadInput(message, parameter="kind", value=kind, available=tuple(MODELS))
    return (SCHEMAS / file_name(kind)).read_text(encoding="utf-8")


if __name__ == "__main__":
    for kind in MODELS:
        Path(str(SCHEMAS / file_name(kind))).write_text(json.dumps(generate(kind), indent=2) + "\n", encoding="utf-8")
