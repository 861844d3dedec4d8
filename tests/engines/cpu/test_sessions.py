"""Sessions of ONNX Runtime: what graphs become in them, and that they compute what the operations define."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor.engines.base import RunAnywhere
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.sessions.draft import Unsupported
from cudnn_actor.engines.cpu.sessions.export import export
from cudnn_actor.engines.cpu.sessions.plan import SessionPlan
from cudnn_actor.protocol import DType, Graph, GraphBuilder, Layout, TensorSpec
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import RecurrentMode, Slice
from cudnn_actor.protocol.operations.base import tensor_of

from ...gpu.families import CONVOLUTION, FAMILIES
from ...gpu.fuzz import fuzz
from ...gpu.graphs.fuzzing import fuzz_graphs
from ...gpu.operations.drawing import draw
from ...in_one_test import cases_in_one_test
from ...whole import some
from ..devices import SESSIONS, factory
from ..differences import computed
from ..launched import SQUARE, Launched, launched_product
from ..workbench import Workbench, spread, workbench

SEED = 20
RNG = np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuEngine]:
    engine: Any = factory(SESSIONS)()
    engine.open()
    yield engine
    engine.close()


@pytest.fixture
def bench(engine: CpuEngine) -> Iterator[Workbench]:
    with workbench(engine) as bench:
        yield bench


def model(graph: OperationGraph) -> onnx.ModelProto:
    return onnx.load_model_from_string(export(graph).model())


def refusal(graph: Graph) -> str:
    with pytest.raises(Unsupported) as error:
        export(graph.body)
    return str(error.value)


def run(bench: Workbench, graph: Graph, *scalars: float, **given: Any) -> dict[str, np.ndarray]:
    """Run a graph in a session; what it writes. Buffers have the specs that the graph was built for."""
    engine, body = bench.engine, graph.body
    names = {body.tensor(uid).uid: name for uid, name in graph.names_of.items()}
    plan = engine.build(body, workspace_limit=None)
    assert isinstance(plan, SessionPlan)
    refs = {uid: bench.empty(body.tensor(uid).spec) for uid in body.bound}
    for uid, ref in refs.items():
        if names[uid] in given:
            engine.write(bench.binding(ref), np.asarray(given[names[uid]]))
    engine.execute(plan, [bench.binding(refs[uid]) for uid in body.bound], scalars)
    return {names[uid]: bench.read(refs[uid]) for uid in body.results}


# The models.


@cases_in_one_test
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != CONVOLUTION])
def test_what_is_written_is_a_model_that_onnx_accepts(family: str) -> None:
    written = 0
    for number in range(20):
        graph = draw(family, SEED, number).graph()
        try:
            found = model(graph)
        except Unsupported:
            continue
        onnx.checker.check_model(found, full_check=True)
        written += 1
    none = ("ctc_loss", "grid_sampling", "grouped_matmul", "random", "recurrent_steps", "response_norm")
    assert bool(written) is (family not in none)


def test_what_has_no_counterpart_is_named() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 4))
    assert refusal(g.build(y=g.exp(g.relu(x) + g.log1p(x)))).startswith("log1p at ")
    assert "float64" in refusal(g.build(y=g.relu(x.astype("float64"))))
    assert refusal(g.build(y=g.relu(g.input("nothing", (0, 4))))) == "tensors without elements"


@pytest.mark.parametrize(("rows", "said"), [(2048, None), (2049, "attention with 16,785,408 scores")])
def test_attention_whose_scores_would_take_much_memory_is_left_to_numpy(rows: int, said: str | None) -> None:
    g = GraphBuilder()
    q, k, v = (g.input(name, (1, 2, dim, 8)) for name, dim in (("q", rows), ("k", 4096), ("v", 4096)))
    graph = g.build(y=g.attention(q, k, v))
    if said is None:
        model(graph.body)
    else:
        assert said in refusal(graph)


def test_constants_that_bound_values_on_both_sides_are_one_node() -> None:
    """`Clip`, which ONNX Runtime computes with the convolution before it; of `Max` and `Min` it does not."""
    g = GraphBuilder()
    y = g.conv(g.input("x", (1, 4, 6, 6)), g.input("w", (4, 4, 1, 1)))
    graph = g.build(y=g.minimum(6.0, g.maximum(y, 0.0)))
    assert written(graph) == ["Conv", "Clip"]
    assert written(g.build(y=g.minimum(g.maximum(y, 3.0), 2.0))) == ["Conv", "Max", "Min"]
    above = g.maximum(y, 1.0)
    assert written(g.build(y=g.minimum(above, 2.0), z=above)) == ["Conv", "Max", "Min"]
    assert written(g.build(y=g.minimum(above, 2.0) + above)) == ["Conv", "Max", "Min", "Add"]


def written(graph: Graph) -> list[str]:
    """The operators of a graph's model, without those that copy to its outputs."""
    return [node.op_type for node in model(graph.body).graph.node if node.op_type != "Identity"]


