"""The clients of docs/clients.md that this machine can run, against a server with rows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fake_server import values_of

from thermocline.serve.protocol import schema

PROTOCOL = Path(schema.__file__).parent
GO_PACKAGES = Path("/usr/share/gocode")  # of Debian: golang-google-grpc-dev
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


def generate(folder: Path, *outputs: str) -> None:
    subprocess.run(["protoc", f"-I{PROTOCOL}", *outputs, "open_inference.proto"], cwd=folder, check=True)


def found_by_pkg_config(*packages: str) -> bool:
    return bool(shutil.which("pkg-config")) and not subprocess.run(["pkg-config", "--exists", *packages]).returncode


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("protoc-gen-go-grpc") and GO_PACKAGES.exists()), reason="Debian's Go and gRPC are missing"
)
def test_the_lines_for_go_work(served, tmp_path):
    """Debian's gRPC is older than the names of the page that are replaced."""
    client = tmp_path / "src" / "client"
    client.mkdir(parents=True)
    generate(tmp_path / "src", "--go_out=.", "--go-grpc_out=.")
    (lines,) = blocks("go")
    lines = lines.replace("localhost:8001", served.grpc).replace("NewClient(", "Dial(")
    lines = lines.replace("WithTransportCredentials(insecure.NewCredentials())", "WithInsecure()")
    names = ("bytes", "context", "encoding/binary", "log", "os", "google.golang.org/grpc")
    imports = "".join(f'import "{name}"\n' for name in names)
    lines += "binary.Write(os.Stdout, binary.LittleEndian, rows)"
    main = f'package main\n{imports}import pb "inference"\nfunc main() {{\n{lines}\n}}\n'
    (client / "main.go").write_text(main)
    own = {"GO111MODULE": "off", "GOPATH": f"{tmp_path}:{GO_PACKAGES}", "GOCACHE": str(tmp_path / "cache")}
    done = subprocess.run(["go", "run", "./client"], capture_output=True, cwd=tmp_path / "src", env={**os.environ, **own})
    assert done.returncode == 0, done.stderr
    assert np.array_equal(np.frombuffer(done.stdout, "<f4").reshape(ROWS.shape), ROWS)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("grpc_cpp_plugin") and shutil.which("g++") and found_by_pkg_config("grpc++", "protobuf")),
    reason="there is no gRPC for C++",
)
def test_the_lines_for_cpp_work(served, tmp_path):
    generate(tmp_path, "--cpp_out=.", "--grpc_out=.", f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}")
    (lines,) = blocks("cpp")
    lines = lines.replace("localhost:8001", served.grpc)
    wrote = "std::fwrite(rows, 1, response.raw_output_contents(0).size(), stdout);"
    headers = '#include <cstdio>\n#include <grpcpp/grpcpp.h>\n#include "open_inference.grpc.pb.h"\n'
    (tmp_path / "client.cc").write_text(f"{headers}int main() {{\n{lines}{wrote}\n}}\n")
    sources = ["client.cc", "open_inference.pb.cc", "open_inference.grpc.pb.cc"]
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "grpc++", "protobuf"], capture_output=True, text=True).stdout
    subprocess.run(["g++", "-std=c++17", "-I.", *sources, *flags.split(), "-o", "client"], cwd=tmp_path, check=True)
    rows = subprocess.run([tmp_path / "client"], capture_output=True, check=True).stdout
    assert np.array_equal(np.frombuffer(rows, "<f4").reshape(ROWS.shape), ROWS)


def test_names_in_the_lines_for_go_and_cpp_are_those_of_the_protocol():
    fields = {field.name for field in schema.ModelInferRequest.DESCRIPTOR.fields}
    fields |= {field.name for field in schema.message("ModelInferRequest.InferInputTensor").DESCRIPTOR.fields}
    (cpp,), (go,) = blocks("cpp"), blocks("go")
    used = set(re.findall(r"(?:request\.|input->)(?:set_|add_)(\w+)", cpp))
    used |= {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in re.findall(r"\b([A-Z]\w+): ", go)}
    assert used and used <= fields
