"""Graphs as users build them: shapes, dtypes, names, mistakes, and the forms that graphs are written in."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.protocol import (
    Attention,
    DType,
    Graph,
    GraphBuilder,
    InvalidRequest,
    LayerNorm,
    Layout,
    MaxPool,
    RunGraph,
    Tensor,
    TensorRole,
    Window,
)
from cudnn_actor.protocol.types.dtypes import DTypeName

from ..in_one_test import cases_in_one_test

SQUARES = Window.symmetric(2, size=2)


def dtypes_of(graph: Graph) -> dict[str, DType]:
    """Each tensor's declared dtype by the first word of its label."""
    return {tensor.name.split()[0]: tensor.dtype for tensor in graph.body.tensors}


class TestShapes:
    g = GraphBuilder()
    x = g.input("x", (2, 3, 4))

    @pytest.mark.parametrize(
        ("index", "dims"),
        [
            (0, (3, 4)),
            (-1, (3, 4)),
            ((slice(None), 1), (2, 4)),
            (slice(1, 2), (1, 3, 4)),
            ((..., slice(None, None, -2)), (2, 3, 2)),
            ((0, None, ..., 2), (1, 3)),
            ((slice(0, 2), ..., None), (2, 3, 4, 1)),
        ],
        ids=str,
    )
    def test_indexing_is_numpys(self, index: object, dims: tuple[int, ...]) -> None:
        assert self.x[index].dims == dims == np.empty((2, 3, 4))[index].shape  # type: ignore[call-overload]

    def test_reshape_and_transpose_are_numpys(self) -> None:
        assert self.x.reshape(6, -1).dims == self.x.reshape((6, 4)).dims == (6, 4)
        assert self.x.transpose(1, 0, -1).dims == (3, 2, 4)
        assert self.x.T.dims == self.x.transpose().dims == (4, 3, 2)

    def test_smaller_operands_are_broadcast(self) -> None:
        assert (self.x + self.g.input("row", (4,))).dims == (2, 3, 4)
        assert (2.0 * self.x[:, :1] + self.x).dims == (2, 3, 4)

    def test_channels_last_is_kept(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (1, 8, 4, 4), layout="NHWC")
        y = g.conv(x, g.input("w", (8, 8, 1, 1), layout="NHWC")) + 1.0
        graph = g.build(y=g.apply(MaxPool(x=y, window=SQUARES)))
        assert graph.outputs[0].spec.layout is Layout.NHWC

    def test_a_transposed_tensor_has_the_layout_that_its_elements_lie_in(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (2, 8, 4, 5), layout="NHWC")
        rows = x.transpose(0, 2, 3, 1)
        turned = (rows, g.rms_norm(rows), rows.transpose(0, 3, 1, 2), x.T)
        graph = g.build({str(number): tensor for number, tensor in enumerate(turned)})
        assert [port.spec.layout for port in graph.outputs] == [
            Layout.NCHW,
            Layout.NCHW,
            Layout.NHWC,
            Layout.NCHW,
        ]


class TestDtypes:
    """A tensor has its dtype where it is stored; between pointwise operations, the computed type."""

    def build(self, dtype: DType) -> tuple[GraphBuilder, Tensor]:
        g = GraphBuilder()
        x, w = g.input("x", (1, 8, 4, 4), dtype), g.input("w", (8, 8, 1, 1), dtype)
        return g, g.pointwise("relu", g.conv(x, w, bias=g.input("b", (8,), dtype))) * 2.0

    def test_between_pointwise_operations_nothing_is_rounded(self) -> None:
        g, y = self.build(DType.BFLOAT16)
        assert y.dtype is DType.BFLOAT16
        found = dtypes_of(g.build(y=y))
        assert found.pop("mul") is found.pop("w") is found.pop("b") is found.pop("x") is DType.BFLOAT16
        assert found.pop("reshape") is DType.BFLOAT16
        assert set(found.values()) == {DType.FLOAT32}

    def test_what_other_operations_read_is_rounded(self) -> None:
        g, y = self.build(DType.FLOAT16)
        graph = g.build(pooled=g.apply(MaxPool(x=y, window=SQUARES)), more=y + 1.0)
        assert dtypes_of(graph)["mul"] is DType.FLOAT16

    def test_a_view_has_the_dtype_of_what_it_shows(self) -> None:
        g, y = self.build(DType.FLOAT16)
        assert dtypes_of(g.build(y=y[:, 1:] + 1.0))["slice"] is DType.FLOAT32
        graph = g.build(y=g.apply(MaxPool(x=y[:, 1:], window=SQUARES)))
        assert dtypes_of(graph)["slice"] is dtypes_of(graph)["mul"] is DType.FLOAT16

    def test_astype_rounds_wherever_it_is_read(self) -> None:
        g, y = self.build(DType.FLOAT32)
        graph = g.build(y=y.astype("bfloat16") + 1.0)
        assert dtypes_of(graph)["identity"] is DType.BFLOAT16

    def test_two_half_types_give_float32(self) -> None:
        g = GraphBuilder()
        assert (g.input("a", (3,), "float16") + g.input("b", (3,), "bfloat16")).dtype is DType.FLOAT32
        assert (g.input("c", (3,), "float16") + g.input("d", (3,), "float64")).dtype is DType.FLOAT64


