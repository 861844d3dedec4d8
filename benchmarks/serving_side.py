"""A server of grpc.aio that answers every inference with the bytes it was given at its start: the most that
gRPC in Python allows.

    python -m benchmarks.serving_side < RESPONSE

The bytes stand there as hexadecimal digits. It prints its port, and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

import grpc

from cudnn_actor.serving.grpc_schema import SERVICE

__all__ = ["main"]


async def _serve(response: bytes) -> None:
    async def answer(_: bytes, __: object) -> bytes:
        return response

    server = grpc.aio.server()
    methods = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def main() -> None:
    asyncio.run(_serve(bytes.fromhex(sys.stdin.read())))


if __name__ == "__main__":
    main()
