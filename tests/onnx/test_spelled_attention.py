"""Attention that a model spells out in a half type: one operation, which gives what the nodes give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cudnn_actor import TensorSpec
from cudnn_actor.models.source import NeedsValues
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol.operations import Attention

from ..in_one_test import cases_in_one_test
from ..whole import pairwise
from .importing import imported, kinds, run
from .networks.recipes import inputs_of, read
from .small_models import Dims, model_of, node

BFLOAT16, BOOL, HALF = TensorProto.BFLOAT16, TensorProto.BOOL, TensorProto.FLOAT16
HEADS = (2, 4, 5, 8)
rng = np.random.default_rng(37)


@pytest.mark.parametrize("transposed", [False, True])
def test_attention_that_is_spelled_out_in_a_half_type_is_one_operation(transposed: bool) -> None:
    q, k, v = (rng.standard_normal((2, 3, 5, 8)).astype(np.float16) for _ in range(3))
    mask = np.where(np.tri(5, dtype=bool), 0, -np.inf).astype(np.float16)
    proto = model_of(
        [
            node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
            node("MatMul", "q kt", "s"),
            node("Div", "s root", "d"),
            node("Add", "mask d" if transposed else "d mask", "b"),
            node("Softmax", "b", "p", axis=-1),
            node("MatMul", "p v", "y"),
        ],
        {name: (HALF, [2, 3, 5, 8]) for name in "qkv"},
        {"y": (HALF, [2, 3, 5, 8])},
        {"root": np.array(np.sqrt(8), np.float16), "mask": mask},
    )
    assert "attention" in kinds(imported(proto))
    assert "softmax" not in kinds(imported(proto))
    (y,) = run(proto, q=q, k=k, v=v)
    scores = q.astype("f8") @ k.astype("f8").swapaxes(2, 3) / np.float16(np.sqrt(8)) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (weights / weights.sum(-1, keepdims=True)) @ v.astype("f8")
    np.testing.assert_allclose(y.astype("f8"), wanted, rtol=1e-3, atol=1e-3)


def spelled_out(nodes: str, q: tuple[int, ...], mask: np.ndarray, code: int = HALF) -> onnx.ModelProto:
    """Attention whose scores s these nodes turn into d, on which a mask is added."""
    of = helper.tensor_dtype_to_np_dtype(code)
    constants = {"two": [2], "three": 3, "zero": 0, "mask": mask}
    return model_of(
        [
            node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
            node("MatMul", "q kt", "s"),
            *(node(op, f"{a} {b}", c) for op, a, b, c in map(str.split, nodes.split(", "))),
            node("Add", "mask d", "b"),
            node("Softmax", "b", "p", axis=-1),
            node("MatMul", "p v", "y"),
        ],
        {"q": (code, q)} | dict.fromkeys("kv", (code, (*q[:2], 5, 8))),
        {"y": (code, None)},
        {name: np.array(each, of) for name, each in constants.items()},
    )


def check_attention(proto: onnx.ModelProto, scale: float, mask: np.ndarray) -> None:
    given = {}
    for port in proto.graph.input:
        of = port.type.tensor_type
        dims = [each.dim_value for each in of.shape.dim]
        given[port.name] = rng.standard_normal(dims).astype(helper.tensor_dtype_to_np_dtype(of.elem_type))
    q, k, v = (each.astype("f8") for each in given.values())
    scores = scale * q @ k.swapaxes(2, 3) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    (y,) = run(proto, **given)
    wanted = (weights / weights.sum(-1, keepdims=True)) @ v
    np.testing.assert_allclose(y.astype("f8"), wanted, rtol=0.05, atol=0.05)


@cases_in_one_test
@pytest.mark.parametrize("code", [HALF, TensorProto.BFLOAT16])
@pytest.mark.parametrize(
    ("nodes", "scale"),
    [
        ("Div s two d", 1 / 2),
        ("Mul three s d", 3),
        ("Div s two e, Mul e three d", 3 / 2),
        ("Mul three s e, Div e two d", 3 / 2),
        ("Mul s two e, Mul three e d", 6),
        ("Div s two e, Div e three d", 1 / 6),
    ],
)
def test_the_scales_of_attention_that_is_spelled_out_are_multiplied(
    nodes: str, scale: float, code: int
) -> None:
    mask = rng.standard_normal((5, 5))
    proto = spelled_out(nodes, (2, 3, 5, 8), mask, code)
    assert "attention" in kinds(imported(proto))
    check_attention(proto, scale, mask)


def test_a_row_of_spelled_out_attention_that_sees_nothing_is_0() -> None:
    proto = spelled_out("Div s two d", (1, 1, 5, 8), np.where(np.tri(5, k=-1), 0, -np.inf))
    y = run(proto, **dict.fromkeys("qkv", np.ones((1, 1, 5, 8), np.float16)))[0]
    np.testing.assert_array_equal(y[0, 0], np.outer([0, 1, 1, 1, 1], np.ones(8)))


@pytest.mark.parametrize("nodes", ["Div two s d", "Mul s two e, Div three e d", "Div s zero d"])
def test_a_quotient_that_is_no_multiple_of_the_scores_is_no_scale(nodes: str) -> None:
    assert "softmax" in kinds(imported(spelled_out(nodes, (2, 3, 5, 8), np.zeros((5, 5)))))


@pytest.mark.parametrize("q", [(1, 2, 5, 8), (2, 1, 5, 8), (2, 2, 1, 8)])
def test_a_mask_that_makes_more_of_spelled_out_attention_is_added_by_a_node_of_its_own(
    q: tuple[int, ...],
) -> None:
    mask = rng.standard_normal((2, 2, 5, 5))
    proto = spelled_out("Div s two d", q, mask)
    assert "softmax" in kinds(imported(proto))
    check_attention(proto, 1 / 2, mask)


# What exporters of PyTorch add to it.

LOW = -(2.0**128 - 2.0**120)
"""The least number of bfloat16."""
CAUSAL = np.tri(5, dtype=bool)
TURNED = ("Transpose k kt perm=0,1,3,2",)
SPLIT = ("Reshape k three k1", "Transpose k1 k2 perm=0,2,1", "Reshape k2 four kt")
GUARD = ("IsNaN p nan", "Where nan zero p w")
Texts = Sequence[str]


def made(text: str) -> onnx.NodeProto:
    """A node of its operator and names, the last that of its result, and `perm=` for a transpose."""
    op, *names = text.split()
    options: dict[str, Any] = {"axis": -1} if op == "Softmax" else {}
    if names[-1].startswith("perm="):
        options["perm"] = [int(axis) for axis in names.pop()[5:].split(",")]
    return node(op, " ".join(names[:-1]), names[-1], **options)


def exported(
    keys: Texts = TURNED,
    scores: Texts = (),
    weights: Texts = (),
    *,
    q: str = "q",
    v: str = "v",
    k: tuple[int, ...] = HEADS,
    constants: Mapping[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """Attention in bfloat16, with nodes that make keys kt, scores d of products s, and weights w of p."""
    last = f"Softmax {'d' if scores else 's'} p", *weights, f"MatMul {'w' if weights else 'p'} {v} y"
    nodes = [made(each) for each in (*keys, f"MatMul {q} kt s", *scores, *last)]
    known = {
        **{name: np.array(each, ml_dtypes.bfloat16) for name, each in NUMBERS.items()},
        "causal": CAUSAL[None, None],
        "ones": np.ones((1, 1, 5, 1), bool),
        "wide": np.array([2, 1, 5, 5]),
        "three": np.array([-1, 5, 8]),
        "four": np.array([2, 4, 8, 5]),
    } | dict(constants or {})
    used = {name for each in nodes for name in each.input}
    inputs: dict[str, tuple[int, Dims]] = {"q": (BFLOAT16, HEADS), "k": (BFLOAT16, k), "v": (BFLOAT16, k)}
    if "m" in used:
        inputs["m"] = (BOOL, (2, 1, 1, 5))
    return model_of(nodes, inputs, {"y": (BFLOAT16, None)}, {n: a for n, a in known.items() if n in used})


NUMBERS = {"zero": 0.0, "one": 1.0, "root": 0.5, "weak": -4.0, "low": LOW, "none": -np.inf}


def operation_of(proto: onnx.ModelProto) -> tuple[Attention[int], Any]:
    """The attention of a model, which has no softmax, and its graph."""
    body = imported(proto).graph.body
    assert "softmax" not in [each.title for each in body.operations]
    (operation,) = (each for each in body.operations if isinstance(each, Attention))
    return operation, body


def given(shared: int = 1) -> dict[str, np.ndarray]:
    """Queries, keys and values in bfloat16, and a mask that hides keys."""
    dims = (HEADS[0], HEADS[1] // shared, *HEADS[2:])
    values = {name: rng.standard_normal(HEADS if name == "q" else dims) for name in "qkv"}
    mask = np.arange(5) < np.array([3, 5]).reshape(2, 1, 1, 1)
    return {name: each.astype(ml_dtypes.bfloat16) for name, each in values.items()} | {"m": mask}


def check_exported(
    proto: onnx.ModelProto, values: dict[str, np.ndarray], *, scale: float, bias: Any = 0.0, shared: int = 1
) -> None:
    q, k, v = (values[name].astype("f8") for name in "qkv")
    k, v = (each.repeat(shared, axis=1) for each in (k, v))
    scores = scale * q @ k.swapaxes(2, 3) + bias
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = np.nan_to_num(weights / weights.sum(-1, keepdims=True))
    names = {each.name for each in proto.graph.input}
    (y,) = run(proto, **{name: each for name, each in values.items() if name in names})
    np.testing.assert_allclose(y.astype("f8"), weights @ v, rtol=0.02, atol=0.02)


def test_rows_that_would_be_nan_are_0() -> None:
    proto = exported(scores=("Where m zero none b", "Add s b d"), weights=GUARD)
    operation_of(proto)
    values = given()
    values["m"] = values["m"] & np.array([False, True]).reshape(2, 1, 1, 1)
    check_exported(proto, values, scale=1, bias=np.where(values["m"], 0, -np.inf))


OTHER_GUARDS = {
    "1 for NaN": ("IsNaN p nan", "Where nan one p w"),
    "where something else is NaN": ("IsNaN s nan", "Where nan zero p w"),
    "only NaN": ("IsNaN p nan", "Where nan p zero w"),
}


@pytest.mark.parametrize("name", OTHER_GUARDS)
def test_a_choice_behind_softmax_that_guards_against_nothing_stays(name: str) -> None:
    assert "softmax" in kinds(imported(exported(weights=OTHER_GUARDS[name])))


def test_keys_that_are_transposed_between_reshapes_are_read_where_they_lie() -> None:
    proto = exported(SPLIT)
    _, body = operation_of(proto)
    assert [each.title for each in body.operations] == ["attention"]
    check_exported(proto, given(), scale=1)


def test_attention_is_not_rounded_again_before_its_heads_are_put_together() -> None:
    proto = exported()
    proto.graph.node.append(made("Transpose y together perm=0,2,1,3"))
    proto.graph.output[0].name = "together"
    assert kinds(imported(proto)) == ["attention", "transpose"]


def test_heads_that_are_mixed_between_reshapes_stay_so() -> None:
    values = given()
    mixed = values["k"].reshape(4, 10, 8).swapaxes(1, 2).reshape(2, 4, 8, 5).swapaxes(2, 3)
    proto = exported(SPLIT, constants={"three": np.array([4, 10, 8])})
    operation_of(proto)
    (y,) = run(proto, **{name: values[name] for name in "qkv"})
    (wanted,) = run(exported(), q=values["q"], k=np.ascontiguousarray(mixed), v=values["v"])
    np.testing.assert_allclose(y.astype("f4"), wanted.astype("f4"), rtol=0.02, atol=0.02)


def test_scales_of_queries_and_keys_are_multiplied() -> None:
    keys = (*(each.replace("kt", "k3") for each in SPLIT), "Mul root k3 kt", "Mul q root qs")
    proto = exported(keys, ("Mul s root d",), q="qs")
    operation, body = operation_of(proto)
    assert operation.scale == 0.125
    assert [each.title for each in body.operations] == ["attention"]
    check_exported(proto, given(), scale=0.125)


MASKS: dict[str, tuple[Texts, str, bool]] = {
    "all and some": (("And ones m c", "Where c zero low b"), "some", False),
    "some, expanded": (("Expand m wide c", "Where c zero none b"), "some", False),
    "causal alone": (("Where causal zero low b",), "", True),
    "causal and some": (("And causal m c", "Where c zero none b"), "some", True),
    "causal and some, of finite scores": (("And causal m c", "Where c zero low b"), "both", False),
    "of which one is 1": (("Where m one low b",), "some", False),
    "of weak scores": (("Where m zero weak b",), "some", False),
}
"""Nodes → whether the graph still reads a mask, of which dims, and whether attention is causal."""


@pytest.mark.parametrize("name", MASKS)
def test_what_masks_say_is_known(name: str) -> None:
    nodes, rest, causal = MASKS[name]
    proto = exported(scores=(*nodes, "Add s b d"), weights=GUARD)
    operation, body = operation_of(proto)
    dims = {"": None, "some": (2, 1, 1, 5), "both": (2, 1, 5, 5)}[rest]
    assert (None if operation.bias is None else body.tensor(operation.bias).dims) == dims
    assert operation.causal == causal
    values = given()
    values["m"][0, ..., 0] = False  # with a causal mask, the first row sees nothing
    shown, hidden = (NUMBERS[each] for each in nodes[-1].split()[2:4])
    seen = np.logical_and(
        values["m"] if "m" in " ".join(nodes).split() else True, CAUSAL if "causal" in name else True
    )
    check_exported(proto, values, scale=1, bias=np.where(seen, shown, hidden))


FILLS: dict[str, tuple[Texts, str, bool]] = {
    "what is seen": (("Where m s low d",), "some", False),
    "what is seen, of no weight": (("Where m s none d",), "some", False),
    "scaled": (("Mul s root r", "Where m r none d"), "some", False),
    "what is hidden": (("Where m low s d",), "some", False),
    "what is not seen": (("Not m n", "Where n low s d"), "some", False),
    "causal": (("Where causal s low d",), "", True),
    "what comes later": (("Where later none s d",), "", True),
    "nothing": (("Where nothing low s d",), "", False),
    "causal and some": (
        (
            "And causal m c",
            "Where c s none d",
        ),
        "some",
        True,
    ),
}
"""Nodes → whether the graph still reads a mask, and whether attention is causal."""


@pytest.mark.parametrize("name", FILLS)
def test_scores_that_are_filled_are_masked(name: str) -> None:
    nodes, rest, causal = FILLS[name]
    known = {"later": ~CAUSAL[None, None], "nothing": np.zeros((1, 1, 1, 5), bool)}
    proto = exported(scores=nodes, weights=GUARD, constants=known)
    operation, body = operation_of(proto)
    dims = {"": None, "some": (2, 1, 1, 5)}[rest]
    assert (None if operation.bias is None else body.tensor(operation.bias).dims) == dims
    assert operation.causal == causal
    values = given()
    values["m"][0, ..., 0] = False
    if name == "what is hidden":
        values["m"][0] = True  # a row of which all is hidden by a finite score weighs all keys alike
    hides = rest and not name.endswith("is hidden")
    seen = (values["m"] if hides else ~values["m"] if rest else True) & (CAUSAL if causal else np.True_)
    low = NUMBERS["low" if "low" in nodes[-1].split() else "none"]
    check_exported(proto, values, scale=operation.scale or 1, bias=np.where(seen, 0, low))


OTHER_FILLS = {
    "a weak score": ("Where m s weak d",),
    "more than one score": ("Where m s v d",),
    "scores with scores": ("Where m s s d",),
    "fewer keys than there are": ("Where one_key s low d",),
}


def test_scores_filled_with_a_number_that_their_type_does_not_have_stay() -> None:
    nodes = [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("MatMul", "q kt", "s"),
        node("Cast", "s", "wide", to=TensorProto.FLOAT),
        node("Where", "m wide low", "d"),
        node("Softmax", "d", "p", axis=-1),
        node("Cast", "p", "w", to=HALF),
        node("MatMul", "w v", "y"),
    ]
    inputs: dict[str, tuple[int, Dims]] = {name: (HALF, [1, 1, 5, 8]) for name in "qkv"}
    proto = model_of(
        nodes,
        inputs | {"m": (BOOL, [1, 1, 1, 5])},
        {"y": (HALF, None)},
        {"low": np.array(np.finfo("f4").min)},
    )
    q, k, v = (rng.standard_normal((1, 1, 5, 8)).astype(np.float16) for _ in range(3))
    (y,) = run(proto, q=q, k=k, v=v, m=np.zeros((1, 1, 1, 5), bool))
    wanted = np.broadcast_to(v.astype("f8").mean(2, keepdims=True), y.shape)
    np.testing.assert_allclose(y.astype("f8"), wanted, atol=2e-3)


@pytest.mark.parametrize("name", OTHER_FILLS)
def test_other_choices_of_scores_stay(name: str) -> None:
    constants = {"one_key": np.zeros((2, 1, 5, 1), bool)}
    proto = exported(scores=OTHER_FILLS[name], constants=constants)
    if name == "more than one score":
        proto.graph.input[2].type.tensor_type.shape.dim[3].dim_value = 5
    assert "softmax" in kinds(imported(proto))


def test_layers_share_what_a_mask_adds() -> None:
    scores = ("Where m zero low b", "Add s b d")
    again = ("MatMul y kt s2", "Where m zero low b2", "Add s2 b2 d2", "Softmax d2 p2")
    proto = exported(scores=scores)
    proto.graph.node.extend(made(each) for each in (*again, "MatMul p2 v y2"))
    proto.graph.output[0].name = "y2"
    body = imported(proto).graph.body
    first, second = (each.bias for each in body.operations if isinstance(each, Attention))
    assert first == second is not None


def test_shared_heads_are_not_copied() -> None:
    copies = [
        f"{op} {name}{at or ''} {name}_{op} {name}{at + 1}"
        for name in ("k", "v")
        for at, op in enumerate(("Unsqueeze", "Expand", "Reshape"))
    ]
    dims = {"Unsqueeze": np.array([2]), "Expand": np.array([2, 2, 2, 5, 8]), "Reshape": np.array(HEADS)}
    constants = {f"{name}_{op}": each for name in ("k", "v") for op, each in dims.items()}
    keys = ("Reshape k3 three k4", "Transpose k4 k5 perm=0,2,1", "Reshape k5 four kt")
    proto = exported((*copies, *keys), v="v3", k=(2, 2, 5, 8), constants=constants)
    operation, body = operation_of(proto)
    assert [body.tensor(uid).dims for uid in (operation.k, operation.v)] == [(2, 2, 5, 8)] * 2
    check_exported(proto, given(2), scale=1, shared=2)


NETWORKS = Path(__file__).parent / "networks" / "data"
ATTENDING = ("bert", "gpt2", "llama", "vit", "whisper_encoder")
FILES: list[Path] = sorted(p for p in NETWORKS.glob("*.onnx") if p.name.split(".")[0] in ATTENDING)
RUN: list[Path] = pairwise(FILES, lambda path: path.name.split("."), together=1)


@cases_in_one_test
@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_networks_of_all_versions_have_attention_in_half_types(path: Path) -> None:
    proto = read(path)
    model, values = OnnxModel(proto, dtype="bfloat16"), inputs_of(proto, 2)
    specs = {name: TensorSpec.packed(each.shape, each.dtype) for name, each in values.items()}
    try:
        graph = model.specialise(specs, {}).graph
    except NeedsValues as error:
        graph = model.specialise(specs, {name: values[name] for name in error.names}).graph
    assert graph is not None
    found = [each.title for each in graph.body.operations]
    assert found.count("attention") == 2
    assert "softmax" not in found
