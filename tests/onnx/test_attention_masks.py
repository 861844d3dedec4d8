"""What attention does with masks that are known when a model is imported."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol.operations import Attention

from .importing import check, imported, kinds
from .small_models import FLOAT, Dims, model_of, node

BOOL = TensorProto.BOOL
rng = np.random.default_rng(23)
HEADS = (2, 3, 5, 8)
ALL, CAUSAL = np.ones((2, 1, 5, 5), bool), np.tri(5, dtype=bool)
SOME = np.arange(5) < np.array([3, 5]).reshape(2, 1, 1, 1)


def attending(
    masks: dict[str, Any], *before: onnx.NodeProto, mask: str = "m", times: int = 1, code: int = BOOL
) -> onnx.ModelProto:
    """Attention, perhaps of its result again; masks that are no arrays are inputs of these dims."""
    attention = [
        node("Attention", f"{'q' if not n else f'y{n}'} k v {mask}", f"y{n + 1}") for n in range(times)
    ]
    inputs: dict[str, tuple[int, Dims]] = dict.fromkeys("qkv", (FLOAT, HEADS))
    inputs |= {name: (code, each) for name, each in masks.items() if isinstance(each, tuple)}
    constants = {name: each for name, each in masks.items() if isinstance(each, np.ndarray)}
    opset = [helper.make_opsetid("", 23)]
    result: dict[str, tuple[int, Dims]] = {f"y{times}": (FLOAT, None)}
    return model_of([*before, *attention], inputs, result, constants, opset_imports=opset)


def attention_of(proto: onnx.ModelProto) -> list[Attention[int]]:
    return [each for each in imported(proto).graph.body.operations if isinstance(each, Attention)]


def compared(proto: onnx.ModelProto, **masks: np.ndarray) -> None:
    check(proto, **{name: rng.standard_normal(HEADS).astype("f4") for name in "qkv"}, **masks)


KNOWN = {
    "nothing is hidden": (ALL, False),
    "nothing is added": (np.zeros((1, 1, 5, 5), "f4"), False),
    "causal": (CAUSAL, True),
    "causal, of two dims more": (np.broadcast_to(CAUSAL, (2, 1, 5, 5)).copy(), True),
    "causal, as what is added": (np.where(CAUSAL, 0, -np.inf).astype("f4"), True),
    "causal, as the least number": (np.where(CAUSAL, 0, np.finfo("f4").min).astype("f4"), True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_constant_mask_that_says_no_more_is_no_bias(name: str) -> None:
    mask, causal = KNOWN[name]
    proto = attending({"m": mask})
    (operation,) = attention_of(proto)
    assert (operation.bias, operation.causal) == (None, causal)
    assert kinds(imported(proto)) == ["attention"]
    compared(proto)


@pytest.mark.parametrize(
    "mask",
    [
        SOME,
        np.tri(5, k=1, dtype=bool),
        np.tri(5, k=-1, dtype=bool) | np.eye(1, 5, dtype=bool),
        np.full((5, 5), -1, "f4"),
        np.where(CAUSAL, 0, -1e4).astype("f4"),
    ],
    ids=["of samples", "one more", "one less", "a number", "of weak scores"],
)
def test_another_constant_mask_is_a_bias(mask: np.ndarray) -> None:
    proto = attending({"m": mask})
    (operation,) = attention_of(proto)
    assert operation.bias is not None
    assert not operation.causal
    compared(proto)


@pytest.mark.parametrize(("known", "causal"), [(ALL, False), (CAUSAL, True)])
@pytest.mark.parametrize("order", ["known given", "given known"])
def test_what_is_known_of_a_mask_is_no_part_of_its_bias(known: np.ndarray, causal: bool, order: str) -> None:
    masks = {"known": known, "given": (2, 1, 1, 5)}
    proto = attending(masks, node("And", order, "m"))
    (operation,) = attention_of(proto)
    assert operation.causal is causal
    assert operation.bias is not None
    assert imported(proto).graph.body.tensor(operation.bias).dims == (2, 1, 1, 5)
    assert "logical_and" not in kinds(imported(proto))
    compared(proto, given=SOME)


def test_a_mask_of_queries_stays_whole() -> None:
    masks = {"known": ALL[:1], "given": (2, 1, 5, 1)}
    proto = attending(masks, node("And", "known given", "m"))
    assert "logical_and" in kinds(imported(proto))
    compared(proto, given=np.ones((2, 1, 5, 1), bool))


def test_two_masks_of_the_inputs_stay_one() -> None:
    masks = {"known": CAUSAL, "one": (2, 1, 1, 5), "two": (1, 1, 5, 5)}
    proto = attending(masks, node("And", "one two", "both"), node("And", "known both", "m"))
    assert kinds(imported(proto)).count("logical_and") == 2
    compared(proto, one=SOME, two=CAUSAL.reshape(1, 1, 5, 5))


def test_a_mask_becomes_a_bias_once_for_all_that_read_it() -> None:
    proto = attending({"m": (2, 1, 5, 5)}, times=3)
    assert kinds(imported(proto)).count("select") == 1
    compared(proto, m=np.broadcast_to(CAUSAL, (2, 1, 5, 5)))


def test_a_mask_that_may_be_overwritten_is_a_bias() -> None:
    model = OnnxModel(attending({"m": ALL}), swappable=True)
    specs: Any = {each.name: each.spec for each in model.inputs}
    graph = model.specialise(specs, {}).graph
    assert graph is not None
    assert any(isinstance(each, Attention) and each.bias is not None for each in graph.body.operations)


# Heads of queries that share heads of keys.


def sharing(k: tuple[int, ...], dims: tuple[int, ...], *, outputs: str = "y") -> onnx.ModelProto:
    """Attention of 4 heads of queries, with copies of keys and values for them as exporters write them."""
    nodes = []
    for name in "kv":
        nodes += [
            node("Unsqueeze", f"{name} two", f"{name}1"),
            node("Expand", f"{name}1 five", f"{name}2"),
            node("Reshape", f"{name}2 four", f"{name}3"),
        ]
    nodes.append(node("Attention", "q k3 v3 - - -", outputs))
    return model_of(
        nodes,
        {"q": (FLOAT, [2, 4, 5, 8]), "k": (FLOAT, k), "v": (FLOAT, k)},
        {"y": (FLOAT, None)},
        {"two": np.array([2]), "five": np.array(dims), "four": np.array([2, 4, 5, 8])},
        opset_imports=[helper.make_opsetid("", 23)],
    )


def test_heads_that_are_shared_are_not_copied() -> None:
    proto = sharing((2, 2, 5, 8), (2, 2, 2, 5, 8))
    (operation,) = attention_of(proto)
    body = imported(proto).graph.body
    assert [body.tensor(uid).dims for uid in (operation.k, operation.v)] == [(2, 2, 5, 8)] * 2
    assert "mul" not in kinds(imported(proto))
    given = {name: rng.standard_normal((2, 2, 5, 8)).astype("f4") for name in "kv"}
    check(proto, q=rng.standard_normal((2, 4, 5, 8)).astype("f4"), **given)


def test_copies_of_heads_that_attention_cannot_share_stay() -> None:
    proto = sharing((2, 1, 5, 8), (2, 2, 2, 5, 8))  # one head for all, first as two
    (operation,) = attention_of(proto)
    assert imported(proto).graph.body.tensor(operation.k).dims == (2, 4, 5, 8)
    given = {name: rng.standard_normal((2, 1, 5, 8)).astype("f4") for name in "kv"}
    check(proto, q=rng.standard_normal((2, 4, 5, 8)).astype("f4"), **given)
