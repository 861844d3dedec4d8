"""Bodies of loops, and the same loops in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np

from cudnn_actor import BufferRef, CudnnRef, GraphBuilder, Loop, TensorSpec
from cudnn_actor.messages import Allocate
from cudnn_actor.protocol.types.dtypes import DTypeName

__all__ = ["Case", "cases", "counting", "recurrence", "run_case"]

Arrays = dict[str, np.ndarray]


class Case(NamedTuple):
    """A loop to run.

    `lead` are the dims before the features. `limit` is the turn before which its condition ends it; None: it
    has no condition. `permuted`: whether the buffers of rows have other strides than packed ones.
    """

    kind: str
    lead: tuple[int, ...]
    n: int
    dtype: DTypeName
    turns: int
    limit: int | None
    goes: bool
    scans: bool
    stacks: bool
    permuted: bool

    def loop(self) -> Loop:
        g = GraphBuilder()
        dims = (*self.lead, self.n)
        a, b = g.input("a", dims, self.dtype), g.input("b", dims, self.dtype)
        w = g.input("w", (self.n, self.n), self.dtype)
        x = g.input("x", dims, self.dtype) if self.scans else 0.5
        outputs: dict[str, Any] = {}
        match self.kind:
            case "sum":
                outputs["new_a"], outputs["new_b"] = a + x, b * 0.5 + x
            case "swap":  # each is read after the other would have been overwritten
                outputs["new_a"], outputs["new_b"] = b + 0.0, a + b
            case _:
                outputs["new_a"] = g.tanh(g.matmul(a, w) + x)
                outputs["new_b"] = b - a
        carried = {"a": "new_a", "b": "new_b"}
        if self.limit is not None:
            i, limit = g.input("i", (1,), "int32"), g.input("limit", (1,), "int32")
            g.input("go", (1,), "bool")  # nothing reads it but the loop
            outputs["new_i"] = i + 1
            outputs["goes_on"] = outputs["new_i"] < limit
            carried |= {"i": "new_i", "go": "goes_on"}
        if self.stacks:
            outputs |= {"y": outputs["new_a"] * 2.0, "z": (a + b).sum()}
        scanned = ("x",) if self.scans else ()
        condition = None if self.limit is None else "go"
        return Loop(body=g.build(**outputs), carried=carried, scanned=scanned, condition=condition)

    def values(self) -> Arrays:
        rng = np.random.default_rng(self.turns + 31 * self.n)
        dims = (*self.lead, self.n)
        found = {"a": rng.uniform(-1, 1, dims), "b": rng.uniform(-1, 1, dims)}
        found["w"] = rng.uniform(-1, 1, (self.n, self.n)) / self.n
        if self.scans:
            found["x"] = rng.uniform(-1, 1, (self.turns, *dims))
        found = {name: array.astype(self.dtype) for name, array in found.items()}
        if self.limit is not None:
            found |= {"i": np.zeros(1, np.int32), "limit": np.array([self.limit], np.int32)}
            found["go"] = np.array([self.goes])
        return found

    def expected(self, values: Arrays) -> tuple[Arrays, int]:
        """What the outputs hold, and how many turns ran: as many rows are written."""
        a, b, w = values["a"], values["b"], values["w"]
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        go = self.goes if self.limit is not None else True
        while go and len(rows) < self.turns:
            x = values["x"][len(rows)] if self.scans else self.dtype_of(0.5)
            total = (a + b).sum()
            match self.kind:
                case "sum":
                    a, b = a + x, b * self.dtype_of(0.5) + x
                case "swap":
                    a, b = b, a + b
                case _:
                    a, b = np.tanh(a @ w + x), b - a
            rows.append((a * 2, total))
            go = self.limit is None or len(rows) < self.limit
        found = {"new_a": a, "new_b": b}
        if self.limit is not None:
            found |= {"new_i": np.array([len(rows)], np.int32), "goes_on": np.array([go])}
        if self.stacks:
            found |= {"y": np.array([y for y, _ in rows]), "z": np.array([z for _, z in rows])}
        return found, len(rows)

    def dtype_of(self, number: float) -> Any:
        return np.dtype(self.dtype).type(number)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        kind=draw(st.sampled_from(["sum", "swap", "product"])),
        lead=draw(st.sampled_from([(1,), (3,), (2, 3)])),
        n=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(["float32", "float64"])),
        turns=draw(st.sampled_from([0, 1, 2, 3, 8])),
        limit=draw(st.sampled_from([None, 0, 1, 2, 20])),
        goes=draw(st.sampled_from([True, True, False])),
        scans=draw(st.booleans()),
        stacks=draw(st.booleans()),
        permuted=draw(st.booleans()),
    )


async def run_case(gpu: CudnnRef, case: Case) -> None:
    """Run a loop, and compare what it gives with NumPy's."""
    loop, values = case.loop(), case.values()
    wanted, ran = case.expected(values)
    specs = loop.specs(case.turns)
    buffers = {name: await gpu.upload(array) for name, array in values.items()}
    if case.permuted:
        for name in (*loop.scanned, *loop.stacked):
            buffers[name] = await _permuted(gpu, specs[name], values.get(name))
    outputs = await gpu.loop(loop, buffers, turns=case.turns)
    for name, array in wanted.items():
        got = await gpu.download(getattr(outputs, name))
        assert got.dtype == specs[name].dtype.numpy
        got = got[:ran] if name in loop.stacked else got
        tolerance = 1e-4 if case.dtype == "float32" else 1e-11
        np.testing.assert_allclose(
            got, array.reshape(got.shape), rtol=tolerance, atol=tolerance, err_msg=name
        )
    for ref in {*buffers.values(), *outputs}:
        await gpu.free(ref)


async def _permuted(gpu: CudnnRef, spec: TensorSpec, values: np.ndarray | None) -> BufferRef:
    """A buffer of those dims in which the turn changes fastest."""
    order = (*spec.dims[1:], spec.dims[0])
    packed = TensorSpec.packed(order, spec.dtype)
    strides = (packed.strides[-1], *packed.strides[:-1])
    permuted = TensorSpec.strided(spec.dims, strides, spec.dtype)
    return await gpu.ask(Allocate(spec=permuted, data=values))


def counting() -> Loop:
    """A loop that counts its turns, and writes each count to a row."""
    g = GraphBuilder()
    count = g.input("count", (1,), "float64") + 1.0
    return Loop(body=g.build(counted=count, row=count * 1.0), carried={"count": "counted"})


def recurrence(n: int) -> Loop:
    """A recurrent layer of `n` units: h' = tanh(h @ w + x), and y = 2 h'."""
    g = GraphBuilder()
    h, x, w = g.input("h", (1, n)), g.input("x", (1, n)), g.input("w", (n, n))
    after = g.tanh(g.matmul(h, w) + x)
    return Loop(body=g.build(new_h=after, y=after * 2.0), carried={"h": "new_h"}, scanned=("x",))
