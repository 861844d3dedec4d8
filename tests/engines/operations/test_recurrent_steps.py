"""Steps of recurrent layers with peepholes, bounds and functions by gate, against loops written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, recurrent_steps
from cudnn_actor.engines.cuda.operations.recurrent_steps import BY_STEP
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.operations import CellActivation, CellFunction, RecurrentCell, RecurrentSteps
from cudnn_actor.protocol import DType, GraphBuilder, GraphTensor, InvalidRequest, TensorSpec
from cudnn_actor.protocol.operations import Specs
from cudnn_actor.protocol.operations import recurrent_steps as definitions
from cudnn_actor.protocol.operations.base import tensor_of

from ...in_one_test import cases_in_one_test
from .. import host_cuda
from ..problems import FLOATS, normal
from ..references import assert_all_close
from ..workbench import Workbench, spread

NAN = math.nan
STATES = ("h0", "c0")
Scalar = Callable[[float], float]


def activation(name: str, alpha: float = 1.0, beta: float = 0.0) -> CellActivation:
    return CellActivation(function=CellFunction(name), alpha=alpha, beta=beta)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


KNOWN: dict[str, Callable[[float, float], Scalar]] = {
    "affine": lambda a, b: lambda x: a * x + b,
    "elu": lambda a, b: lambda x: x if x > 0 else a * (math.exp(x) - 1),
    "hard_sigmoid": lambda a, b: lambda x: max(0.0, min(1.0, a * x + b)),
    "leaky_relu": lambda a, b: lambda x: x if x > 0 else a * x,
    "relu": lambda a, b: lambda x: max(0.0, x),
    "scaled_tanh": lambda a, b: lambda x: a * math.tanh(b * x),
    "sigmoid": lambda a, b: sigmoid,
    "softplus": lambda a, b: lambda x: math.log(1 + math.exp(x)),
    "softsign": lambda a, b: lambda x: x / (1 + abs(x)),
    "tanh": lambda a, b: math.tanh,
    "thresholded_relu": lambda a, b: lambda x: x if x > a else 0.0,
}
USUAL = {"plain": ["tanh"], "lstm": ["sigmoid", "tanh", "tanh"], "gru": ["sigmoid", "tanh"]}


@dataclass
class Problem:
    """A layer with these operands besides x and w, and these options."""

    cell: RecurrentCell
    directions: int = 1
    operands: str = "bias h0 c0"
    lengths: list[int] | None = None
    steps: int = 5
    batch: int = 3
    hidden: int = 4
    dtype: DType = DType.FLOAT64
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def dims(self) -> dict[str, tuple[int, ...]]:
        """Of the inputs."""
        d, rows, hidden = self.directions, self.cell.gates * self.hidden, self.hidden
        found: dict[str, tuple[int, ...]] = {"x": (self.steps, self.batch, d * rows), "w": (d, rows, hidden)}
        more = {"bias": (d, rows), "peepholes": (d, 3, hidden)}
        more |= dict.fromkeys(STATES, (d, self.batch, hidden))
        found |= {name: more[name] for name in self.operands.split()}
        if self.cell is not RecurrentCell.LSTM:
            found.pop("c0", None)
        return found | ({} if self.lengths is None else {"lengths": (self.batch,)})

    @property
    def given(self) -> dict[str, np.ndarray]:
        found = {}
        for number, (name, dims) in enumerate(self.dims.items()):
            scale = 1 / math.sqrt(self.hidden) if name == "w" else 1
            found[name] = (normal(dims, DType.FLOAT64, number) * scale).astype(self.dtype.numpy)
        return found if self.lengths is None else found | {"lengths": np.array(self.lengths, np.int32)}

    def operation(self) -> RecurrentSteps[Any]:
        names: list[str] = [*self.dims, "y", "h_n", *(["c_n"] if self.cell is RecurrentCell.LSTM else [])]
        operands: dict[str, Any] = {name: name for name in names}
        return RecurrentSteps(**operands, cell=self.cell, **self.options)

    def run(self, bench: Workbench, how: str = "packed", **changed: np.ndarray) -> dict[str, np.ndarray]:
        """The results. `changed`: other inputs."""
        given, operation = {**self.given, **changed}, self.operation()
        specs = self.specs(how, given)
        refs = {name: bench.empty(spec) for name, spec in specs.items() if name not in given}
        refs |= {name: bench.place(array, specs[name]) for name, array in given.items()}
        bench.run(operation.with_operands(refs.__getitem__))
        return {name: bench.read(refs[name]) for name, _ in operation.named(operation.outputs)}

    def specs(self, how: str = "packed", given: Mapping[str, np.ndarray] = MappingProxyType({})) -> Specs:
        """Of all operands. `given`: inputs that may have other dtypes."""
        dtypes = {name: DType.INT32 if name == "lengths" else self.dtype for name in self.dims}
        dtypes |= {name: TensorSpec.like(array).dtype for name, array in given.items()}
        specs = {name: TensorSpec.packed(dims, dtypes[name]) for name, dims in self.dims.items()}
        specs |= self.operation().infer(specs)
        return {n: spread(s.dims, s.dtype) for n, s in specs.items()} if how == "spread" else specs

    @property
    def tensors(self) -> list[GraphTensor]:
        """In the order of the operation's operands."""
        specs = self.specs()
        names = [name for name, _ in self.operation().named()]
        return [tensor_of(uid, specs[name]) for uid, name in enumerate(names)]


