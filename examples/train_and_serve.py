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

FOLDER, SECRET, GRPC, PUBLISH = Path("published"), Path("secret"), "127.0.0.1:8001", "127.0.0.1:8002"


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


def train(model: thermocline.EmbeddingCollection, publisher: thermocline.Publisher, item: int) -> None:
    """A step that changes an item."""
    model(torch.tensor([[17, item]])).values().square().sum().backward()
    publisher.step()


def main(changes: int = 5) -> None:
    """Change an item, and wait until the client sees it."""
    model = make_model()
    server, grpc, publish = start_server("0", "0")
    client = grpcclient.InferenceServerClient(grpc)
    try:
        with thermocline.publish(model, FOLDER, to=publish, secret_file=SECRET) as publisher:
            publisher.flush()
            for _ in range(changes):
                _, before = ask(client, 7)
                began = time.monotonic()
                train(model, publisher, 7)
                while np.array_equal(ask(client, 7)[1], before):
                    publisher.step()
                    time.sleep(0.01)
                version, row = ask(client, 7)
                print(f"version {version}: row 7 begins with {row[0]:+.4f}, {time.monotonic() - began:.2f} s after its step")
    finally:
        client.close()
        server.terminate()
        server.wait()
        server.stdout.close()
    print("trained and served")


def serve() -> None:
    """Serve, and print row 7 whenever it changes."""
    make_model()
    server, grpc, publish = start_server(GRPC.rpartition(":")[2], PUBLISH.rpartition(":")[2])
    print(f"serving at {grpc}; now run: python {sys.argv[0]} train ({publish})")
    client, before = grpcclient.InferenceServerClient(grpc), None
    try:
        while True:
            version, row = ask(client, 7)
            if before is None or not np.array_equal(row, before):
                print(f"{time.strftime('%X')}  version {version}: row 7 begins with {row[0]:+.4f}")
            before = row
            time.sleep(0.05)
    except KeyboardInterrupt:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    if "serve" in sys.argv[1:]:
        serve()
    elif "train" in sys.argv[1:]:
        model = make_model()
        with thermocline.publish(model, FOLDER, to=PUBLISH, secret_file=SECRET) as publisher:
            for number in range(60):
                print(f"{time.strftime('%X')}  step {number} changes row 7")
                train(model, publisher, 7)
                time.sleep(1)
    else:
        main()