class TestPorts:
    def test_unneeded_operations_are_left_out_and_unread_inputs_stay(self) -> None:
        g = GraphBuilder()
        x, _ = g.input("x", (3,)), g.input("unread", (4,))
        _ = x * 3.0
        graph = g.build(y=x + 1.0)
        assert len(graph.body.operations) == 1
        assert [(port.name, port.uid is None) for port in graph.inputs] == [("x", False), ("unread", True)]

    def test_an_output_may_be_an_input_or_another_output(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (3,))
        y = x + 1.0
        graph = g.build(a=y, b=y, c=x, d=x)
        assert [port.name for port in graph.outputs] == list("abcd")
        assert len({port.uid for port in graph.ports}) == 5

    def test_an_update_overwrites_its_input_behind_everything_else(self) -> None:
        g = GraphBuilder()
        m = g.input("m", (3,))
        graph = g.build(y=m * 3.0, updates={"m": m * 0.5})
        last = graph.body.tensor(graph.body.operations[-1].writes[0])
        assert (graph.body.tensor(last.overwrites or 0).name, last.role) == ("m", TensorRole.BOUND)
        assert not graph.body.pure
        assert [port.name for port in graph.ports] == ["m", "y"]

    def test_names_need_not_be_pythons(self) -> None:
        g = GraphBuilder()
        x = g.input("layer1.weight", (3,))
        assert [port.name for port in g.build({"out 1": x + 1.0}).ports] == ["layer1.weight", "out 1"]

    def test_the_digest_has_the_names_and_not_the_lines(self) -> None:
        def made(name: str) -> Graph:
            g = GraphBuilder()
            x = g.input(name, (3,))
            return g.build(y=x + 1.0)

        one = made("x")
        g = GraphBuilder()
        other = g.build(y=g.input("x", (3,)) + 1.0)
        assert one.digest() == other.digest() != made("z").digest()


def mistakes() -> dict[str, object]:
    g, other = GraphBuilder(), GraphBuilder()
    x, w = g.input("x", (2, 8, 4, 4)), g.input("w", (8, 4, 1, 1))
    return {
        "b": lambda: x + g.input("a", (3,)),
        "w": lambda: g.conv(x, w),
        "name": lambda: g.input("x", (1,)),
        "dims": lambda: x.reshape(3, -1),
        "axes": lambda: x.transpose(0, 1, 2, 2),
        "index": lambda: x[2],
        "index ": lambda: x["a"],
        "index  ": lambda: x[0, 0, 0, 0, 0],
        "index   ": lambda: x[..., 0, ...],
        "b ": lambda: x + np.ones(3),
        "q": lambda: g.apply(Attention(q=x[0], k=x, v=x)),
        "also": lambda: g.apply(MaxPool(x=x, window=SQUARES), also=("nothing",)),
        "operation": lambda: g.apply("relu"),  # type: ignore[arg-type]
        "outputs": g.build,
        "y": lambda: g.build(y=other.input("x", (3,))),
        "updates": lambda: g.build(updates={"z": x}),
        "x": lambda: g.build(updates={"x": w}),
        "mode": lambda: g.pointwise("rulu", x),
    }


@cases_in_one_test
@pytest.mark.parametrize("what", mistakes())
def test_a_mistake_is_raised_at_the_line_that_makes_it(what: str) -> None:
    mistake = mistakes()[what]
    assert callable(mistake)
    with pytest.raises(InvalidRequest) as caught:
        mistake()
    assert caught.value.field.startswith(what.split(maxsplit=1)[0])


def test_a_tensor_of_a_graph_has_no_truth_value() -> None:
    g = GraphBuilder()
    with pytest.raises(TypeError, match="no truth value"):
        bool(g.input("x", (3,)))


def test_labels_name_the_line_of_the_operation() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 6))
    y = g.relu(g.apply(LayerNorm(x=x)) * 2)
    frame = inspect.currentframe()
    assert frame is not None
    made = [t.name for t in g.build(y=y).body.tensors if t.role is not TensorRole.CONSTANT and t.name != "x"]
    line = f"test_graph_builder.py:{frame.f_code.co_firstlineno + 3}"
    assert made == [f"{what} at {line}" for what in ("layer_norm", "mul", "relu")]


