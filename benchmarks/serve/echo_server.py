"""An echo server on the same gRPC library: an upper bound for a Python server. Every response has the size of a lookup's.

python echo_server.py PORT IDS DIM FEATURES
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import numpy as np

from thermocline.serve.protocol import schema
from thermocline.serve.protocol.grpc_messages import write_response


async def main(port: int, ids: int, dim: int, features: int) -> None:
    answer = write_response("tables", "1", "", {f"C{n}": np.zeros((ids, dim), np.float32) for n in range(features)})

    async def echo(data: bytes, context: Any) -> bytes:
        return answer

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    methods = {"ModelInfer": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(schema.SERVICE, methods),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()  # as our own server
    except ModuleNotFoundError:
        pass
    asyncio.run(main(*map(int, sys.argv[1:])))
