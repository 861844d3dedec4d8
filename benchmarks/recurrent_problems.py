"""Recurrent layers that `operations` times: cuDNN's, and the steps of cells that cuDNN does not have."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from cudnn_actor.protocol import DType, GraphBuilder, TensorSpec
from cudnn_actor.protocol.operations import RecurrentCell, RecurrentSteps

from .problem import Problem, graph_of, torch_module

__all__ = ["recurrences", "walks"]


def recurrences(dtype: DType, kind: str) -> Iterator[Problem]:
    """Four layers of 1,024 units, a batch of 64, 100 steps: forward, and with the gradients of everything."""
    torch = torch_module()
    steps, batch, units, layers = 100, 64, 1024, 4
    element = getattr(torch, dtype.value)
    module = getattr(torch.nn, kind)(units, units, num_layers=layers).to("cuda").to(element)
    given = torch.randn((steps, batch, units), device="cuda").to(element).requires_grad_()
    slope = torch.randn((steps, batch, units), device="cuda").to(element)

    def forward() -> object:
        with torch.no_grad():
            return module(given)

    def trained() -> object:
        module.zero_grad(set_to_none=True)
        given.grad = None
        return module(given)[0].backward(slope)

    for backwards in (False, True):
        g, rows = GraphBuilder(), {"LSTM": 4, "GRU": 3}[kind] * units
        dims = ((rows, units), (rows, units), (rows,), (rows,))
        x = g.input("x", (steps, batch, units), dtype)
        weights = [
            [g.input(f"w{layer}{n}", each, dtype) for n, each in enumerate(dims)] for layer in range(layers)
        ]
        y = getattr(g, kind.lower())(x, weights).y
        outputs = {"y": y}
        if backwards:
            of = [x, *itertools.chain.from_iterable(weights)]
            found = g.grad(y, of, g.input("dy", y.dims, dtype))
            outputs |= {f"d{n}": each for n, each in enumerate(found)}
        what = "forward and gradients" if backwards else "forward"
        name = f"{kind}, {dtype.value}, {layers} x {units}, batch {batch}, {steps} steps, {what}"
        yield Problem(name, g.build(outputs).body, trained if backwards else forward, launches=True)


def walks(dtype: DType, units: int, batch: int) -> Iterator[Problem]:
    """200 steps of cells that cuDNN does not have: an LSTM with peepholes, and a GRU that resets first.

    PyTorch has no such cells, either: its side is a loop of its functions. In each of our ways to walk, the
    products with the input have been computed before, as in PyTorch's loop.
    """
    torch = torch_module()
    steps = 200
    for cell in (RecurrentCell.LSTM, RecurrentCell.GRU_RESET_FIRST):
        rows = cell.gates * units
        dims: dict[str, tuple[int, ...]] = {"x": (steps, batch, rows), "w": (1, rows, units)}
        dims |= {"bias": (1, rows), "h0": (1, batch, units)}
        if cell is RecurrentCell.LSTM:
            dims |= {"peepholes": (1, 3, units), "c0": (1, batch, units)}
        specs = {name: TensorSpec.packed(each, dtype) for name, each in dims.items()}
        specs["y"] = TensorSpec.packed((steps, batch, units), dtype)
        element = getattr(torch, dtype.value)
        given = {name: torch.randn(each, device="cuda").to(element) / 8 for name, each in dims.items()}
        loop = _peepholes if cell is RecurrentCell.LSTM else _reset_first
        what = "LSTM with peepholes" if cell is RecurrentCell.LSTM else "GRU that resets first"
        name = f"{what}, steps alone, {dtype.value}, {units} units, batch {batch}, {steps} steps"
        graph = graph_of(RecurrentSteps, specs, cell=cell)
        yield Problem(name, graph, functools.partial(loop, torch, **given), launches=True)


def _peepholes(torch: Any, *, x: Any, w: Any, bias: Any, h0: Any, c0: Any, peepholes: Any) -> Any:
    """The loop of an LSTM's cells with peepholes."""
    h, c, turned, (p_i, p_f, p_o) = h0[0], c0[0], w[0].t(), peepholes[0]
    found = []
    for each in x:
        i, f, g, o = (torch.addmm(bias[0], h, turned) + each).chunk(4, 1)
        c = torch.sigmoid(f + p_f * c) * c + torch.sigmoid(i + p_i * c) * torch.tanh(g)
        h = torch.sigmoid(o + p_o * c) * torch.tanh(c)
        found.append(h)
    return torch.stack(found)


def _reset_first(torch: Any, *, x: Any, w: Any, bias: Any, h0: Any) -> Any:
    """The loop of a GRU's cells whose state is reset before it is multiplied."""
    h, units = h0[0], h0.shape[2]
    gates, turned = w[0, : 2 * units].t(), w[0, 2 * units :].t()
    of_gates, of_new = bias[0].split(2 * units)
    found = []
    for each in x:
        r, z = torch.sigmoid(torch.addmm(of_gates, h, gates) + each[:, : 2 * units]).chunk(2, 1)
        new = torch.tanh(torch.addmm(of_new, r * h, turned) + each[:, 2 * units :])
        h = (1 - z) * new + z * h
        found.append(h)
    return torch.stack(found)