def test_copies_that_build_adds_have_its_line() -> None:
    g = GraphBuilder()
    x, m, n = g.input("x", (3,)), g.input("m", (3,)), g.input("n", (3,))
    y = g.relu(x)
    frame = inspect.currentframe()
    assert frame is not None
    body = g.build(same=x, y=y, again=y, updates={"m": n, "n": y + m}).body
    line = f"test_graph_builder.py:{frame.f_lineno - 1}"
    labels = [body.label(number) for number, _ in enumerate(body.operations)]
    assert labels[0].startswith("relu at test_graph_builder.py:")
    assert set(labels[1:]) == {f"add at {line}", f"identity at {line}"}


def test_a_graph_is_printed_as_its_inputs_and_outputs() -> None:
    g = GraphBuilder()
    inputs = [g.input(f"x{number}", (number, 2)) for number in range(6)]
    wide = g.build(y=g.add(inputs[1], inputs[2][:1]), same=inputs[0])
    inputs_shown = "x0 float32 (0, 2), x1 float32 (1, 2) and 4 more"
    assert repr(wide) == f"<Graph of 3 operations: {inputs_shown} -> y float32 (1, 2) and 1 more>"


def test_what_only_takes_integers_reads_integers() -> None:
    """A function before it is computed in int64, and its result is stored as int8."""
    g = GraphBuilder()
    x = g.input("x", (3,), "int8")
    body = g.build(y=g.square(x) | x, z=g.square(x) * 2).body
    read = {body.tensor(uid).dtype for op in body.operations[1:2] for uid in op.reads}
    assert read == {DType.INT8}
    for operation in body.operations:
        operation.check({name: body.tensor(uid).spec for name, uid in operation.named()})


@cases_in_one_test
@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (lambda g, a: a("bool") + a("int8"), "int8"),
        (lambda g, a: a("int8") + a("bool"), "int8"),
        (lambda g, a: a("uint8") + a("int8"), "int16"),
        (lambda g, a: a("int32") * a("uint32"), "int64"),
        (lambda g, a: a("uint64") - a("int8"), "uint64"),
        (lambda g, a: a("bool") + a("bool"), "bool"),
        (lambda g, a: a("float16") + a("bfloat16"), "float32"),
        (lambda g, a: a("float16") + a("int64"), "float16"),
        (lambda g, a: a("uint8") + 1, "uint8"),
        (lambda g, a: a("uint8") + 0.5, "float32"),
        (lambda g, a: a("bool") * 3, "int64"),
        (lambda g, a: a("bool") & 1, "int64"),
        (lambda g, a: (a("int32") > 3) * 3.0, "float32"),
        (lambda g, a: g.where(a("int32") > 3, 7, -7), "int64"),
        (lambda g, a: g.where(a("bool"), 7, 0.5), "float32"),
        (lambda g, a: g.where(a("float64"), a("int32"), a("int32")), "int32"),
        (lambda g, a: g.where(a("float32"), a("bool"), a("bool")), "bool"),
        (lambda g, a: g.where(a("float64"), a("float16"), 0), "float16"),
        (lambda g, a: g.where(a("bool"), a("int8"), 0), "int8"),
        (lambda g, a: a("int64") / a("int8"), "float32"),
        (lambda g, a: 1 / a("int32"), "float32"),
        (lambda g, a: g.exp(a("int8")), "float32"),
        (lambda g, a: g.sigmoid(a("bool")), "float32"),
        (lambda g, a: g.leaky_relu(a("int8")), "float32"),
        (lambda g, a: g.clip(a("int8"), 0.5, 3), "float32"),
        (lambda g, a: g.clip(a("int8"), 0, 3), "int8"),
        (lambda g, a: g.relu(a("int8")), "int8"),
        (lambda g, a: a("int32") % 2, "int32"),
        (lambda g, a: a("int32") < 0.5, "bool"),
        (lambda g, a: a("bfloat16") / a("int8"), "bfloat16"),
    ],
)
def test_arithmetic_has_a_dtype_that_does_not_depend_on_the_order(
    use: Callable[[GraphBuilder, Callable[[DTypeName], Tensor]], Tensor], dtype: DTypeName
) -> None:
    g, numbers = GraphBuilder(), itertools.count()
    assert use(g, lambda kind: g.input(f"{kind} {next(numbers)}", (3,), kind)).dtype is DType(dtype)


def test_a_constant_is_a_number_of_its_type() -> None:
    g = GraphBuilder()
    x, double = g.input("x", (3,)), g.input("double", (3,), "float64")
    body = g.build(y=x * 0.1 + 1e39, z=double * 0.1).body
    values = {(t.dtype, t.value) for t in body.tensors if t.role is TensorRole.CONSTANT}
    rounded = float(np.float32(0.1))
    assert values == {(DType.FLOAT32, rounded), (DType.FLOAT32, 1e39), (DType.FLOAT64, 0.1)}


