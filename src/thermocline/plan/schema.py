"""The JSON schemas of the four planning files, for editors and for programs that write such files.

They are generated from the models and shipped as files, one for each version of a format; a test keeps them equal. When
a model has changed, `python -m thermocline.plan.schema` writes them again; a change that old files do not survive is a new
version.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from thermocline.errors import BadInput

from .model import Plan
from .run_file import Run
from .tables import Tables
from .topology import Topology

MODELS: dict[str, type[BaseModel]] = {"tables": Tables, "topology": Topology, "plan": Plan, "run": Run}
SCHEMAS = files(__package__) / "schemas"


def file_name(kind: str) -> str:
    """The name of the file that a kind's schema is in, with the version it is for."""
    return f"{kind}-{MODELS[kind].model_fields['version'].default}.json"


def generate(kind: str) -> dict[str, Any]:
    """The schema as the model has it now."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"thermocline/{file_name(kind)}"}
    return about | MODELS[kind].model_json_schema()


def shipped(kind: str) -> str:
    """The text of a schema that comes with the package."""
    if kind not in MODELS:
        raise BadInput(f"there is no schema {kind!r}; there are {', '.join(MODELS)}")
    return (SCHEMAS / file_name(kind)).read_text(encoding="utf-8")


def write_all() -> None:
    """Write the schemas of all models into the package."""
    for kind in MODELS:
        Path(str(SCHEMAS / file_name(kind))).write_text(json.dumps(generate(kind), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_all()
