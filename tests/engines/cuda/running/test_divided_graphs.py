"""Random graphs of weights and inputs: a divided plan computes what the whole one does, bit for bit.

Its other half runs once. Then the weights become NaN, and the workspace before each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels.kernel import Launch
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.engines.cuda.planning.composition import compose
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split, is_elementwise
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep, OperationStep
from cudnn_actor.protocol import Graph, GraphBuilder, OperationGraph

from ... import host_cuda

DIMS = (4, 6, 8)
GRAPHS = 12


class Drawn:
    """A random graph: which inputs are weights is part of their names."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        g = self._g = GraphBuilder()
        weights, inputs = self._rng.integers(1, 4), self._rng.integers(1, 3)
        self._tensors: list[Any] = [g.input(f"w{n}", DIMS) for n in range(weights)]
        self._tensors += [g.input(f"x{n}", DIMS) for n in range(inputs)]
        for _ in range(self._rng.integers(3, 12)):
            self._tensors.append(self._next())
        results = self._tensors[-self._rng.integers(1, 4) :]
        self.graph: Graph = g.build(**{f"y{n}": 2.0 * each for n, each in enumerate(results)})

    def _any(self) -> Any:
        recent = self._tensors[-4:] if self._rng.random() < 0.6 else self._tensors
        return recent[self._rng.integers(len(recent))]

    def _next(self) -> Any:
        g, rng, x = self._g, self._rng, self._any()
        kinds: list[Callable[[], Any]] = [
            lambda: x + self._any(),
            lambda: x * self._any(),
            lambda: g.relu(x),
            lambda: g.pad(x[:, :, :5], [(0, 0), (0, 0), (1, 2)]),
            lambda: g.sum(x, 2, keepdims=True) + self._any(),
            lambda: x.reshape((6, 4, 8)).transpose((1, 0, 2)) + x,
            self._together,
            self._together,
        ]
        return kinds[rng.integers(len(kinds))]()

    def _together(self) -> Any:
        """Two results, often one of weights and one of inputs, written to where they lie together."""
        axis = int(self._rng.integers(3))
        part = [slice(None)] * 3
        part[axis] = slice(0, DIMS[axis] // 2)
        of = (self._tensors[self._rng.integers(len(self._tensors))] for _ in range(2))
        return self._g.concatenate([self._g.relu(each[tuple(part)]) * 3.0 for each in of], axis)


def plan_of(graph: Graph) -> CudaPlan:
    """A plan in pieces, all of our own kernels: the last way to run an operation is one."""

    def build(piece: OperationGraph) -> CudaPlan:
        return compile_split(piece, None, None, choice=0 if is_elementwise(piece) else 9)

    parts = cut(graph.body)
    return build(graph.body) if parts is None else compose(graph.body, parts, build)


def sources_of(plan: CudaPlan) -> list[str]:
    """The sources of a plan's kernels."""
    found: list[Launch] = []
    for step in plan.recipe.steps:
        if isinstance(step, KernelStep):
            found += step.kernel.launches()
        else:
            assert isinstance(step, OperationStep)
            launcher = IMPLEMENTATIONS[type(step.operation)].launchers[step.launcher]
            assert launcher.launches is not None
            found += launcher.launches(step.operation, step.tensors)
    return [launch.source for launch in found]


class Memory:
    """The buffers of a graph, what is kept, and a workspace."""

    def __init__(self, graph: Graph, seed: int, kept: list[int], workspace: int) -> None:
        rng, names = np.random.default_rng(seed), {graph.ports[at].uid: n for n, at in graph.places.items()}
        self.by_name: dict[str, np.ndarray] = {}
        for uid in graph.body.bound:
            dims = graph.body.tensor(uid).dims
            self.by_name[names[uid]] = rng.integers(-4, 5, dims).astype(np.float32)
        self.kept = [np.full(nbytes // 4, np.nan, np.float32) for nbytes in kept]
        self.workspace = np.full(workspace // 4 + 1, np.nan, np.float32)

    @property
    def buffers(self) -> list[np.ndarray]:
        """All but the workspace."""
        return [*self.by_name.values(), *self.kept]

    @property
    def pointers(self) -> list[int]:
        """The address of each buffer."""
        return [array.ctypes.data for array in self.buffers]

    def run(self, program: Program) -> dict[str, np.ndarray]:
        """Run on these, with a workspace of NaN. Returns copies of the results."""
        self.workspace[:] = np.nan
        program.launch(self.pointers, (), self.workspace.ctypes.data, int)
        return {name: array.copy() for name, array in self.by_name.items() if name[0] == "y"}

    def draw(self, seed: int, kind: str) -> None:
        """Draw other values for the inputs or the weights."""
        rng = np.random.default_rng(seed)
        for name, array in self.by_name.items():
            if name[0] == kind:
                array[:] = rng.integers(-4, 5, array.shape)


def test_a_divided_plan_computes_what_the_whole_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host_cuda.use(monkeypatch)
    graphs = [Drawn(seed).graph for seed in range(GRAPHS)]
    plans = [plan_of(graph) for graph in graphs]
    host_cuda.compile_together(itertools.chain.from_iterable(map(sources_of, plans)))
    found = [check(graph, plan, seed) for seed, (graph, plan) in enumerate(zip(graphs, plans, strict=True))]
    print(found)  # noqa: T201 - shown if it fails
    assert sum(map(bool, found)) > GRAPHS // 4
    assert max(found) > 2


def check(graph: Graph, plan: CudaPlan, seed: int) -> int:
    """Run the whole plan and the divided one with the same values. Returns how many steps run once."""
    names = {graph.ports[at].uid: name for name, at in graph.places.items()}
    weights = frozenset(place for place, uid in enumerate(graph.body.bound) if names[uid][0] == "w")
    halves = plan.divide(weights)
    if halves is None:
        return 0
    kept, steps = [each.nbytes for each in halves.kept], halves.each.recipe.steps
    read = {source.number for step in steps for source in step.sources if isinstance(source, Buffer)}
    memory, other = (Memory(graph, seed, of, plan.workspace) for of in ([], kept))
    whole, once, each = (Program(one, None, host_cuda.Stream()) for one in (plan, halves.once, halves.each))
    for write in range(2):
        for one in (memory, other):
            one.draw(write, "w")
        other.run(once)
        for place in weights - read:
            other.buffers[place][:] = np.nan
        for turn in range(2):
            for one in (memory, other):
                one.draw(10 * write + turn, "x")
            for name, value in memory.run(whole).items():
                result = other.run(each)[name]
                np.testing.assert_array_equal(result, value, err_msg=f"Drawn({seed}), {name}")
    return len(halves.once.recipe.steps)
