"""Train and serve at the same time: a row changes in the client within a second of the step that changed it.

pip install 'thermocline[serve]' 'tritonclient[grpc]'
python examples/train_and_serve.py                 both, in two processes

or, in two terminals and one folder:
python examples/train_and_serve.py serve           the server, and a client that prints a row
python examples/train_and_serve.py train           the trainer
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import tritonclient.grpc as grpcclient

import thermocline

FOLDER, SECRET = Path("published"), Path("secret")


def make_model() -> thermocline.EmbeddingCollection:
    """The model, saved for the server, and the secret that trainer and server share."""
    torch.manual_seed(0)
    tables = [thermocline.Table("user", 10_000, 32), thermocline.Table("item", 5_000, 32)]
    model = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.05))
    if not SECRET.exists():
        SECRET.touch(mode=0o600)
        SECRET.write_text(secrets.token_hex(32))
    if not FOLDER.exists():
        thermocline.save(model, FOLDER)
    return model


def start_server(grpc: str, publish: str) -> tuple[subprocess.Popen[str], str, str]:
    """A server, and its addresses for clients and trainers."""
    ports = ["--http-port", "0", "--grpc-port", grpc, "--publish-port", publish, "--secret-file", str(SECRET)]
    command = [sys.executable, "-m", "thermocline", "serve", "run", str(FOLDER), "--shards", "2", *ports]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    words = server.stdout.readline().split()  # ready: http://...  grpc ...  publish ...
    return server, words[words.index("grpc") + 1], words[words.index("publish") + 1]


def ask(client: grpcclient.InferenceServerClient, item: int) -> tuple[str, np.ndarray]:
    """The row of an item, and the version that it comes from."""
    request = grpcclient.InferInput("item", [1], "INT64")
    request.set_data_from_numpy(np.array([item]))
    answer = client.infer("tables", [request])
    return answer.get_response().model_version, answer.as_numpy("item")[0]


def watch(client: grpcclient.InferenceServerClient, changes: float, item: int = 7) -> None:
    """Print the row of an item, and then whenever it changes."""
    before = None
    while changes >= 0:
        version, row = ask(client, item)
        if before is None or not np.array_equal(row, before):
            print(f"{time.strftime('%X')}  version {version}: row {item} begins with {row[0]:+.4f}", flush=True)
            before, changes = row, changes - 1
        time.sleep(0.05)


def train(publish: str = "127.0.0.1:8002", steps: int = 60, item: int = 7) -> None:
    """Change an item once a second."""
    model = make_model()
    with thermocline.publish(model, FOLDER, to=publish, secret_file=SECRET) as publisher:
        for number in range(steps):
            print(f"{time.strftime('%X')}  step {number} changes row {item}", flush=True)
            model(torch.tensor([[17, item]])).values().square().sum().backward()
            publisher.step()
            time.sleep(1)


def serve(grpc: str = "8001", publish: str = "8002", changes: float = float("inf"), trains: bool = False) -> None:
    """Serve on two ports, and watch row 7; with a trainer, if asked."""
    make_model()
    server, grpc, publish = start_server(grpc, publish)
    words = [sys.executable, __file__, "train", publish]
    print(f"serving at {grpc}; " + ("training" if trains else f"now run: {' '.join(words[1:])}"), flush=True)
    trainer = subprocess.Popen(words) if trains else None
    try:
        watch(grpcclient.InferenceServerClient(grpc), changes)
    finally:
        for process in (server, trainer) if trainer else (server,):
            process.terminate()
            process.wait()
        server.stdout.close()


def main(changes: int = 5) -> None:
    """Train in another process, and watch row 7 change."""
    serve("0", "0", changes, trains=True)
    print("trained and served")


if __name__ == "__main__":
    {"serve": serve, "train": train, "": main}["".join(sys.argv[1:2])](*sys.argv[2:])
