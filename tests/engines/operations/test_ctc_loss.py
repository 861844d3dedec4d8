"""CTC loss against a sum over all alignments, written out, against known numbers, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cuda.operations import ctc_loss
from cudnn_actor.protocol import CTCLoss, DType, GraphBuilder, GraphTensor, InvalidRequest, Tensor, TensorSpec

from ...in_one_test import cases_in_one_test
from .. import host_cuda
from ..differences import check_gradients, computed
from ..problems import FLOATS, normal
from ..references import assert_all_close
from ..workbench import Workbench, spread

INPUTS = ("log_probs", "targets", "input_lengths", "target_lengths")
INF, NAN = math.inf, math.nan
Labels = Sequence[int]


def log_softmax(scores: np.ndarray) -> np.ndarray:
    found: np.ndarray = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return found


@dataclass
class Problem:
    """Samples of these labels in these frames. `padding` is what is behind labels."""

    labels: Sequence[Labels]
    lengths: Sequence[int]
    classes: int = 3
    dtype: DType = DType.FLOAT64
    padding: int = 0
    room: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, np.ndarray]:
        size = max(map(len, self.labels)) + self.room
        targets = np.full((len(self.labels), size), self.padding, np.int64)
        for row, labels in zip(targets, self.labels, strict=True):
            row[: len(labels)] = labels
        scores = normal((max(self.lengths), len(self.labels), self.classes), DType.FLOAT64, 3)
        return {
            "log_probs": log_softmax(scores).astype(self.dtype.numpy),
            "targets": targets,
            "input_lengths": np.array(self.lengths, np.int32),
            "target_lengths": np.array([*map(len, self.labels)], np.int64),
        }

    def operation(self) -> CTCLoss[Any]:
        operands: dict[str, Any] = {name: name for name in (*INPUTS, "losses", "dlog_probs")}
        return CTCLoss(**operands, **self.options)

    def run(self, bench: Workbench, how: str = "packed", **changed: np.ndarray) -> dict[str, np.ndarray]:
        """The losses and their derivatives. `changed`: other inputs."""
        given, operation = {**self.given, **changed}, self.operation()
        specs = {name: TensorSpec.like(array) for name, array in given.items()}
        specs |= operation.infer(specs)
        if how == "spread":
            specs = {name: spread(spec.dims, spec.dtype) for name, spec in specs.items()}
        refs = {name: bench.empty(spec) for name, spec in specs.items() if name not in given}
        refs |= {name: bench.place(array, specs[name]) for name, array in given.items()}
        losses = bench.run(operation.with_operands(refs.__getitem__))
        return {"losses": losses, "dlog_probs": bench.read(refs["dlog_probs"])}


def alignments(frames: int, classes: int, labels: Labels, blank: int) -> Iterator[tuple[int, ...]]:
    """All sequences of classes that give the labels."""
    for path in itertools.product(range(classes), repeat=frames):
        if [label for label, _ in itertools.groupby(path) if label != blank] == [*labels]:
            yield path


def written_out(problem: Problem) -> dict[str, np.ndarray]:
    """By the sum over all alignments, and the shares of those that have a class in a frame."""
    log_probs = problem.given["log_probs"].astype(np.float64)
    losses, slopes = np.full(len(problem.labels), INF), np.zeros_like(log_probs)
    for sample, (labels, frames) in enumerate(zip(problem.labels, problem.lengths, strict=True)):
        blank = problem.options.get("blank", 0)
        paths = [*alignments(frames, problem.classes, labels, blank)]
        steps = np.arange(frames)
        shares = np.array([np.exp(log_probs[steps, sample, [*path]].sum()) for path in paths])
        if not paths:
            slopes[:frames, sample] = NAN
            continue
        losses[sample] = -np.log(shares.sum())
        for path, share in zip(paths, shares / shares.sum(), strict=True):
            slopes[steps, sample, [*path]] -= share
    if problem.options.get("zero_infinity"):
        losses[np.isinf(losses)], slopes[np.isnan(slopes)] = 0.0, 0.0
    return {"losses": losses, "dlog_probs": slopes}


PROBLEMS = {
    "labels of several lengths": Problem([[1, 2], [2], [], [1, 2, 1]], [5, 4, 3, 6]),
    "equal neighbours": Problem([[1, 1], [2, 2, 2], [1, 1, 2, 2]], [4, 6, 6]),
    "labels that no alignment gives": Problem([[1, 1], [1, 2, 1], [1]], [2, 2, 4]),
    "those with a loss of 0": Problem([[1, 1], [1, 2, 1], [1]], [2, 2, 4], options={"zero_infinity": True}),
    "no frames": Problem([[], [1], [2]], [0, 0, 3]),
    "no frames, and a loss of 0": Problem([[], [1], [2]], [0, 0, 3], options={"zero_infinity": True}),
    "a frame for each label": Problem([[1, 2, 1]], [3]),
    "no labels": Problem([[], []], [4, 2]),
    "the last class as blank": Problem([[0, 1], [1, 1]], [5, 5], options={"blank": 2}),
    "blanks alone": Problem([[], []], [3, 2], classes=1),
    "more room than labels": Problem([[1], [2, 1]], [4, 4], padding=2, room=3),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


TOLERANCES = {dtype.numpy: bound for dtype, bound in zip(FLOATS, (1e-12, 1e-6, 1e-3, 1e-2), strict=True)}


def check(found: dict[str, np.ndarray], problem: Problem) -> None:
    assert_all_close(found, written_out(problem), TOLERANCES)


@cases_in_one_test
@each_problem
def test_the_loss_is_that_of_all_alignments_together(bench: Workbench, problem: Problem) -> None:
    check(problem.run(bench), problem)
    check(problem.run(bench, "spread"), problem)


@pytest.mark.parametrize("dtype", FLOATS)
def test_losses_of_half_types_are_float32(bench: Workbench, dtype: DType) -> None:
    problem = Problem([[1, 2], [1, 1], [2]], [5, 4, 5], dtype=dtype)
    found = problem.run(bench)
    wide = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
    assert {name: DType.of(array.dtype) for name, array in found.items()} == {
        "losses": wide,
        "dlog_probs": dtype,
    }
    check(found, problem)


def test_labels_and_lengths_out_of_range_count_as_the_nearest(bench: Workbench) -> None:
    far = 2**40
    problem = Problem([[0, 2, 1], [1, 2, 0]], [6, 6], room=1, options={"blank": 1})
    found = problem.run(
        bench,
        targets=np.array([[-far, far, 1, 7], [1, 3, -1, far]]),
        input_lengths=np.array([far, 6]),
        target_lengths=np.array([3, 3]),
    )
    same = problem.run(bench, targets=np.array([[0, 2, 1, 0], [1, 2, 0, 2]]))
    for name, array in same.items():
        np.testing.assert_array_equal(found[name], array)
    found = problem.run(
        bench, target_lengths=np.array([-1, -far]), input_lengths=np.array([-far, 2], np.int64)
    )
    none = problem.run(bench, target_lengths=np.array([0, 0]), input_lengths=np.array([0, 2], np.int32))
    for name, array in none.items():
        np.testing.assert_array_equal(found[name], array)


def test_what_is_behind_frames_and_labels_has_no_effect(bench: Workbench) -> None:
    problem = Problem([[1], [2, 1]], [3, 5], classes=4, room=2)
    wanted, given = problem.run(bench), problem.given
    log_probs, targets = given["log_probs"].copy(), given["targets"].copy()
    log_probs[3:, 0] = NAN
    log_probs[:, 0, 3], targets[0, 1:] = NAN, 3
    found = problem.run(bench, log_probs=log_probs, targets=targets)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def test_what_cannot_be_has_no_share(bench: Workbench) -> None:
    """A probability of 0 where there are other alignments; and where there are none; and NaN."""
    problem = Problem([[1], [1], [1]], [4, 4, 4])
    log_probs = problem.given["log_probs"].copy()
    log_probs[1, 0, 1] = -INF
    log_probs[:, 1, 1] = -INF
    log_probs[2, 2, 1] = NAN
    found = problem.run(bench, log_probs=log_probs)
    assert np.isfinite(found["losses"]).tolist() == [True, False, False]
    assert found["losses"][1] == INF
    assert np.isfinite(found["dlog_probs"][:, 0]).all()
    assert found["dlog_probs"][1, 0, 1] == 0
    assert np.isnan(found["losses"][2])
    assert np.isnan(found["dlog_probs"][:, 1:]).all()


def test_a_long_loss_is_the_logarithm_of_a_number_of_alignments(bench: Workbench) -> None:
    """All classes are as probable: T frames have binomial(T + S, 2 S) alignments with S unlike labels.

    Derivatives, too, are exact where logarithms are in the thousands: float32 has steps of 0.0005 there.
    """
    frames, labels, classes = 3_000, 40, 5
    log_probs = np.full((frames, 1, classes), np.float32(-math.log(classes)))
    problem = Problem([[1 + n % 4 for n in range(labels)]], [frames], classes, DType.FLOAT32)
    found = problem.run(bench, log_probs=log_probs)
    ways = math.log(math.comb(frames + labels, 2 * labels))
    np.testing.assert_allclose(found["losses"], [-frames * float(log_probs[0, 0, 0]) - ways], rtol=1e-6)
    np.testing.assert_allclose(found["dlog_probs"].sum(axis=2), -1, rtol=1e-5)
    first = -(frames - labels) / (frames + labels)  # as many more with a frame less begin with a blank
    np.testing.assert_allclose(found["dlog_probs"][0, 0, 0], first, rtol=1e-5)


@cases_in_one_test
@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("log_probs", {"log_probs": ((5, 2), "float32")}),
        ("log_probs", {"log_probs": ((5, 2, 3), "int32")}),
        ("log_probs", {"log_probs": ((5, 2, 0), "float32")}),
        ("targets", {"targets": ((3, 4), "int32")}),
        ("targets", {"targets": ((2, 4), "float32")}),
        ("targets", {"targets": ((8,), "int32")}),
        ("input_lengths", {"input_lengths": ((3,), "int32")}),
        ("input_lengths", {"input_lengths": ((2,), "uint8")}),
        ("target_lengths", {"target_lengths": ((2, 1), "int32")}),
        ("blank", {"blank": 3}),
        ("blank", {"blank": -1}),
        ("reduction", {"reduction": "average"}),
    ],
)
def test_a_mistake_names_its_field(field: str, changes: dict[str, Any]) -> None:
    g = GraphBuilder()
    shapes: dict[str, Any] = {"log_probs": ((5, 2, 3), "float32"), "targets": ((2, 4), "int32")}
    shapes |= dict.fromkeys(INPUTS[2:], ((2,), "int64"))
    options = {name: value for name, value in changes.items() if name not in shapes}
    shapes |= {name: value for name, value in changes.items() if name in shapes}
    tensors: Any = {name: g.input(name, *shape) for name, shape in shapes.items()}
    with pytest.raises(InvalidRequest) as caught:
        g.ctc_loss(**tensors, **options)
    assert caught.value.field == field


def inputs(g: GraphBuilder, given: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: g.input(name, array.shape, array.dtype) for name, array in given.items()}


def test_a_builder_gives_the_mean_by_labels_the_sum_or_each() -> None:
    problem = PROBLEMS["labels of several lengths"]
    g, given = GraphBuilder(), problem.given
    tensors = inputs(g, given)
    made: dict[str, Any] = {how: g.ctc_loss(**tensors, reduction=how) for how in ("mean", "sum", "none")}
    found, each = computed(g.build(made), given), written_out(problem)["losses"]
    np.testing.assert_allclose(found["none"], each)
    np.testing.assert_allclose(found["sum"], each.sum())
    np.testing.assert_allclose(found["mean"], np.mean(each / np.maximum(given["target_lengths"], 1)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_are_those_of_differences(reduction: Any) -> None:
    """Of any numbers, not only of logarithms of probabilities; and of the scores before a softmax."""
    given = PROBLEMS["labels of several lengths"].given
    others = {name: array for name, array in given.items() if name != "log_probs"}
    x = {"x": normal(given["log_probs"].shape, DType.FLOAT64, 5)}

    def function(g: GraphBuilder, *, through: bool, **tensors: Tensor) -> Tensor:
        scores = tensors.pop("x")
        log_probs = g.log_softmax(scores, 2) if through else scores
        return g.ctc_loss(log_probs, **tensors, reduction=reduction)  # type: ignore[arg-type]

    for through in (False, True):
        check_gradients(lambda g, t=through, **ts: function(g, through=t, **ts), x | others, ["x"])


def test_losses_and_gradients_of_scores_are_those_that_pytorch_gave() -> None:
    """PyTorch 2.13 on the CPU, float64."""
    given: dict[str, np.ndarray] = {
        "x": np.sin(np.arange(84) * 1.7).reshape(7, 3, 4) * 2,
        "targets": np.array([[1, 2, 2], [3, 3, 0], [2, 0, 0]]),
        "input_lengths": np.array([7, 5, 6]),
        "target_lengths": np.array([3, 2, 1]),
    }
    g = GraphBuilder()
    tensors = inputs(g, given)
    x = tensors.pop("x")
    losses = g.ctc_loss(g.log_softmax(x, 2), **tensors, reduction="none")
    found = computed(g.build(losses=losses, dx=g.grad(losses, x)), given)
    recorded = {
        "losses": [5.951137746820011, 8.103062033597544, 4.803234267981995],
        "first": [0.08719712853749832, -0.1595951496586267, -0.2911338459106479, 0.0007432616617428957],
        "sizes": [6.391910870941512, 5.7089981167544135, 6.098355488252933],
    }
    np.testing.assert_allclose(found["losses"], recorded["losses"], rtol=1e-12)
    np.testing.assert_allclose(found["dx"][:4, 0, 0], recorded["first"], rtol=1e-11)
    np.testing.assert_allclose(np.abs(found["dx"]).sum(axis=(0, 2)), recorded["sizes"], rtol=1e-12)


def test_there_are_no_second_derivatives() -> None:
    given = PROBLEMS["equal neighbours"].given
    g = GraphBuilder()
    tensors = inputs(g, given)
    dx = g.grad(g.ctc_loss(**tensors), tensors["log_probs"])
    with pytest.raises(InvalidRequest, match="no second derivatives"):
        g.grad(g.sum(g.square(dx)), tensors["log_probs"])


# The kernel, on the host.


@pytest.fixture
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)


@pytest.mark.usefixtures("_on_the_host")
@pytest.mark.parametrize(
    ("threads", "nbytes"),
    [(1024, 1 << 28), (32, 1 << 28), (1024, 1 << 12), (32, 1 << 12)],
    ids=["rows in shared memory", "several states a thread", "few rows are kept", "both"],
)
def test_the_kernel_does_the_same(monkeypatch: pytest.MonkeyPatch, threads: int, nbytes: int) -> None:
    monkeypatch.setattr(ctc_loss, "MOST_THREADS", threads)
    monkeypatch.setattr(ctc_loss, "_MOST_BYTES", nbytes)
    labels = [[1 + n * n % 7 % 4 for n in range(size)] for size in (20, 0, 7, 19, 20)]
    problem = Problem(labels, [57, 12, 0, 20, 57], 5, DType.FLOAT32, options={"blank": 1})
    given, operation = problem.given, problem.operation()
    specs = {name: TensorSpec.like(array) for name, array in given.items()}
    specs |= operation.infer(specs)
    specs = {name: spread(spec.dims, spec.dtype) for name, spec in specs.items()}
    found = host_cuda.launched(operation, specs, given)
    for name, wanted in host_cuda.defined(operation, specs, given).items():
        np.testing.assert_allclose(found[name], wanted, rtol=2e-6, atol=1e-12)


def test_the_kernel_s_workspace_is_bounded() -> None:
    def nbytes(frames: int, samples: int, labels: int) -> int:
        dims = (
            (frames, samples, 30),
            (samples, labels),
            (samples,),
            (samples,),
            (samples,),
            (frames, samples, 30),
        )
        dtypes = [DType.FLOAT32, *[DType.INT32] * 3, *[DType.FLOAT32] * 2]
        specs = [TensorSpec.packed(each, dtype) for each, dtype in zip(dims, dtypes, strict=True)]
        tensors = [
            GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
            for uid, spec in enumerate(specs)
        ]
        operation: Any = (
            Problem([[1]], [1]).operation().with_operands([*INPUTS, "losses", "dlog_probs"].index)
        )
        return ctc_loss.ctc_workspace(operation, tensors)

    assert nbytes(500, 64, 40) == 64 * 500 * 81 * 8
    assert 0 < nbytes(10_000, 64, 2_000) <= 1 << 28
    assert 0 < nbytes(10_000, 5_000, 40) <= 1 << 28