# What they compute.


def test_bounds_behind_a_convolution_let_nan_pass_and_bound_infinities(bench: Workbench) -> None:
    """Also where the lower bound is above the upper one, and where there is only one."""
    x = RNG.standard_normal((1, 16, 5, 7)).astype(np.float32) * 4
    x[0, 0, 0, :3] = np.nan, np.inf, -np.inf
    w = np.ones((16, 1, 1, 1), np.float32)
    g = GraphBuilder()
    y = g.conv(g.input("x", x.shape), g.input("w", w.shape), groups=16)
    outputs, expected = {}, {}
    for lower, upper in ((0.0, 6.0), (-1.0, np.inf), (3.0, 2.0)):
        outputs[f"{lower}, {upper}"] = g.minimum(g.maximum(y, lower), upper)
        expected[f"{lower}, {upper}"] = np.minimum(np.maximum(x, np.float32(lower)), np.float32(upper))
    outputs["above"], expected["above"] = g.minimum(y, np.inf), x
    found = run(bench, g.build(outputs), x=x, w=w)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_within_their_bounds(engine: CpuEngine, family: str) -> None:
    """NaN and infinities are among the values; what has no counterpart is computed with NumPy."""
    report = fuzz(engine, SEED, range(some(24)), family=family)
    assert not report.failures, str(report)


def test_graphs_are_within_the_bounds_of_their_operations(engine: CpuEngine) -> None:
    report = fuzz_graphs(engine, SEED, range(some(30)), shrinks=False)
    assert not report.failures, str(report)


@pytest.mark.parametrize(
    ("how", "w", "operator"),
    [
        pytest.param({}, (5, 3, 1, 1), "Conv", id="one tap"),
        pytest.param({}, (150, 3, 1, 1), "ConvTranspose", id="few pixels"),
        pytest.param({"pad": 1}, (3, 7, 3, 2), "ConvTranspose", id="several taps"),
        pytest.param({"stride": 2}, (3, 7, 1, 1), "ConvTranspose", id="a stride"),
        pytest.param({"groups": 2}, (4, 7, 1, 1), "ConvTranspose", id="groups"),
        pytest.param({"pad": 1}, (3, 7, 1, 1), "ConvTranspose", id="padding"),
    ],
)
def test_a_gradient_by_data_is_the_convolution_that_takes_less_time(
    bench: Workbench, how: dict[str, Any], w: tuple[int, ...], operator: str
) -> None:
    g = GraphBuilder()
    x, filters = g.input("x", (2, w[1] * how.get("groups", 1), 17, 15)), g.input("w", w)
    y = g.conv(x, filters, **how)
    graph = g.build(dx=g.grad(y, x, g.input("dy", y.dims)))
    assert [name for name in written(graph) if name.startswith("Conv")] == [operator]
    given = {"w": w, "dy": y.dims}
    values = {name: RNG.standard_normal(dims).astype(np.float32) for name, dims in given.items()}
    values["w"].flat[0] = np.inf  # which meets no padding of dy
    found = run(bench, graph, **values)["dx"]
    np.testing.assert_allclose(found, computed(graph, values)["dx"], atol=2e-4)


def test_a_result_of_a_half_type_is_rounded_before_it_is_read(bench: Workbench) -> None:
    """Not so if a cast to the half type and the one back were taken for nothing."""
    x = RNG.standard_normal((64,)).astype(np.float32)
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        g = GraphBuilder()
        given = g.input("x", x.shape)
        found = run(bench, g.build(y=given.astype(dtype).astype("float32")), x=x)["y"]
        np.testing.assert_array_equal(found, x.astype(dtype.numpy).astype(np.float32))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.BOOL])
def test_buffers_may_lie_in_any_way(bench: Workbench, dtype: DType) -> None:
    dims = (2, 3, 4, 5)
    permuted = TensorSpec.strided(dims, (1, 40, 10, 2), dtype)
    ways = [*(TensorSpec.packed(dims, dtype, layout) for layout in (Layout.NCHW, Layout.NHWC)), permuted]
    x = RNG.integers(0, 2 if dtype is DType.BOOL else 100, dims).astype(dtype.numpy)
    for of_x in (*ways, spread(dims, dtype)):
        for of_y in (*ways, spread(dims, dtype)):
            tensors = tensor_of(0, of_x), tensor_of(1, of_y)
            flip = Slice(x=0, y=1, starts=(0, 0, 3, 0), steps=(1, 1, -1, 1), sizes=dims)
            graph = OperationGraph(tensors=tensors, operations=(flip,))
            assert isinstance(bench.engine.build(graph, workspace_limit=None), SessionPlan)
            np.testing.assert_array_equal(bench.run_graph(graph, {0: x})[1], x[:, :, ::-1])