def written_out(problem: Problem) -> dict[str, np.ndarray]:
    """Sequence by sequence, as ONNX has the formulas."""
    given = {name: array.astype(np.float64) for name, array in problem.given.items()}
    d, batch, hidden = problem.directions, problem.batch, problem.hidden
    zeros = np.zeros((d, batch, hidden))
    h_n, c_n = (given.get(name, zeros).copy() for name in STATES)
    y = np.zeros((problem.steps, batch, d, hidden))
    x = given["x"].reshape(problem.steps, batch, d, problem.cell.gates, hidden)
    for way, sample in np.ndindex(d, batch):
        own = {name: given[name][way] for name in ("w", "bias", "peepholes") if name in given}
        functions = functions_of(problem, way)
        length = problem.steps if problem.lengths is None else problem.lengths[sample]
        length = min(max(length, 0), problem.steps)
        backwards = way == 1 or problem.options.get("reverse", False)
        for time in range(length)[:: -1 if backwards else 1]:
            before = h_n[way, sample], c_n[way, sample]
            h, c = stepped(problem, functions, own, x[time, sample, way], before)
            h_n[way, sample], c_n[way, sample], y[time, sample, way] = h, c, h
    found = {"y": y.reshape(problem.steps, batch, d * hidden), "h_n": h_n, "c_n": c_n}
    return {name: found[name] for name, _ in problem.operation().named(RecurrentSteps.outputs)}


def functions_of(problem: Problem, way: int) -> list[Callable[[np.ndarray], np.ndarray]]:
    usual = USUAL[problem.cell.split("_")[0]]
    count, every = len(usual), problem.options.get("activations")
    own = map(activation, usual) if every is None else every[way * count : (way + 1) * count]
    return [np.vectorize(KNOWN[each.function](each.alpha, each.beta), otypes=[float]) for each in own]


def stepped(problem: Problem, functions: Any, own: Any, x: np.ndarray, before: Any) -> Any:
    """h and c behind a step of a sequence."""
    (f, *others), (h, c) = functions, before
    cell, clip, hidden = problem.cell, problem.options.get("clip", math.inf), problem.hidden

    def of_state(gate: int, state: np.ndarray) -> Any:
        rows = slice(gate * hidden, (gate + 1) * hidden)
        return own["w"][rows] @ state + (own["bias"][rows] if "bias" in own else 0)

    def gate(number: int, function: Any, inner: Any) -> Any:
        return function(np.clip(x[number] + inner, -clip, clip))

    if cell is RecurrentCell.PLAIN:
        return gate(0, f, of_state(0, h)), c
    if cell is not RecurrentCell.LSTM:
        r, z = (gate(number, f, of_state(number, h)) for number in range(2))
        inner = r * of_state(2, h) if cell is RecurrentCell.GRU else of_state(2, r * h)
        return (1 - z) * gate(2, others[0], inner) + z * h, c
    p = own.get("peepholes", np.zeros((3, hidden)))
    i = gate(0, f, of_state(0, h) + p[0] * c)
    forget = 1 - i if problem.options.get("coupled") else gate(1, f, of_state(1, h) + p[1] * c)
    cells = forget * c + i * gate(2, others[0], of_state(2, h))
    return gate(3, f, of_state(3, h) + p[2] * cells) * others[1](cells), cells


