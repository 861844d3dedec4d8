"""Gradients of graphs: which operations are added, what they are called, and what is refused."""

from __future__ import annotations

import pytest

from cudnn_actor.protocol import (
    DType,
    GraphBuilder,
    InvalidRequest,
    LayerNorm,
    MaxPool,
    MaxPoolBackward,
    TensorSpec,
    Window,
)

SQUARES = Window.symmetric(2, size=2)


class TestAnswers:
    g = GraphBuilder()
    x = g.input("x", (2, 3), "float16")
    b = g.input("b", (3,))
    y = g.relu(x * b)

    def test_one_tensor_has_one_gradient_and_several_have_a_tuple(self) -> None:
        one = self.g.grad(self.y, self.x)
        assert (one.dims, one.dtype) == ((2, 3), DType.FLOAT16)
        dx, db = self.g.grad([self.y, self.x], [self.x, self.b])
        assert (dx.dims, dx.dtype) == ((2, 3), DType.FLOAT16)
        assert (db.dims, db.dtype) == ((3,), DType.FLOAT32)

    def test_tensors_in_the_middle_have_gradients(self) -> None:
        middle = self.x * 2.0
        assert self.g.grad(middle + 1.0, [middle, self.x])[0].dims == middle.dims

    def test_operations_are_called_by_the_line_that_they_are_the_gradient_of(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (2,))
        graph = g.build(dx=g.grad(g.exp(x), x))
        names = {tensor.name.partition(" at ")[0] for tensor in graph.body.tensors}
        assert names == {"x", "exp", "gradient of exp", "1"}
        places = {tensor.name.partition(" at ")[2].partition(":")[0] for tensor in graph.body.tensors}
        assert places == {"", "test_graph_gradients.py"}


class TestMistakes:
    g = GraphBuilder()
    x = g.input("x", (2, 3))
    whole = g.input("whole", (2, 3), "int32")

    @pytest.mark.parametrize("field", ["outputs", "wrt"])
    def test_integers_have_no_gradients(self, field: str) -> None:
        given = {"outputs": self.x, "wrt": self.x, field: self.whole}
        with pytest.raises(InvalidRequest, match="not of floats") as caught:
            self.g.grad(**given)
        assert caught.value.field == field

    @pytest.mark.parametrize("field", ["outputs", "wrt", "upstream"])
    def test_tensors_of_other_builders_are_refused(self, field: str) -> None:
        given = {"outputs": self.x, "wrt": self.x, field: GraphBuilder().input("x", (2, 3))}
        with pytest.raises(InvalidRequest, match="another builder") as caught:
            self.g.grad(**given)
        assert caught.value.field == field

    def test_upstream_must_be_like_the_outputs(self) -> None:
        for upstream in (self.x[:, 0], self.whole, [self.x, self.x]):
            with pytest.raises(InvalidRequest) as caught:
                self.g.grad(self.x * 2.0, self.x, upstream)
            assert caught.value.field == "upstream"

    def test_an_operation_without_a_gradient_is_named_with_its_line(self) -> None:
        g = GraphBuilder()
        x, index = g.input("x", (1, 1, 2, 2)), g.input("index", (1, 1, 2, 2), "int64")
        window = Window.symmetric(2, 1)
        y = g.apply(MaxPoolBackward(dy=x, index=index, window=window), like={"dx": x})
        with pytest.raises(
            InvalidRequest, match=r"max_pool_bwd at test_graph_gradients.py:\d+.*MaxPoolBackward"
        ):
            g.grad(y, x)
        assert g.grad(x * 2.0, x).dims == x.dims, "what is not between them does not matter"


class TestOutputs:
    def test_an_output_left_out_is_added_once_and_only_if_something_reads_it(self) -> None:
        g = GraphBuilder()
        x = g.input("x", (2, 3))
        y = g.layer_norm(x)
        before = g.build(y=y)
        operation = LayerNorm(x=x, y=y)
        mean = g.output(operation, "mean")
        assert (mean.dims, mean.number) == ((2, 1), g.output(operation, "mean").number)
        assert g.build(y=y) == before
        (node,) = g.build(mean=mean).body.operations
        assert [name for name, _ in node.named(node.outputs)] == ["y", "mean"]

    def test_dims_that_do_not_follow_are_those_of_another_tensor(self) -> None:
        g = GraphBuilder()
        x, dy = g.input("x", (1, 2, 5, 5), layout="NHWC"), g.input("dy", (1, 2, 2, 2))
        index = g.input("index", (1, 2, 2, 2), "int64")
        backward = MaxPoolBackward(dy=dy, index=index, window=SQUARES)
        graph = g.build(dx=g.apply(backward, like={"dx": x}))
        assert graph.outputs[0].spec == TensorSpec.packed((1, 2, 5, 5), "float32", "NHWC")
        for like, field in (
            (None, "dx"),
            ({"dx": index}, "dx"),
            ({"dx": x[:, :1]}, "dy"),
            ({"dw": x}, "like"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                g.apply(backward, like=like)
            assert caught.value.field == field
        assert g.apply(MaxPool(x=x, window=SQUARES), like={"y": dy}).dims == dy.dims


def test_broadcasting_and_its_reverse() -> None:
    g = GraphBuilder()
    x = g.input("x", (3, 1), "float16")
    wide = g.broadcast_to(x, (2, 3, 4))
    assert (wide.dims, wide.dtype) == ((2, 3, 4), DType.FLOAT16)
    back = g.sum_to(wide, x.dims)
    assert (back.dims, back.dtype) == (x.dims, DType.FLOAT16)
    assert g.sum_to(x, x.dims) is x is g.broadcast_to(x, x.dims)
    with pytest.raises(InvalidRequest, match="dims"):
        g.broadcast_to(wide, (2, 1, 4))
    with pytest.raises(InvalidRequest, match="dims"):
        g.broadcast_to(wide, (3, 4))
    with pytest.raises(InvalidRequest, match="dims"):
        g.sum_to(x, (2, 1))
    with pytest.raises(InvalidRequest, match="dims"):
        g.sum_to(x, (1, 3, 1))