class TestForms:
    def graph(self) -> Graph:
        g = GraphBuilder()
        x = g.input('the "x"', (2, 8, 4, 4), "float16")
        pooled = g.apply(MaxPool(x=x * 2.0, window=SQUARES), also=("index",))
        return g.build(y=pooled.y, index=pooled.index, updates={'the "x"': x + 1.0})

    def test_json_gives_the_graph_back(self) -> None:
        graph = self.graph()
        assert Graph.from_json(graph.to_json()) == graph
        assert Graph.from_json(graph.to_json().decode()).digest() == graph.digest()

    @pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"format": 1}', b'{"format": 1, "graph": {}}'])
    def test_other_json_is_refused(self, text: bytes) -> None:
        with pytest.raises(InvalidRequest, match="is not a graph"):
            Graph.from_json(text)

    def test_json_has_no_infinity_and_gives_it_back(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (3,))
        graph = g.build(y=g.where(x > 0, x, -np.inf), z=x + np.inf, nan=x * np.nan)
        again = Graph.from_json(graph.to_json())
        assert again.digest() == graph.digest()
        found = {str(tensor.value) for tensor in again.body.tensors if tensor.value is not None}
        assert found == {"0.0", "-inf", "inf", "nan"}

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("graph.json", "text='graph.json': is not a graph"),
            (b"[" * 100_000, "text=JSON: is not a graph"),
            (b'{"format": 1, "graph": {"body": {"tensors": 3}}}', "text=JSON: is not a graph"),
            (b'{"format": 1, "graph": {"body": {"tensors": [3]}}}', "text=JSON: is not a graph"),
            (None, "text=None: is neither bytes nor str"),
            ({}, "text={}: is neither bytes nor str"),
        ],
        ids=["path", "deep", "no tensors", "no tensor", "None", "dict"],
    )
    def test_what_is_no_json_of_a_graph_is_named(self, text: Any, shown: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            Graph.from_json(text)
        assert str(caught.value).startswith(shown)
        assert str(caught.value).endswith("; pass what `Graph.to_json` gave")

    def test_mistakes_of_graphs_written_by_hand_are_named(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (4, 4))
        text = g.build(y=x @ g.input("w", (4, 4))).to_json().decode()
        assert '"overwrites":null,"value":null,"name":"matmul' in text
        for old, new, told in (
            ('"name":"w","spec"', '"name":"","spec"', "name='': must be a non-empty string"),
            (
                '"overwrites":null,"value":null,"name":"matmul',
                '"overwrites":0,"value":null,"name":"matmul',
                "'matmul': overwrites an input, which only functions of each element may do",
            ),
        ):
            assert old in text
            with pytest.raises(InvalidRequest, match=told):
                Graph.from_json(text.replace(old, new))

    def test_limits_are_limits(self) -> None:
        with pytest.raises(InvalidRequest, match="limits=5: is of type int where a GraphLimits"):
            Graph.from_json(self.graph().to_json(), limits=5)  # type: ignore[arg-type]

    def test_a_newer_form_is_named(self) -> None:
        text = json.dumps({"format": 99, "graph": {"new": True}})
        with pytest.raises(InvalidRequest, match="format=99: is newer than 1"):
            Graph.from_json(text)

    @pytest.mark.parametrize("version", [0, -1])
    def test_a_form_that_never_was_is_named(self, version: int) -> None:
        text = self.graph().to_json().replace(b'"format":1', b'"format":%d' % version)
        with pytest.raises(InvalidRequest, match=f"format={version}: is no version of this form; pass what"):
            Graph.from_json(text)

    def test_a_graph_whose_names_do_not_fit_is_refused(self) -> None:
        graph = self.graph()
        for changes in (
            {"outputs": graph.outputs[:1]},
            {"outputs": (*graph.outputs, graph.outputs[0])},
            {"inputs": graph.outputs, "outputs": graph.inputs},
            {"inputs": (msgspec.structs.replace(graph.inputs[0], uid=99),)},
        ):
            with pytest.raises(InvalidRequest):
                msgspec.structs.replace(graph, **changes)

    def test_dot_has_a_line_for_each_operation_and_edge(self) -> None:
        text = self.graph().to_dot()
        assert text.count(" -> ") == 7
        assert '"max_pool test_graph_builder.py:' in text
        assert r'"the \"x\""' in text


def test_a_message_names_each_buffer_once() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.input("x", (3,)) + 1.0)
    with pytest.raises(InvalidRequest, match="y=None: is a port"):
        RunGraph.bind(graph, x=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="is given twice"):
        RunGraph.bind(graph, {"x": None}, x=None)  # type: ignore[dict-item, arg-type]
