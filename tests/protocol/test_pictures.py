"""Pictures of graphs: what is in them, and that nothing lies on anything else."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.protocol import DeviceSpeed, Explanation, Graph, GraphBuilder, MaxPool, PieceOfPlan, Window
from cudnn_actor.protocol.graphs.box_placement import Size, place
from cudnn_actor.protocol.graphs.explanation import piece_of
from cudnn_actor.protocol.graphs.step_kinds import StepKind
from cudnn_actor.protocol.graphs.timing import PieceTime, PlanTimes

from ..in_one_test import cases_in_one_test

SVG = "{http://www.w3.org/2000/svg}"


def graph() -> Graph:
    g = GraphBuilder()
    x, w = g.input('x & "y" <z>', (2, 8, 6, 6)), g.input("w", (8, 8, 3, 3))
    mean = g.input("mean\n", (2, 8, 6, 6))
    g.input("unread", (3,))
    h = g.relu(g.conv(x, w, pad=1)) + x
    pooled = g.apply(MaxPool(x=h, window=Window.symmetric(2, 2, stride=2)), also=("index",))
    y = pooled.y.reshape(2, 72) * 2.0
    return g.build({"y": y, "index": pooled.index}, updates={"mean\n": mean * 0.5 + h})


def explanation(of: Graph) -> Explanation:
    """The first three operations in one piece, the reshape a view, the others alone."""
    body = of.body
    kinds = [operation.kind for operation in body.operations]
    alone = [n for n in range(3, len(kinds)) if kinds[n] != "reshape"]
    first = piece_of(body, "cuda/a", range(3), "cuDNN eng1", "generated copy", "generated copy")
    pieces: list[PieceOfPlan] = [first, *(piece_of(body, "cuda/b", (n,), "generated kernel") for n in alone)]
    return Explanation(plan="cuda/c", digest=body.digest(), pieces=tuple(pieces), views=("reshape",))


class Rect(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float
    dashed: bool

    def meets(self, other: Rect) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def rects(text: str) -> list[Rect]:
    found = []
    for rect in ET.fromstring(text).iter(f"{SVG}rect"):
        if rect.get("width") != "100%":
            x, y, width, height = (float(rect.get(name) or 0) for name in ("x", "y", "width", "height"))
            found.append(Rect(x, y, x + width, y + height, rect.get("stroke-dasharray") is not None))
    return found


def texts(text: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ET.fromstring(text).iter(f"{SVG}text")]


def test_a_picture_has_a_box_for_each_port_and_operation() -> None:
    text = graph().to_svg()
    assert len(rects(text)) == 4 + len(graph().body.operations) + 2
    shown = texts(text)
    for words in ('x & "y" <z>', "mean?", "unread", "index", "float32 2×8×6×6", "int64 2×8×3×3"):
        assert words in shown
    assert any(re.fullmatch(r"conv_fwd test_pictures\.py:\d+", words) for words in shown)


@cases_in_one_test
@pytest.mark.parametrize("kind", StepKind)
def test_a_piece_has_the_colour_of_its_first_step_and_the_docs_have_its_name(kind: StepKind) -> None:
    step = kind.step_name("eng1")
    of = graph()
    body = of.body
    found = Explanation(plan="", digest=body.digest(), pieces=(piece_of(body, "", (0,), step, "other"),))
    fills = {rect.get("fill") for rect in ET.fromstring(of.to_svg(found)).iter(f"{SVG}rect")}
    assert fills - {"#fff", "#ffffff"} == {kind.colour}
    page = Path(__file__).parents[2] / "docs" / "graphs.md"
    assert f"`{kind.step_name('')}" in page.read_text()


def test_an_explained_picture_has_a_box_for_each_piece_and_dashes_views() -> None:
    text = graph().to_svg(explanation(graph()))
    boxes = rects(text)
    assert len(boxes) == 4 + (len(graph().body.operations) - 2) + 2
    assert sum(box.dashed for box in boxes) == 1
    shown = texts(text)
    assert "0: cuDNN eng1 + generated copy" in shown
    assert sum(words.startswith("relu test_pictures.py:") for words in shown) == 1
    assert max(boxes, key=lambda box: box.bottom - box.top).bottom > 0


@pytest.mark.parametrize("explained", [False, True])
def test_no_box_lies_on_another_and_all_are_inside(explained: bool) -> None:
    text = graph().to_svg(explanation(graph()) if explained else None)
    boxes = rects(text)
    assert not any(one.meets(other) for one, other in itertools.combinations(boxes, 2))
    x, y, width, height = map(float, (ET.fromstring(text).get("viewBox") or "").split())
    assert all(x <= box.left and box.right <= x + width for box in boxes)
    assert all(y <= box.top and box.bottom <= y + height for box in boxes)


def test_an_update_is_a_dashed_line() -> None:
    assert graph().to_svg().count('stroke-dasharray="5 4"') == 1
    assert graph().to_dot().count("style=dashed") == 1


def test_a_notebook_shows_a_small_graph_whole() -> None:
    assert graph()._repr_svg_() == graph().to_svg()


def test_a_notebook_shows_the_first_operations_of_a_large_graph_and_counts_the_rest() -> None:
    g = GraphBuilder()
    y = g.input("x", (4, 4))
    for w in [g.input(f"w{number}", (4, 4)) for number in range(1000)]:
        y = g.relu(y @ w)
    text = g.build(y=y)._repr_svg_()
    boxes, shown = rects(text), texts(text)
    assert len(boxes) <= 201
    assert f"and {3002 - (len(boxes) - 1):,} more" in shown
    assert {"x", "w0", "w1", "w50"} < set(shown)
    assert "w999" not in shown, "its readers are not drawn"
    assert not any(one.meets(other) for one, other in itertools.combinations(boxes, 2))


def test_graphviz_gets_a_cluster_for_each_piece() -> None:
    text = graph().to_dot(explanation(graph()))
    assert text.count("subgraph cluster") == len(graph().body.operations) - 3
    assert 'label="0: cuDNN eng1 + generated copy"' in text
    assert text.count("{") == text.count("}")
    assert text.count(" -> ") == graph().to_dot().count(" -> ")


@st.composite
def drawings(draw: st.DrawFn) -> tuple[dict[Hashable, Size], list[tuple[int, int]]]:
    count = draw(st.integers(1, 12))
    sizes = st.builds(Size, st.integers(1, 90), st.integers(1, 50))
    boxes: dict[Hashable, Size] = {number: draw(sizes) for number in range(count)}
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda p: p[0] != p[1])
    lines = draw(st.lists(pairs, unique_by=frozenset, max_size=20))
    return boxes, [(min(pair), max(pair)) for pair in lines]


@given(drawings())
def test_lines_lead_down_between_boxes_that_do_not_meet(
    drawing: tuple[dict[Hashable, Size], list[tuple[int, int]]],
) -> None:
    boxes, lines = drawing
    placed = place(boxes, lines, gap=Size(5, 7))
    spots = {key: placed.boxes[key] for key in boxes}
    areas = {
        key: Rect(x - w / 2, y - h / 2, x + w / 2, y + h / 2, False)
        for key, (x, y) in spots.items()
        for w, h in [boxes[key]]
    }
    assert not any(one.meets(other) for one, other in itertools.combinations(areas.values(), 2))
    for (source, target), line in zip(lines, placed.lines, strict=True):
        heights = [y for _, y in line]
        assert heights == sorted(heights)
        assert heights[0] >= areas[source].bottom - 1e-6
        assert line[-1] == pytest.approx((spots[target][0], areas[target].top))
        # Lines from one box share their way: one begins at the box, the others at a point of the way.
        begins = [points[0] for pair, points in zip(lines, placed.lines, strict=True) if pair[0] == source]
        assert (spots[source][0], areas[source].bottom) in [pytest.approx(point) for point in begins]


def test_a_measured_piece_has_its_time_in_its_box() -> None:
    drawn = graph()
    known = explanation(drawn)
    speed = DeviceSpeed(copy_bytes_per_s=1e9)
    times = PlanTimes(run_us=9.0, pieces_us=tuple(1234.5 + n for n in range(len(known.pieces))), device=speed)
    measured = known.with_times(drawn.body, times)
    shown = "".join(ET.fromstring(drawn.to_svg(measured)).itertext())
    assert "0: cuDNN eng1 + generated copy, 1,234.5 us" in shown
    assert 'label="0: cuDNN eng1 + generated copy, 1,234.5 us"' in drawn.to_dot(measured)


def measured(*us: float) -> Explanation:
    """An explanation of a graph with as many pieces as there are times."""
    pieces = tuple(
        PieceOfPlan(
            operations=(n,),
            labels=(f"matmul at <{n}>.py:3",),
            steps=(("cuDNN eng4_k24=5", "generated copy")[n % 2],),
            plan="p",
            time=PieceTime(us=each, nbytes=4, flops=8, of_device=0.5),
        )
        for n, each in enumerate(us)
    )
    return Explanation(plan="cuda/graph/1234/x", digest="d", pieces=pieces, run_us=sum(us))


@given(st.lists(st.floats(0, 1e6), max_size=300))
def test_a_timeline_has_a_bar_as_long_as_each_piece(us: list[float]) -> None:
    root = ET.fromstring(measured(*us).to_svg())
    bars = [each for each in root.iter(f"{SVG}rect") if len(each)]
    widths: dict[str, float] = {}
    for bar in bars:
        told = "".join(bar.itertext())
        number = told.partition(":")[0]
        widths[number] = widths.get(number, 0.0) + float(bar.get("width", "0"))
        assert 0 <= float(bar.get("x", "-1")) <= 1200
        assert float(bar.get("x", "0")) + float(bar.get("width", "0")) <= 1201
    assert set(widths) == {str(number) for number in range(len(us))}
    drawn = [max(each, 1e-3) for each in us]  # shorter ones are drawn as long as that
    whole, total = sum(widths.values()), sum(drawn)
    for at, each in enumerate(drawn):
        if each > total / 50:  # short ones are drawn half a pixel wide at least
            assert widths[str(at)] / whole == pytest.approx(each / total, rel=0.25)


def test_a_timeline_says_what_took_how_long() -> None:
    shown = "".join(ET.fromstring(measured(30.0, 10.0, 30.0).to_svg()).itertext())
    assert "cuda/graph/1234: 70.0 us in 3 pieces" in shown
    assert "cuDNN: 60.0 us, 85.7%" in shown
    assert "generated copy: 10.0 us, 14.3%" in shown
    assert "0: 30.0 us, 50% of the device\ncuDNN eng4_k24=5\nmatmul at <0>.py:3" in shown


def test_an_explanation_without_times_has_an_empty_timeline() -> None:
    assert "0.0 us in 0 pieces" in explanation(graph()).to_svg()