def test_a_maximum_is_nan_wherever_a_nan_is_in_the_window(bench: Workbench) -> None:
    """ONNX Runtime's own is not, unless the NaN comes last."""
    x = RNG.standard_normal((1, 2, 8, 8)).astype(np.float32)
    x[0, 0, 3, 4] = np.nan
    g = GraphBuilder()
    given = g.input("x", x.shape)
    found = run(bench, g.build(y=g.max_pool(given, 3, stride=1), z=g.max(given)), x=x)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    np.testing.assert_array_equal(found["y"], windows.max(axis=(4, 5)))
    assert np.isnan(found["z"])


def test_a_position_that_sees_nothing_is_0_and_nan_stays_nan(bench: Workbench) -> None:
    q, k, v = (RNG.standard_normal((1, 2, 4, 8)).astype(np.float32) for _ in range(3))
    q[0, 1, 2] = np.nan
    bias = np.zeros((1, 1, 4, 4), np.float32)
    bias[0, 0, 1:3] = -np.inf
    g = GraphBuilder()
    inputs = [g.input(name, array.shape) for name, array in {"q": q, "k": k, "v": v, "bias": bias}.items()]
    q_, k_, v_, bias_ = inputs
    y = run(bench, g.build(y=g.attention(q_, k_, v_, bias=bias_)), q=q, k=k, v=v, bias=bias)["y"]
    assert (y[0, :, 1] == 0).all()
    assert (y[0, 0, 2] == 0).all()
    assert np.isnan(y[0, 1, 2]).all()
    assert np.isfinite(y[0, :, [0, 3]]).all()


@pytest.mark.parametrize("lengths", [None, (3, 1, 4)])
@pytest.mark.parametrize("mode", ["lstm", "gru", "tanh", "relu"])
def test_recurrent_layers_have_their_gates_in_order(
    bench: Workbench, mode: str, lengths: tuple[int, ...] | None
) -> None:
    g, rows = GraphBuilder(), RecurrentMode(mode).gates * 6
    dims: dict[str, tuple[int, ...]] = {"x": (4, 3, 5), "h": (2, 3, 6), "c": (2, 3, 6)}
    for way in range(2):
        shapes = ((rows, 5), (rows, 6), (rows,), (rows,))
        dims |= {f"w{way}{n}": each for n, each in enumerate(shapes)}
    given = {name: RNG.standard_normal(each).astype(np.float32) / 2 for name, each in dims.items()}
    inputs = {name: g.input(name, each) for name, each in dims.items()}
    weights = [[inputs[f"w{way}{n}"] for n in range(4)] for way in range(2)]
    states = [inputs["h"], inputs["c"]][: 1 + (mode == "lstm")]
    function: Any = {"lstm": g.lstm, "gru": g.gru}.get(mode, g.rnn)
    how: dict[str, Any] = {"activation": mode} if mode in ("tanh", "relu") else {}
    made = function(inputs["x"], weights, *states, bidirectional=True, lengths=lengths, **how)
    graph = g.build({f"y{n}": each for n, each in enumerate(made)})
    wanted = computed(graph, given)
    for name, array in run(bench, graph, **given).items():
        if name in wanted:
            np.testing.assert_allclose(array, wanted[name], rtol=0, atol=1e-5)


