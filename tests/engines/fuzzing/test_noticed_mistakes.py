"""What the fuzzer of operations notices: engines that compute something wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    ArgReduction,
    AvgPool,
    Gather,
    GatherND,
    GridPadding,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    GroupNorm,
    LayerNorm,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    Pointwise,
    RandomBernoulli,
    RandomNormal,
    RandomUniform,
    Reduction,
    ScatterElements,
    Softmax,
    TopK,
)

from ...gpu.fuzz import drawn_case, fuzz
from ...whole import WHOLE, pairwise, some
from ..fused_attention import MISTAKES as ATTENTION_MISTAKES
from ..fused_attention import fused
from ..mistakes import (
    AsTheyAre,
    ByDefinition,
    FirstOfBatch,
    FirstWins,
    FromTheStart,
    InHalf,
    InSingle,
    InTF32,
    LastOfEqualElements,
    LastOfEqualPlaces,
    LastOfEquals,
    LosingNaN,
    Misreading,
    Misrunning,
    NaNLast,
    NextGroup,
    NextOffset,
    NoCarry,
    NoNaN,
    OnePassNorm,
    OtherRows,
    OtherSide,
    Refusing,
    Saturating,
    ShortSums,
    SumsInHalf,
    Unshifted,
    Wrapping,
    attribute,
    computed_in_half,
    elsewhere,
    first_input_zeroed,
    gaps_overwritten,
    inputs_swapped,
    instead,
    lazy,
    moved,
    next_number,
    one_value_missing,
    opened,
    other_modes,
    other_reduction,
    rounded_down,
    transposed,
    truncated,
)
from .test_operation_fuzz import (
    ATTENTION,
    CTC_LOSS,
    GROUPED_MATMUL,
    INDEXING,
    MATMUL,
    MOVEMENT,
    NORMALIZATION,
    POINTWISE,
    POOLING,
    RANDOM,
    REDUCTION,
    SEED,
    SOFTMAX,
    each_family,
)

SORTING, RESAMPLING, GRIDS = "sorting", "resampling", "grid_sampling"
EXACT = (MOVEMENT, RANDOM, SORTING)
CHANNELS, RESPONSES = "channel_norms", "response_norm"


@each_family
def test_arithmetic_in_float32_is_within_the_bounds(family: str) -> None:
    """With one seed: NumPy's float32 functions may be off by more than CUDA's, once in ten thousand cases."""
    count = some(150 if family != ATTENTION else 50)
    report = fuzz(opened(ByDefinition(single=True)), SEED, range(count), family=family)
    assert not report.failures, str(report)
    assert family in EXACT or any(report.largest.values()), "everything was exact: it compares nothing"


@pytest.mark.parametrize("tile", [4, 64])
def test_attention_as_a_gpu_computes_it_is_within_the_bounds(tile: int) -> None:
    """Online softmax over tiles of keys, in float32, with weights and gradients rounded to half types."""
    report = fuzz(opened(ByDefinition(fused(tile), single=True)), SEED, range(some(50)), family=ATTENTION)
    assert not report.failures, str(report)
    assert max(report.largest.values()) > 0.1, "the bounds say nothing"


def test_parts_of_heads_that_overflow_are_no_mistake() -> None:
    """Heads share keys: their parts of dk become infinity and -infinity. dk is too large for float16, too."""
    report = fuzz(opened(ByDefinition(fused(4), single=True)), 3906391363, [16], family=ATTENTION)
    assert not report.failures, str(report)


MISTAKES: list[tuple[str, str, Callable[[], CpuEngine], int, int]] = [
    ("one value missing", POOLING, lambda: Misreading(one_value_missing), 40, 38),
    ("one value missing", NORMALIZATION, lambda: Misreading(one_value_missing), 40, 33),
    ("computed in half", POOLING, lambda: Misreading(computed_in_half), 40, 4),
    ("computed in half", NORMALIZATION, lambda: Misreading(computed_in_half), 40, 14),
    ("the next number", POOLING, lambda: Misreading(next_number), 40, 10),
    ("the next number", NORMALIZATION, lambda: Misreading(next_number), 40, 10),
    ("lazy", POOLING, lambda: Misrunning(lazy), 40, 38),
    ("lazy", NORMALIZATION, lambda: Misrunning(lazy), 40, 34),
    ("inputs swapped", NORMALIZATION, lambda: Misrunning(inputs_swapped), 40, 14),
    ("an input overwritten", POOLING, lambda: Misrunning(first_input_zeroed), 40, 36),
    ("an input overwritten", NORMALIZATION, lambda: Misrunning(first_input_zeroed), 40, 37),
    ("gaps overwritten", POOLING, lambda: Misrunning(gaps_overwritten), 40, 7),
    ("gaps overwritten", NORMALIZATION, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("transposed", POOLING, lambda: Misrunning(transposed), 40, 18),
    ("transposed", NORMALIZATION, lambda: Misrunning(transposed), 40, 9),
    ("truncated", POOLING, lambda: ByDefinition(store=truncated), 40, 3),
    ("truncated", NORMALIZATION, lambda: ByDefinition(store=truncated), 40, 6),
    ("refusing", POOLING, Refusing, 10, 10),
    ("refusing", NORMALIZATION, Refusing, 10, 10),
    ("windows moved", POOLING, lambda: ByDefinition(attribute("window", moved)), 40, 6),
    ("padding counts", POOLING, lambda: ByDefinition(attribute("include_padding", lambda on: not on)), 40, 3),
    ("another exponent", POOLING, lambda: ByDefinition(attribute("p", lambda p: 1.01 * p)), 40, 3),
    ("last of equals", POOLING, lambda: ByDefinition(instead(MaxPool, LastOfEquals)), 150, 6),
    ("NaN ignored", POOLING, lambda: ByDefinition(instead(MaxPool, NoNaN)), 200, 1),
    ("sums in half", POOLING, lambda: ByDefinition(instead(AvgPool, InHalf)), 150, 8),
    (
        "another epsilon",
        NORMALIZATION,
        lambda: ByDefinition(attribute("epsilon", lambda e: 1.01 * e)),
        150,
        20,
    ),
    ("one pass", NORMALIZATION, lambda: ByDefinition(instead(LayerNorm, OnePassNorm)), 150, 7),
    ("one value missing", CHANNELS, lambda: Misreading(one_value_missing), 40, 37),
    ("computed in half", CHANNELS, lambda: Misreading(computed_in_half), 40, 17),
    ("computed in half", RESPONSES, lambda: Misreading(computed_in_half), 40, 9),
    ("the next number", CHANNELS, lambda: Misreading(next_number), 40, 13),
    ("the next number", RESPONSES, lambda: Misreading(next_number), 40, 24),
    ("lazy", CHANNELS, lambda: Misrunning(lazy), 40, 37),
    ("inputs swapped", CHANNELS, lambda: Misrunning(inputs_swapped), 40, 13),
    ("inputs swapped", RESPONSES, lambda: Misrunning(inputs_swapped), 40, 12),
    ("gaps overwritten", CHANNELS, lambda: Misrunning(gaps_overwritten), 40, 10),
    ("transposed", CHANNELS, lambda: Misrunning(transposed), 40, 22),
    ("truncated", CHANNELS, lambda: ByDefinition(store=truncated), 40, 11),
    ("another epsilon", CHANNELS, lambda: ByDefinition(attribute("epsilon", lambda e: 1.01 * e)), 100, 13),
    ("another momentum", CHANNELS, lambda: ByDefinition(attribute("momentum", lambda m: 1 - m)), 150, 6),
    ("another variance", CHANNELS, lambda: ByDefinition(attribute("unbiased", lambda on: not on)), 150, 3),
    ("other groups", CHANNELS, lambda: ByDefinition(instead(GroupNorm, NextGroup)), 100, 4),
    ("another size", RESPONSES, lambda: ByDefinition(attribute("size", lambda size: size + 1)), 40, 28),
    ("another side", RESPONSES, lambda: ByDefinition(instead(LocalResponseNorm, OtherSide)), 80, 8),
    ("one value missing", ATTENTION, lambda: Misreading(one_value_missing), 10, 8),
    ("computed in half", ATTENTION, lambda: Misreading(computed_in_half), 10, 4),
    ("the next number", ATTENTION, lambda: Misreading(next_number), 10, 4),
    ("lazy", ATTENTION, lambda: Misrunning(lazy), 10, 8),
    ("an input overwritten", ATTENTION, lambda: Misrunning(first_input_zeroed), 10, 8),
    ("gaps overwritten", ATTENTION, lambda: Misrunning(gaps_overwritten), 24, 3),
    ("transposed", ATTENTION, lambda: Misrunning(transposed), 10, 7),
    ("truncated", ATTENTION, lambda: ByDefinition(store=truncated), 16, 3),
    ("refusing", ATTENTION, Refusing, 10, 10),
    *((name, ATTENTION, partial(ByDefinition, change), 24, 2) for name, change in ATTENTION_MISTAKES.items()),
    ("one value missing", MATMUL, lambda: Misreading(one_value_missing), 40, 35),
    ("computed in half", MATMUL, lambda: Misreading(computed_in_half), 40, 6),
    ("the next number", MATMUL, lambda: Misreading(next_number), 40, 4),
    ("lazy", MATMUL, lambda: Misrunning(lazy), 40, 38),
    ("inputs swapped", MATMUL, lambda: Misrunning(inputs_swapped), 150, 2),
    ("an input overwritten", MATMUL, lambda: Misrunning(first_input_zeroed), 40, 38),
    ("gaps overwritten", MATMUL, lambda: Misrunning(gaps_overwritten), 40, 8),
    ("transposed", MATMUL, lambda: Misrunning(transposed), 40, 18),
    ("truncated", MATMUL, lambda: ByDefinition(store=truncated), 100, 2),
    ("refusing", MATMUL, Refusing, 10, 10),
    ("a product missing", MATMUL, lambda: ByDefinition(instead(MatMul, ShortSums)), 40, 30),
    ("TF32", MATMUL, lambda: ByDefinition(instead(MatMul, InTF32)), 40, 6),
    ("sums in half", MATMUL, lambda: ByDefinition(instead(MatMul, SumsInHalf)), 40, 8),
    ("the first of a batch", MATMUL, lambda: ByDefinition(instead(MatMul, FirstOfBatch)), 40, 7),
    ("one value missing", CTC_LOSS, lambda: Misreading(one_value_missing), 40, 30),
    ("computed in half", CTC_LOSS, lambda: Misreading(computed_in_half), 40, 15),
    ("the next number", CTC_LOSS, lambda: Misreading(next_number), 40, 5),
    ("lazy", CTC_LOSS, lambda: Misrunning(lazy), 40, 30),
    ("gaps overwritten", CTC_LOSS, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("another blank", CTC_LOSS, lambda: ByDefinition(attribute("blank", lambda blank: blank // 2)), 40, 10),
    (
        "other infinities",
        CTC_LOSS,
        lambda: ByDefinition(attribute("zero_infinity", lambda on: not on)),
        40,
        9,
    ),
    ("one value missing", GROUPED_MATMUL, lambda: Misreading(one_value_missing), 40, 36),
    ("computed in half", GROUPED_MATMUL, lambda: Misreading(computed_in_half), 40, 10),
    ("the next number", GROUPED_MATMUL, lambda: Misreading(next_number), 40, 6),
    ("an input overwritten", GROUPED_MATMUL, lambda: Misrunning(first_input_zeroed), 40, 36),
    ("gaps overwritten", GROUPED_MATMUL, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("transposed", GROUPED_MATMUL, lambda: Misrunning(transposed), 40, 14),
    ("truncated", GROUPED_MATMUL, lambda: ByDefinition(store=truncated), 40, 3),
    ("as they are", GROUPED_MATMUL, lambda: ByDefinition(instead(GroupedMatMul, AsTheyAre)), 60, 7),
    (
        "other rows",
        GROUPED_MATMUL,
        lambda: ByDefinition(instead(GroupedMatMulBackwardWeights, OtherRows)),
        60,
        5,
    ),
    ("one value missing", REDUCTION, lambda: Misreading(one_value_missing), 40, 38),
    ("one value missing", SOFTMAX, lambda: Misreading(one_value_missing), 40, 38),
    ("computed in half", REDUCTION, lambda: Misreading(computed_in_half), 40, 6),
    ("computed in half", SOFTMAX, lambda: Misreading(computed_in_half), 40, 12),
    ("the next number", REDUCTION, lambda: Misreading(next_number), 40, 5),
    ("the next number", SOFTMAX, lambda: Misreading(next_number), 40, 15),
    ("lazy", REDUCTION, lambda: Misrunning(lazy), 40, 38),
    ("lazy", SOFTMAX, lambda: Misrunning(lazy), 40, 38),
    ("inputs swapped", SOFTMAX, lambda: Misrunning(inputs_swapped), 40, 15),
    ("an input overwritten", REDUCTION, lambda: Misrunning(first_input_zeroed), 40, 38),
    ("gaps overwritten", REDUCTION, lambda: Misrunning(gaps_overwritten), 40, 5),
    ("gaps overwritten", SOFTMAX, lambda: Misrunning(gaps_overwritten), 40, 3),
    ("transposed", REDUCTION, lambda: Misrunning(transposed), 40, 10),
    ("transposed", SOFTMAX, lambda: Misrunning(transposed), 40, 14),
    ("truncated", REDUCTION, lambda: ByDefinition(store=truncated), 40, 2),
    ("truncated", SOFTMAX, lambda: ByDefinition(store=truncated), 40, 11),
    ("refusing", REDUCTION, Refusing, 10, 10),
    ("refusing", SOFTMAX, Refusing, 10, 10),
    ("forwards", REDUCTION, lambda: ByDefinition(attribute("reverse", lambda on: not on)), 60, 10),
    ("inclusive", REDUCTION, lambda: ByDefinition(attribute("exclusive", lambda on: not on)), 60, 15),
    ("last of equals", REDUCTION, lambda: ByDefinition(instead(ArgReduction, LastOfEqualPlaces)), 100, 15),
    ("NaN lost", REDUCTION, lambda: ByDefinition(instead(Reduction, LosingNaN)), 600, 4),
    ("no logarithm", SOFTMAX, lambda: ByDefinition(attribute("log", lambda on: not on)), 40, 36),
    ("another axis", SOFTMAX, lambda: ByDefinition(attribute("axis", lambda _: 0)), 40, 17),
    ("unshifted", SOFTMAX, lambda: ByDefinition(instead(Softmax, Unshifted)), 100, 12),
    ("one value missing", RANDOM, lambda: Misreading(one_value_missing), 40, 35),
    ("computed in half", RANDOM, lambda: Misreading(computed_in_half), 40, 6),
    ("the next number", RANDOM, lambda: Misreading(next_number), 40, 6),
    ("lazy", RANDOM, lambda: Misrunning(lazy), 40, 35),
    ("an input overwritten", RANDOM, lambda: Misrunning(first_input_zeroed), 40, 35),
    ("gaps overwritten", RANDOM, lambda: Misrunning(gaps_overwritten), 40, 3),
    ("truncated", RANDOM, lambda: ByDefinition(store=truncated), 40, 4),
    ("refusing", RANDOM, Refusing, 10, 10),
    ("the next offset", RANDOM, lambda: ByDefinition(instead(RandomUniform, NextOffset)), 40, 6),
    ("in single", RANDOM, lambda: ByDefinition(instead(RandomNormal, InSingle)), 60, 2),
    ("blocks of 32 bits", RANDOM, lambda: ByDefinition(instead(RandomBernoulli, NoCarry)), 60, 3),
    ("another deviation", RANDOM, lambda: ByDefinition(attribute("deviation", lambda d: d + 0.01)), 60, 6),
    ("one value missing", INDEXING, lambda: Misreading(one_value_missing), 40, 30),
    ("lazy", INDEXING, lambda: Misrunning(lazy), 40, 30),
    ("an input overwritten", INDEXING, lambda: Misrunning(first_input_zeroed), 40, 30),
    ("gaps overwritten", INDEXING, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("transposed", INDEXING, lambda: Misrunning(transposed), 40, 5),
    ("refusing", INDEXING, Refusing, 10, 10),
    ("wrapping", INDEXING, lambda: ByDefinition(instead(Gather, Wrapping)), 250, 3),
    ("the first wins", INDEXING, lambda: ByDefinition(instead(ScatterElements, FirstWins)), 250, 2),
    ("no reduction", INDEXING, lambda: ByDefinition(attribute("reduction", other_reduction)), 40, 5),
    ("from the start", INDEXING, lambda: ByDefinition(instead(GatherND, FromTheStart)), 120, 4),
    ("one value missing", SORTING, lambda: Misreading(one_value_missing), 40, 30),
    ("lazy", SORTING, lambda: Misrunning(lazy), 40, 30),
    ("an input overwritten", SORTING, lambda: Misrunning(first_input_zeroed), 40, 30),
    ("gaps overwritten", SORTING, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("transposed", SORTING, lambda: Misrunning(transposed), 40, 5),
    ("refusing", SORTING, Refusing, 10, 10),
    ("the other end", SORTING, lambda: ByDefinition(attribute("largest", lambda on: not on)), 40, 20),
    ("by place", SORTING, lambda: ByDefinition(attribute("in_order", lambda _: False)), 40, 10),
    ("last of equals", SORTING, lambda: ByDefinition(instead(TopK, LastOfEqualElements)), 40, 5),
    ("NaN last", SORTING, lambda: ByDefinition(instead(TopK, NaNLast)), 150, 1),
    ("one value missing", RESAMPLING, lambda: Misreading(one_value_missing), 40, 30),
    ("computed in half", RESAMPLING, lambda: Misreading(computed_in_half), 40, 5),
    ("the next number", RESAMPLING, lambda: Misreading(next_number), 40, 4),
    ("lazy", RESAMPLING, lambda: Misrunning(lazy), 40, 30),
    ("an input overwritten", RESAMPLING, lambda: Misrunning(first_input_zeroed), 40, 30),
    ("gaps overwritten", RESAMPLING, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("transposed", RESAMPLING, lambda: Misrunning(transposed), 40, 5),
    ("truncated", RESAMPLING, lambda: ByDefinition(store=truncated), 40, 2),
    ("refusing", RESAMPLING, Refusing, 10, 10),
    (
        "other coordinates",
        RESAMPLING,
        lambda: ByDefinition(attribute("coordinates", elsewhere)),
        60,
        5,
    ),
    ("aliased", RESAMPLING, lambda: ByDefinition(attribute("antialias", lambda _: False)), 60, 4),
    ("outside", RESAMPLING, lambda: ByDefinition(attribute("exclude_outside", lambda on: not on)), 60, 5),
    (
        "rounded down",
        RESAMPLING,
        lambda: ByDefinition(attribute("rounding", rounded_down)),
        60,
        3,
    ),
    ("one value missing", GRIDS, lambda: Misreading(one_value_missing), 40, 30),
    ("computed in half", GRIDS, lambda: Misreading(computed_in_half), 40, 5),
    ("lazy", GRIDS, lambda: Misrunning(lazy), 40, 30),
    ("gaps overwritten", GRIDS, lambda: Misrunning(gaps_overwritten), 60, 3),
    ("other corners", GRIDS, lambda: ByDefinition(attribute("align_corners", lambda on: not on)), 40, 20),
    ("always zeros", GRIDS, lambda: ByDefinition(attribute("padding", lambda _: GridPadding.ZEROS)), 40, 10),
    ("one value missing", POINTWISE, lambda: Misreading(one_value_missing), 40, 39),
    ("computed in half", POINTWISE, lambda: Misreading(computed_in_half), 40, 5),
    ("the next number", POINTWISE, lambda: Misreading(next_number), 40, 16),
    ("lazy", POINTWISE, lambda: Misrunning(lazy), 40, 39),
    ("inputs swapped", POINTWISE, lambda: Misrunning(inputs_swapped), 100, 3),
    ("an input overwritten", POINTWISE, lambda: Misrunning(first_input_zeroed), 40, 39),
    ("gaps overwritten", POINTWISE, lambda: Misrunning(gaps_overwritten), 40, 13),
    ("transposed", POINTWISE, lambda: Misrunning(transposed), 40, 17),
    ("truncated", POINTWISE, lambda: ByDefinition(store=truncated), 40, 6),
    ("refusing", POINTWISE, Refusing, 10, 10),
    ("other modes", POINTWISE, lambda: ByDefinition(other_modes), 150, 11),
    ("saturating bits", POINTWISE, lambda: ByDefinition(instead(Pointwise, Saturating)), 250, 3),
    (
        "weights in bfloat16",
        ATTENTION,
        lambda: ByDefinition(fused(64, weights=DType.BFLOAT16), single=True),
        40,
        2,
    ),
]
"""Of each: the family, how many cases are run, and how many of them show it at least."""
NOTICED_HERE = pairwise(MISTAKES, lambda mistake: mistake[:2], together=1)
"""Each mistake in a family that has it, and each family with a mistake: all share what compares."""


@pytest.mark.parametrize(
    ("family", "engine", "count", "least"),
    [mistake[1:] for mistake in NOTICED_HERE],
    ids=[f"{name}, {family}" for name, family, *_ in NOTICED_HERE],
)
def test_a_mistake_is_noticed(family: str, engine: Callable[[], CpuEngine], count: int, least: int) -> None:
    """Of the cases, those with an operation that the mistake is about: nothing is wrong with the others."""
    made = opened(engine())
    numbers: Iterator[int] = iter(range(count))
    if isinstance(made, ByDefinition):
        numbers = (each for each in numbers if made.changes(drawn_case(family, SEED, each).operation))
    failures = noticed(made, numbers, family, some(least))
    assert len(failures) >= some(least)
    number, text = next(iter(failures.items()))
    again = f"python -m tests.gpu.fuzz --seed {SEED} --only {number} --engine cpu --operations {family}"
    assert again in text
    assert all(any(word in text for word in NOTICED) for text in failures.values()), str(failures)


def noticed(engine: CpuEngine, numbers: Iterable[int], family: str, wanted: int) -> dict[int, str]:
    """What is wrong with the first of the cases, up to the one with which so many are wrong."""
    failures: dict[int, str] = {}
    for number in numbers:
        failures |= fuzz(engine, SEED, [number], family=family).failures
        if len(failures) == wanted and not WHOLE:
            break
    return failures


NOTICED = ("times its bound", "where it must not", "refused: it will not")
"""What is said of a mistake; anything else would be a mistake of this test."""
