"""What the pieces of a plan move and compute, in the time that an engine has measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cudnn_actor import Explanation, Graph, GraphBuilder
from cudnn_actor.protocol.graphs.explanation import piece_of
from cudnn_actor.protocol.graphs.timing import DeviceSpeed, PieceTime, PlanTimes, piece_times

from ..growth import takes_in_proportion

DEVICE = DeviceSpeed(copy_bytes_per_s=1e9, flops_per_s={"float32": 1e11})


def timed(graph: Graph, *pieces: Sequence[int], us: float = 10.0) -> list[PieceTime]:
    times = PlanTimes(run_us=len(pieces) * us, pieces_us=(us,) * len(pieces), device=DEVICE)
    return list(piece_times(graph.body, pieces, times))


def of_one(build: Callable[[GraphBuilder], Any]) -> PieceTime:
    g = GraphBuilder()
    graph = g.build(y=build(g))
    (found,) = timed(graph, range(len(graph.body.operations)))
    return found


@pytest.mark.parametrize(
    ("build", "flops", "elements"),
    [
        (
            lambda g: g.conv(g.input("x", (2, 4, 8, 8)), g.input("w", (6, 2, 3, 3)), groups=2),
            2 * (2 * 6 * 6 * 6) * (2 * 3 * 3),
            2 * 4 * 8 * 8 + 6 * 2 * 3 * 3 + 2 * 6 * 6 * 6,
        ),
        (lambda g: g.input("a", (5, 3, 4)) @ g.input("b", (4, 7)), 2 * 5 * 3 * 7 * 4, 60 + 28 + 105),
        (
            lambda g: g.attention(
                g.input("q", (2, 6, 5, 8)), g.input("k", (2, 3, 9, 8)), g.input("v", (2, 3, 9, 4))
            ),
            2 * (2 * 6 * 5 * 9) * (8 + 4),
            2 * 6 * 5 * 8 + 2 * 3 * 9 * 8 + 2 * 3 * 9 * 4 + 2 * 6 * 5 * 4,
        ),
        (lambda g: g.input("x", (3, 5)) * 2.0 + 1.0, 0, 15 + 15),
    ],
    ids=["convolution", "product", "attention", "functions of each element"],
)
def test_a_piece_reads_and_writes_each_of_its_tensors_once(
    build: Callable[[GraphBuilder], Any], flops: int, elements: int
) -> None:
    found = of_one(build)
    assert (found.flops, found.nbytes) == (flops, 4 * elements)


def test_gradients_of_a_convolution_multiply_as_often_as_it_does() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (2, 4, 8, 8)), g.input("w", (6, 4, 3, 3))
    y = g.conv(x, w)
    dx, dw = g.grad((y * y).sum(), (x, w))
    graph = g.build(y=y, dx=dx, dw=dw)
    found = [time.flops for time in timed(graph, *_alone(graph.body))]
    assert [flops for flops in found if flops] == [2 * (2 * 6 * 6 * 6) * (4 * 3 * 3)] * 3


def _alone(body: Any) -> list[tuple[int]]:
    return [(number,) for number in range(len(body.operations))]


def test_what_stays_inside_a_piece_is_not_moved_and_what_others_read_is() -> None:
    g = GraphBuilder()
    x = g.input("x", (1000,))
    doubled = x * 2.0
    graph = g.build(y=g.relu(doubled), z=g.exp(doubled))
    together = timed(graph, (0, 1, 2))
    apart = timed(graph, (0, 1), (2,))
    assert [time.nbytes for time in together] == [3 * 4000]
    assert [time.nbytes for time in apart] == [3 * 4000, 2 * 4000]


def test_of_a_view_only_its_elements_are_moved() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.relu(g.input("x", (10, 100), "float16")[:, :10]))
    (found,) = timed(graph, (1,))
    assert found.nbytes == 2 * 200


def test_the_share_of_the_device_is_that_of_what_it_needs_longer_for() -> None:
    moved = of_one(lambda g: g.relu(g.input("x", (500,))))  # 4,000 bytes: 4 us
    assert moved.of_device == pytest.approx(0.4)
    computed = of_one(lambda g: g.input("a", (1, 1000)) @ g.input("b", (1000, 2)))
    assert computed.of_device == pytest.approx(4 * 3002 / 1e9 / 10e-6)
    square = of_one(lambda g: g.input("a", (1000, 1000)) @ g.input("b", (1000, 1000)))
    assert square.of_device == pytest.approx(2e9 / 1e11 / 10e-6)


def test_products_of_a_type_of_unknown_speed_have_no_share() -> None:
    found = of_one(lambda g: g.input("a", (4, 4), "bfloat16") @ g.input("b", (4, 4), "bfloat16"))
    assert (found.flops, found.of_device) == (128, None)


def test_a_table_has_the_slowest_pieces_first_and_their_numbers() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.softmax(g.input("a", (100, 50)) @ g.input("b", (50, 100))))
    pieces = tuple(piece_of(graph.body, "cpu/x", (number,), "NumPy") for number in range(2))
    found = Explanation(plan="cpu/matmul/0", digest="", pieces=pieces).with_times(
        graph.body, PlanTimes(run_us=101.5, pieces_us=(20.0, 80.0), device=DEVICE)
    )
    lines = str(found).splitlines()
    medians = "times are medians, which need not add up"
    assert lines[3] == f"101.5 us a run; the slowest pieces first; a copy: 1.0 GB/s; {medians}"
    heads = "piece us share GB/s GFLOP/s of the device runs operations"
    assert lines[5].split() == heads.split()
    assert lines[6].split()[:6] == ["1", "80.0", "80.0%", "1.0", "100%", "NumPy"]
    assert lines[7].split()[:7] == ["0", "20.0", "20.0%", "4.0", "50", ">100%", "NumPy"]
    assert lines[6].index("NumPy") == lines[5].index("runs")


def test_shares_of_a_long_plan_take_time_in_proportion() -> None:
    def work(count: int) -> Callable[[], object]:
        g = GraphBuilder()
        y = g.input("x", (2,))
        for _ in range(count):
            y = g.tanh(y)
        body = g.build(y=y).body
        times = PlanTimes(run_us=1.0, pieces_us=(1.0,) * count, device=DEVICE)
        return lambda: list(piece_times(body, _alone(body), times))

    takes_in_proportion(work, 150)
