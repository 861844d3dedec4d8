"""One side of `graphs`: times the import of the package, then graphs, with what every release has."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_BEGAN = time.perf_counter()
import cudnn_actor  # noqa: E402

_IMPORTED = time.perf_counter()
import msgspec  # noqa: E402

from cudnn_actor.protocol import DType, GraphTensor, OperationGraph, TensorSpec  # noqa: E402
from cudnn_actor.protocol.operations import Pointwise, PointwiseMode, TensorRole  # noqa: E402

_OLD = "compute" in Pointwise.__struct_fields__
_ENOUGH_S = 0.2


def addition(uid: int) -> Pointwise[int]:
    """The sum of a tensor and the next one, stored in the one after that."""
    fields: dict[str, Any] = {"mode": PointwiseMode.ADD, "operands": (uid, uid + 1), "result": uid + 2}
    if _OLD:
        fields["compute"] = DType.FLOAT32
    return Pointwise(**fields)


def chain(count: int) -> tuple[tuple[GraphTensor, ...], tuple[Pointwise[int], ...]]:
    """The parts of a graph in which each operation adds an input to the result before it."""
    spec = TensorSpec.packed((2, 8, 4, 4))
    virtual = range(2, 2 * count, 2)
    tensors = tuple(
        GraphTensor(
            uid=uid,
            dims=spec.dims,
            strides=spec.strides,
            dtype=spec.dtype,
            role=TensorRole.VIRTUAL if uid in virtual else TensorRole.BOUND,
        )
        for uid in range(2 * count + 1)
    )
    operations = tuple(addition(uid) for uid in range(0, 2 * count, 2))
    return tensors, operations


def best(call: object) -> float:
    """The shortest of some calls, in seconds."""
    times: list[float] = []
    while not times or (sum(times) < _ENOUGH_S and len(times) < 200):
        began = time.perf_counter()
        call()  # type: ignore[operator]
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    found: dict[str, object] = {"import_s": _IMPORTED - _BEGAN, "package": cudnn_actor.__file__}
    for count in map(int, sys.argv[1:]):
        tensors, operations = chain(count)

        def construct(tensors: object = tensors, operations: object = operations) -> OperationGraph:
            graph = OperationGraph(tensors=tensors, operations=operations)  # type: ignore[arg-type]
            graph.digest()
            return graph

        data = msgspec.msgpack.encode(construct())
        decoder = msgspec.msgpack.Decoder(OperationGraph)
        decoder.decode(data)
        found[str(count)] = {
            "construct_and_digest_s": best(construct),
            "decode_s": best(lambda decoder=decoder, data=data: decoder.decode(data)),
            "bytes": len(data),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
