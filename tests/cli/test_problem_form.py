"""Convolution problems as people write them."""

from __future__ import annotations

import pytest

from cudnn_actor.cli.problem_form import FORM, read_problem, read_problems
from cudnn_actor.cli.user_error import UserError
from cudnn_actor.protocol import (
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    Numerics,
    TensorSpec,
)
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.types.dtypes import DTypeName
from cudnn_actor.protocol.types.tensor import LayoutName


def buffer(*dims: int, dtype: DTypeName = "float32", layout: LayoutName = "NCHW") -> BufferRef:
    spec = TensorSpec.packed(dims, dtype, layout)
    return BufferRef(slot=0, generation=0, spec=spec, device="cpu")


CONV = ConvSpec(pre_padding=(1, 0), post_padding=(2, 2), stride=(2, 1), dilation=(1, 1), groups=2)
X, W, Y = (2, 8, 9, 9), (4, 4, 3, 3), (2, 4, 5, 9)
WORDS = "x=2x8x9x9 w=4x4x3x3 pad=1x0 post=2 stride=2x1 groups=2"


def test_the_words_mean_what_the_messages_do() -> None:
    x, w, y = buffer(*X), buffer(*W), buffer(*Y)
    for words, message in (
        (f"conv_fwd {WORDS}", ConvFwd(x=x, w=w, y=y, conv=CONV)),
        (f"conv_bwd_data {WORDS}", ConvBwdData(dy=y, w=w, dx=x, conv=CONV)),
        (f"conv_bwd_filter {WORDS} beta=2", ConvBwdFilter(x=x, dy=y, dw=w, conv=CONV, beta=1.0)),
        (
            f"conv_fwd {WORDS} bias=yes tf32=yes",
            ConvFwd(x=x, w=w, y=y, bias=buffer(1, 4, 1, 1), conv=CONV, numerics=Numerics(tf32=True)),
        ),
    ):
        assert read_problem(words).graph == lower(message).graph


def test_types_and_layouts_are_words_too() -> None:
    graph = read_problem("conv_fwd x=1x8x5x5 w=4x8x3x3 dtype=int8 out=int32 layout=NHWC").graph
    x, w = (buffer(*dims, dtype="int8", layout="NHWC") for dims in ((1, 8, 5, 5), (4, 8, 3, 3)))
    y = buffer(1, 4, 3, 3, dtype="int32", layout="NHWC")
    assert graph == lower(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))).graph


def test_a_token_is_a_problem_as_well() -> None:
    problem = read_problem(FORM)
    assert read_problem(token(problem.graph)).graph == problem.graph


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a problem"),
        ("conv", "is not a problem"),
        ("maxpool x=2x4x16x16", "only convolutions can be written by hand"),
        ("conv_fwd", "x=: is missing; as in x=32x64x56x56"),
        ("conv_fwd x=1x2x3x3", "w=: is missing; as in w=64x64x3x3"),
        ("conv_fwd x=1x2x3 w=4", "w"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 pading=1", "pading=1: is not a known name"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 pad=1 pad=2", "is given twice"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 pad=-1", "pad=-1: must be whole numbers"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 stride=1x1x1", "stride"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 dtype=float128", "is not an element type"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 layout=HWCN", "is not a layout"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 alpha=much", "alpha=much: is not a number"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 bias=1", "bias=1: is neither yes nor no"),
        ("conv_fwd x=1x2x3x3 w=4x2x1x1 activation=zelu", "activation=zelu: must be one of identity, relu"),
        ("conv_bwd_data x=1x2x3x3 w=4x2x1x1 bias=yes", "bias: does not apply to conv_bwd_data"),
        ("conv_fwd x=1x2x3x3 w=4x2x9x9", "spans 9 inputs, but the padded input has 3"),
        ("eNqtz0sKwjAUheGtyB07EEFw", "is not an operation graph"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_problem(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_has_one_a_line_and_remarks() -> None:
    problems = list(read_problems(["# these", "", f"  {FORM}  ", "conv_bwd_data x=1x2x3x3 w=4x2x1x1"]))
    assert [problem.text for problem in problems] == [FORM, "conv_bwd_data x=1x2x3x3 w=4x2x1x1"]


def test_a_line_that_is_none_is_named_by_its_number() -> None:
    with pytest.raises(UserError, match=r"^line 2: 'what' is not a problem"):
        list(read_problems(["# these", "what"]))