LSTM, GRU, PLAIN, FIRST = (
    RecurrentCell.LSTM,
    RecurrentCell.GRU,
    RecurrentCell.PLAIN,
    RecurrentCell.GRU_RESET_FIRST,
)
MIXED = (
    activation("hard_sigmoid", 0.3, 0.4),
    activation("affine", 0.5, 0.1),
    activation("softsign"),
    activation("leaky_relu", 0.2),
    activation("scaled_tanh", 0.7, 1.2),
    activation("thresholded_relu", 0.1),
)
PROBLEMS = {
    "an LSTM without anything": Problem(LSTM, operands=""),
    "peepholes": Problem(LSTM, operands="bias peepholes h0 c0"),
    "peepholes and clips, both ways": Problem(
        LSTM, 2, "bias peepholes h0 c0", [5, 0, 2], options={"clip": 0.4}
    ),
    "coupled gates": Problem(LSTM, 2, "peepholes", options={"coupled": True}),
    "other functions": Problem(LSTM, 2, options={"activations": MIXED, "clip": 0.6}),
    "a plain one backwards": Problem(PLAIN, lengths=[3, 5, 0], options={"reverse": True}),
    "a plain one of relu": Problem(PLAIN, 2, options={"activations": (activation("relu"),) * 2}),
    "a GRU, with lengths out of range": Problem(GRU, 2, lengths=[9, -1, 4], options={"clip": 0.5}),
    "a GRU that resets first": Problem(FIRST, 2, lengths=[5, 1, 4], options={"clip": 0.5}),
    "a GRU of softsign and softplus": Problem(
        FIRST, options={"activations": (activation("softsign"), activation("softplus"))}
    ),
    "a plain one of elu": Problem(PLAIN, options={"activations": (activation("elu", 0.5),)}),
    "an LSTM of more units": Problem(LSTM, 2, "bias peepholes h0 c0", hidden=19),
    "a GRU of more units": Problem(GRU, hidden=19),
    "a GRU that resets first, of more units": Problem(FIRST, 2, hidden=19),
    "an LSTM of more units and sequences": Problem(
        LSTM, 2, lengths=[3, 2, 0] * 3, steps=3, batch=9, hidden=35
    ),
    "a GRU that resets first, of more sequences": Problem(FIRST, steps=3, batch=9, hidden=34),
    "no steps": Problem(LSTM, 2, steps=0),
    "one of everything": Problem(LSTM, operands="peepholes", steps=1, batch=1, hidden=1),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
TOLERANCES = {dtype.numpy: bound for dtype, bound in zip(FLOATS, (1e-12, 2e-6, 2e-3, 2e-2), strict=True)}


def check(found: dict[str, np.ndarray], problem: Problem) -> None:
    assert_all_close(found, written_out(problem), TOLERANCES)


@cases_in_one_test
@each_problem
def test_steps_are_those_of_the_formulas(bench: Workbench, problem: Problem) -> None:
    check(problem.run(bench), problem)
    check(problem.run(bench, "spread"), problem)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_of_floats(bench: Workbench, dtype: DType) -> None:
    problem = Problem(LSTM, 2, "bias peepholes h0 c0", [4, 5, 1], dtype=dtype, options={"clip": 1.0})
    found = problem.run(bench)
    assert {array.dtype for array in found.values()} == {dtype.numpy}
    check(found, problem)


def test_two_thousand_steps(bench: Workbench) -> None:
    """The state is carried in float32: errors of steps do not add up where gates forget."""
    problem = Problem(LSTM, 1, "bias peepholes", [1800], 2000, 1, 2, DType.FLOAT32)
    problem.options |= {"clip": 3.0, "reverse": True}
    check(problem.run(bench), problem)


def test_lengths_may_be_of_int64_and_as_far_out_of_range_as_they_can(bench: Workbench) -> None:
    for reverse in (False, True):
        problem = Problem(GRU, lengths=[5, 0, 2], options={"reverse": reverse})
        check(problem.run(bench, lengths=np.array([2**63 - 1, -(2**63), 2])), problem)


def test_what_lies_behind_a_sequence_has_no_effect(bench: Workbench) -> None:
    problem = Problem(LSTM, 2, "bias peepholes", [3, 0, 5])
    x = problem.given["x"].copy()
    x[3:, 0], x[:, 1] = NAN, NAN
    check(problem.run(bench, x=x), problem)


@cases_in_one_test
@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("x", {"x": ((5, 3, 15), "float32")}),
        ("x", {"x": ((5, 3, 16), "int32")}),
        ("x", {"x": ((5, 16), "float32")}),
        ("w", {"w": ((1, 16, 5), "float32")}),
        ("w", {"w": ((1, 16, 4), "float64")}),
        ("w", {"w": ((3, 16, 4), "float32")}),
        ("bias", {"bias": ((1, 2, 16), "float32")}),
        ("peepholes", {"peepholes": ((1, 12), "float32")}),
        ("peepholes", {"peepholes": ((1, 3, 4), "float32"), "cell": PLAIN, "w": ((1, 4, 4), "float32")}),
        ("lengths", {"lengths": ((3,), "float32")}),
        ("lengths", {"lengths": ((4,), "int32")}),
        ("h0", {"h0": ((1, 4, 3), "float32")}),
        ("c0", {"c0": ((2, 3, 4), "float32")}),
        ("coupled", {"coupled": True, "cell": GRU}),
        ("coupled", {"coupled": 1}),
        ("cell", {"cell": "rnn"}),
        ("clip", {"clip": 0.0}),
        ("clip", {"clip": NAN}),
        ("activations", {"activations": (activation("tanh"),)}),
        ("activations", {"activations": (activation("tanh"), "tanh", activation("tanh"))}),
        ("activations[0].alpha", {"activations": (activation("elu", NAN), *MIXED[:2])}),
        ("reverse", {"reverse": True, "w": ((2, 16, 4), "float32")}),
    ],
)
def test_a_mistake_names_its_field(field: str, changes: dict[str, Any]) -> None:
    g = GraphBuilder()
    shapes: dict[str, Any] = {"x": ((5, 3, 16), "float32"), "w": ((1, 16, 4), "float32")}
    options: dict[str, Any] = {"cell": LSTM}
    for name, value in changes.items():
        (shapes if name in (*RecurrentSteps.inputs,) else options)[name] = value
    tensors: Any = {name: g.input(name, *shape) for name, shape in shapes.items()}
    operation: RecurrentSteps[Any] = RecurrentSteps(**tensors, **options)
    with pytest.raises(InvalidRequest) as caught:
        g.apply(operation)
    assert caught.value.field == field


