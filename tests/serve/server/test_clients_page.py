"""The clients of docs/clients.md that this machine can run: curl and Java, against a server with rows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fake_server import values_of

from thermocline.serve.protocol import schema

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "clients.md").read_text()
ROWS = values_of(1, "user")[[3, 17]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_lines_for_curl_work_with_json_and_compressed_bytes(served, tmp_path):
    plain, packed = (block.replace("localhost:8000", served.http) for block in blocks("sh")[1:])
    done = subprocess.run(["sh", "-c", plain], capture_output=True, text=True, cwd=tmp_path, check=True)
    (output,) = json.loads(done.stdout)["outputs"]
    assert np.array_equal(np.array(output["data"], np.float32).reshape(output["shape"]), ROWS)
    subprocess.run(["sh", "-c", packed], capture_output=True, cwd=tmp_path, check=True)
    assert (tmp_path / "rows.bin").read_bytes().endswith(ROWS.tobytes())
    assert "inference-header-content-length" in (tmp_path / "headers.txt").read_text().lower()


@pytest.mark.skipif(shutil.which("javac") is None, reason="there is no Java compiler")
def test_the_lines_for_java_work(served, tmp_path):
    (tmp_path / "Lookup.java").write_text(blocks("java")[0])
    command = ["java", "-Xmx64m", "-XX:TieredStopAtLevel=1", "Lookup.java", f"http://{served.http}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    status, _, body = done.stdout.partition(" ")
    (output,) = json.loads(body)["outputs"]
    assert status == "200" and np.array_equal(np.array(output["data"], np.float32).reshape(output["shape"]), ROWS)


def test_names_in_the_lines_for_go_and_cpp_are_those_of_the_protocol():
    fields = {field.name for field in schema.ModelInferRequest.DESCRIPTOR.fields}
    fields |= {field.name for field in schema.message("ModelInferRequest.InferInputTensor").DESCRIPTOR.fields}
    (cpp,), (go,) = blocks("cpp"), blocks("go")
    used = set(re.findall(r"(?:request\.|input->)(?:set_|add_)(\w+)", cpp))
    used |= {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in re.findall(r"\b([A-Z]\w+): ", go)}
    assert used and used <= fields
