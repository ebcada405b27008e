"""MLServer as a server of one table, as its documentation shows a custom runtime; runs in an environment of its own.

    python mlserver_server.py PORT TABLE.npy

Without worker processes: with them a request is pickled over to another process and back, which takes longer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import numpy as np
from mlserver import MLModel, MLServer
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelSettings, Settings
from mlserver.types import InferenceResponse


class MLServerTables(MLModel):  # type: ignore[misc]
    async def load(self) -> bool:
        self.rows_RD = np.load(os.environ["TABLE"])
        return True

    async def predict(self, payload: Any) -> InferenceResponse:
        rows_ND = self.rows_RD.take(NumpyCodec.decode_input(payload.inputs[0]).reshape(-1), axis=0)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("t", rows_ND)])


async def main(port: int) -> None:
    ports = {"grpc_port": port, "http_port": port + 1, "metrics_port": port + 2}
    settings = Settings(host="127.0.0.1", parallel_workers=0, grpc_max_message_length=1 << 28, debug=False, **ports)
    await MLServer(settings).start([ModelSettings(name="tables", implementation=MLServerTables)])


if __name__ == "__main__":
    os.environ["TABLE"] = sys.argv[2]
    asyncio.run(main(int(sys.argv[1])))