@pytest.mark.parametrize("little", [0, 1 << 18])
def test_a_definition_is_the_same_on_a_device(monkeypatch: pytest.MonkeyPatch, little: int) -> None:
    """Where NumPy stands for CuPy: on the host where there is little to do in a step, else there."""

    class Device(NumPy):
        copies = 0

        def asnumpy(self, array: np.ndarray) -> np.ndarray:
            self.copies += 1
            return array.copy()

    monkeypatch.setattr(definitions, "_LITTLE_WORK", little)
    problem, device = PROBLEMS["peepholes and clips, both ways"], Device()
    specs = {name: problem.specs()[name] for name in ("y", "h_n", "c_n")}
    check(problem.operation().evaluate(device, problem.given, specs), problem)
    assert bool(device.copies) is bool(little)


def test_there_are_no_gradients() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (5, 3, 4)), g.input("w", (1, 4, 4))
    y = g.apply(RecurrentSteps(x=x, w=w, cell=PLAIN))
    with pytest.raises(InvalidRequest, match="RecurrentSteps, which has no gradient"):
        g.grad(g.sum(y), x)


# The kernels, on the host.


@pytest.fixture
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)
    host_cuda.compile_together(
        source
        for problem in PROBLEMS.values()
        for launcher in ("kernel", BY_STEP)
        for source in host_cuda.sources_of(problem.operation(), problem.tensors, launcher)
    )