def test_what_is_overwritten_was_read_before(bench: Workbench) -> None:
    x = RNG.standard_normal((32, 32)).astype(np.float32)
    g = GraphBuilder()
    state = g.input("x", x.shape)
    graph = g.build(y=g.matmul(state, state), updates={"x": state + 1.0})
    body = graph.body
    plan = bench.engine.build(body, workspace_limit=None)
    assert isinstance(plan, SessionPlan)
    memory, y = x.copy(), np.empty_like(x)
    buffers = {"x": memory, "y": y}
    names = graph.names_of
    for _ in range(2):
        memory[...] = x
        bench.engine.execute(plan, [buffers[names[uid].removeprefix("new_")] for uid in body.bound], ())
        np.testing.assert_allclose(y, x @ x, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(memory, x + 1)


def test_constant_buffers_are_read_once(bench: Workbench) -> None:
    """Whoever calls `expect` says which do not change; then a convolution's filter is rearranged once."""
    x, w = (RNG.standard_normal(dims).astype(np.float32) for dims in ((1, 8, 12, 12), (16, 8, 3, 3)))
    g = GraphBuilder()
    graph = g.build(y=g.relu(g.conv(g.input("x", x.shape), g.input("w", w.shape), pad=1))).body
    engine = bench.engine
    plan = engine.build(graph, workspace_limit=None)
    by_name = {"x": x.copy(), "w": w.copy(), "y": np.empty((1, 16, 12, 12), np.float32)}
    names = [next(n for n in by_name if graph.tensor(uid).dims == by_name[n].shape) for uid in graph.bound]
    buffers = [by_name[name] for name in names]
    engine.execute(plan, buffers, ())
    wanted = by_name["y"].copy()
    launch = engine.expect(plan, buffers, (), [names.index("w")])
    by_name["w"][...] = 0
    for factor in (1.0, 2.0):
        by_name["x"][...] = x * factor
        launch()
        np.testing.assert_allclose(by_name["y"], factor * wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture
def launched(bench: Workbench) -> Launched:
    return launched_product(bench.engine, ["w"])


def test_large_arrays_are_read_and_written_where_they_lie_and_are_not_kept(launched: Launched) -> None:
    launch, buffers, x, y, w = launched
    for seed in (1, 2):
        given = np.random.default_rng(seed).standard_normal(SQUARE).astype(np.float32)
        found = launch.instead([(x, given)], [(y, None)])
        assert found[x] is given
        launch.run_on(found)
        np.testing.assert_allclose(found[y], given @ w, rtol=1e-3, atol=1e-3)
        assert np.isnan(buffers[x]).all()
        assert np.isnan(buffers[y]).all()
        known = [weakref.ref(array) for array in found.values()]
        del given, found
        assert [one() for one in known] == [None, None]
    only_y = launch.instead([], [(y, None)])
    assert [*only_y] == [y]
    buffers[x][...] = w
    launch.run_on(only_y)
    np.testing.assert_allclose(only_y[y], w @ w, rtol=1e-3, atol=1e-3)
    launch()
    np.testing.assert_array_equal(buffers[y], only_y[y])


def test_other_arrays_are_copied(launched: Launched) -> None:
    launch, own, x, y, w = launched
    read_only = np.empty(SQUARE, np.float32)
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytes(4 * w.size + 1), np.uint8)[1:].view(np.float32).reshape(SQUARE)
    for source in (w.T, w.astype(np.float64), w[:16], unaligned):
        assert x not in launch.instead([(x, source)], [(y, None)])
    assert [*launch.instead([(x, w)], [(y, read_only)])] == [x]
    memory = np.zeros((384, 256), np.float32)
    assert not launch.instead([(x, memory[:256])], [(y, memory[128:])])
    assert x not in launch.instead([(x, own[y][:])], [(y, None)]), "a run may write there"
    assert not launch.instead([(x, w)], [(y, None), (y, None)])


def test_small_runs_and_those_that_overwrite_an_operand_stay_on_their_buffers(bench: Workbench) -> None:
    g = GraphBuilder()
    state = g.input("x", SQUARE)
    updating = g.build(y=g.matmul(state, state), updates={"x": state + 1.0})
    g = GraphBuilder()
    small = g.build(y=g.relu(g.input("x", (16, 16))))
    for graph in (updating, small):
        plan = bench.engine.build(graph.body, workspace_limit=None)
        buffers = [np.zeros(graph.body.tensor(uid).dims, np.float32) for uid in graph.body.bound]
        assert not isinstance(bench.engine.expect(plan, buffers, ()), RunAnywhere)


def test_a_result_inside_a_graph_may_also_be_an_output(bench: Workbench) -> None:
    """A GELU, of which ONNX Runtime makes one operator; an input; and one with two names."""
    x, w = (RNG.standard_normal(dims).astype(np.float32) for dims in ((4, 8), (8, 8)))
    g = GraphBuilder()
    given, weight = g.input("x", x.shape), g.input("w", w.shape)
    z = g.matmul(given, weight) + 1.0
    gelu = z * (g.erf(z / 1.4142135) + 1.0) * 0.5
    graph = g.build(same=given, gelu=gelu, again=gelu, y=g.matmul(gelu, weight))
    found = run(bench, graph, x=x, w=w)
    np.testing.assert_array_equal(found["same"], x)
    np.testing.assert_array_equal(found["again"], found["gelu"])
    np.testing.assert_allclose(found["y"], found["gelu"] @ w, rtol=1e-4, atol=1e-5)
