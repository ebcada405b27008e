"""KServe's SDK as a server of one table, as its documentation shows a custom model; runs in an environment of its own.

python kserve_server.py PORT TABLE.npy
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from kserve import InferOutput, InferResponse, Model, ModelServer


class KServeTables(Model):  # type: ignore[misc]
    def __init__(self, file: str) -> None:
        super().__init__("tables")
        self.rows_RD = np.load(file)
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> InferResponse:
        rows_ND = self.rows_RD.take(payload.inputs[0].as_numpy(), axis=0)
        output = InferOutput("t", list(rows_ND.shape), "FP32")
        output.set_data_from_numpy(rows_ND, binary_data=True)
        return InferResponse(payload.id or "", "tables", [output])


if __name__ == "__main__":
    port, file = int(sys.argv[1]), sys.argv[2]
    ModelServer(http_port=port + 1, grpc_port=port, workers=1, enable_grpc=True).start([KServeTables(file)])
