"""Train a little, save, serve the tables over four cards, and ask for rows with NVIDIA's client.

pip install 'thermocline[serve]' 'tritonclient[grpc]' && python examples/serve_and_query.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

import numpy as np
import torch
import tritonclient.grpc as grpcclient

import thermocline


def main(steps: int = 50) -> None:
    torch.manual_seed(0)
    tables = [thermocline.Table("user", 10_000, 32), thermocline.Table("item", 5_000, 32)]
    collection = thermocline.EmbeddingCollection(tables, rows=thermocline.RowConfig("int8", cache=0.0))
    for _ in range(steps):
        collection(torch.randint(5_000, (64, 2))).values().square().mean().backward()

    with tempfile.TemporaryDirectory() as folder:
        thermocline.save(collection, folder)
        serve = ["-m", "thermocline", "serve", "run", folder, "--shards", "4", "--http-port", "0", "--grpc-port", "0"]
        server = subprocess.Popen([sys.executable, *serve], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            print(line := server.stdout.readline().strip())  # ready: http://...  grpc ...
            client = grpcclient.InferenceServerClient(re.search(r"grpc (\S+)", line)[1])
            ids = np.array([3, 17, 4_999], np.int64)
            asked = grpcclient.InferInput("item", ids.shape, "INT64")
            asked.set_data_from_numpy(ids)
            rows = client.infer("tables", [asked]).as_numpy("item")
            client.close()
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()
    assert np.array_equal(rows, collection.get_rows("item", torch.from_numpy(ids)).numpy())
    print(f"{rows.shape} from four cards, equal to the rows of the checkpoint")


if __name__ == "__main__":
    main()