WAYS: dict[str, tuple[str, dict[str, int]]] = {
    "a launch for all steps": ("kernel", {}),
    "several units a thread": ("kernel", {"_MOST_THREADS": 2}),
    "a launch for each step": (BY_STEP, {}),
    "blocks of few units and sequences": (BY_STEP, {"_WARPS": 2, "_MOST_ROWS": 1}),
}


@pytest.mark.usefixtures("_on_the_host")
@pytest.mark.parametrize("way", WAYS)
def test_the_kernels_do_the_same(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    launcher, limits = WAYS[way]
    for name, value in limits.items():
        monkeypatch.setattr(recurrent_steps, name, value)
    for problem in PROBLEMS.values():
        given = problem.given
        found = host_cuda.launched(problem.operation(), {**problem.specs("spread")}, given, launcher)
        check(found, problem)


def test_the_product_with_the_input_and_its_bias_are_one_piece_and_the_steps_another() -> None:
    g, problem = GraphBuilder(), Problem(LSTM, operands="bias peepholes h0 c0")
    tensors: Any = {n: g.input(n, dims) for n, dims in problem.dims.items() if n != "x"}
    x = g.matmul(g.input("x", (5, 3, 8)), g.input("w_ih", (8, 16))) + g.input("b_ih", (16,))
    operation: RecurrentSteps[Any] = RecurrentSteps(x=x, **tensors, cell=LSTM, clip=1.0)
    body = g.build(y=g.apply(operation)).body
    found = cut(body)
    assert found is not None
    pieces = [[body.operations[number].kind for number in piece.numbers] for piece in found.pieces]
    assert pieces == [["matmul", "pointwise"], ["recurrent_steps"]]


def test_a_large_layer_has_a_launch_for_each_step_and_a_small_one_has_one() -> None:
    def launches(problem: Problem) -> list[str]:
        operation: Any = problem.operation()
        names = [name for name, _ in operation.named()]
        node, implementation = operation.with_operands(names.index), IMPLEMENTATIONS[RecurrentSteps]
        first, _ = implementation.launchers_in_order(node, problem.tensors)
        launcher = implementation.launchers[first]
        assert launcher.launches is not None
        found = launcher.launches(node, problem.tensors)
        assert len({launch.source for launch in found}) <= 1
        return [launch.name for launch in found]

    small: dict[str, Any] = {"hidden": 64, "operands": ""}
    large: dict[str, Any] = {"hidden": 272, "operands": "", "dtype": DType.FLOAT64}
    walk = ["recurrent_steps"]
    assert launches(Problem(LSTM, 2, steps=10_000, **small)) == ["recurrent_start", *walk]
    assert launches(Problem(LSTM, 2, steps=50, **large)) == ["recurrent_start", *walk * 50]
    assert launches(Problem(LSTM, 2, steps=50, batch=129, **large)) == ["recurrent_start", *walk]
    assert launches(Problem(FIRST, steps=20, hidden=448, operands="")) == ["recurrent_start", *walk * 40]
    assert launches(Problem(LSTM, steps=20_000, batch=1, **large)) == ["recurrent_start", *walk]
    assert launches(Problem(LSTM, steps=0, **small)) == ["recurrent_start"]
    assert launches(Problem(LSTM, batch=0, **small)) == []
