"""What notebooks show as tables in HTML: explanations, statistics, metrics and services."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from cudnn_actor import Explanation, GraphBuilder, Health, blocking, spawn
from cudnn_actor.messages import PieceOfPlan
from cudnn_actor.protocol.graphs.timing import PieceTime
from cudnn_actor.protocol.types.html_table import MOST_ROWS, html_table, record_table
from cudnn_actor.service import HealthState
from cudnn_actor.supervision import ExitReason

from ..inside import service_behind


def tables(html: str) -> list[list[list[str]]]:
    """The cells of each table, by rows; the caption is the first row."""
    return [
        [["".join(cell.itertext()) for cell in row] or ["".join(row.itertext())] for row in table]
        for table in ET.fromstring(f"<body>{html}</body>")
    ]


def explanation(pieces: int, *, timed: bool) -> Explanation:
    labels = ("<script>alert(1)</script> at a&b.py:1",) + ("relu at model.py:12",) * 40
    made = [
        PieceOfPlan(
            operations=tuple(range(41)),
            labels=labels,
            steps=("NumPy",),
            plan="cpu/a",
            why=("x" * 1000,),
            time=PieceTime(us=float(number), nbytes=1, flops=0, of_device=0.5) if timed else None,
        )
        for number in range(pieces)
    ]
    return Explanation(plan="cpu/a/12345678", digest="", pieces=tuple(made))


def test_an_explanation_is_a_table_of_its_pieces() -> None:
    ((caption, head, row),) = tables(explanation(1, timed=False)._repr_html_())
    assert caption == ["Explanation of cpu/a/12345678: 41 operations in 1 piece, 1 step"]
    assert head == ["piece", "runs", "operations", "because"]
    labels = "<script>alert(1)</script> at a&b.py:1, relu at model.py:12, relu at model.py:12 and 38 more"
    assert row[:3] == ["0", "NumPy", labels]
    assert len(row[3]) == 200


def test_a_measured_explanation_begins_with_the_slowest_piece_and_is_bounded() -> None:
    html = explanation(10_000, timed=True)._repr_html_()
    ((_, head, *rows),) = tables(html)
    assert head[:3] == ["piece", "us", "of the device"]
    assert [row[:3] for row in rows[:2]] == [["9999", "9,999.0", "50%"], ["9998", "9,998.0", "50%"]]
    assert len(rows) == MOST_ROWS + 1
    assert rows[-1] == ["and 9,950 more"]
    assert len(html) < 50_000


def test_texts_are_escaped_and_bounded() -> None:
    html = html_table('<b>&"', ("<i>",), [("<script>",), ("a\nb",), ("x" * 1000,)])
    assert not any(tag in html for tag in ("<b>", "<i>", "<script>"))
    assert tables(html) == [[['<b>&"'], ["<i>"], ["<script>"], ["a?b"], [f"{'x' * 197}..."]]]


def test_a_record_is_a_table_of_its_fields() -> None:
    health = Health(
        state=HealthState.READY,
        generation=1234,
        working=False,
        last_progress_s=None,
        queued=0,
        restarts=0,
        restarts_left=3,
        cause=ExitReason.crash("<lost>"),
    )
    ((caption, *rows),) = tables(record_table("Health", health))
    assert caption == ["Health"]
    assert rows[:4] == [
        ["state", "ready"],
        ["generation", "1,234"],
        ["working", "False"],
        ["last_progress_s", "None"],
    ]
    assert rows[-1] == ["cause", "crash: <lost>"]


async def test_a_service_is_shown_as_its_health_and_its_requests() -> None:
    async with spawn(device="cpu", isolation="thread", name="a<b>") as gpu:
        g = GraphBuilder()
        x = await gpu.empty((2, 3))
        await gpu.apply(g.build(y=g.relu(g.input("x", (2, 3)))), x=x)
        health, requests = tables(gpu._repr_html_())
        assert health[:3] == [["<CudnnRef 'a<b>' on cpu>"], ["state", "ready"], ["generation", "1"]]
        assert requests[1] == ["message", "model", "finished", "failed", "mean run, ms", "p99 total, ms"]
        assert [row[:4] for row in requests if row[0] == "RunGraph"] == [["RunGraph", "", "1", "0"]]
        ((caption, *rows),) = tables((await gpu.statistics())._repr_html_())
        assert caption == ["Statistics"]
        assert ["plans.capacity", "256"] in rows
        assert ["live_buffers", "2"] in rows
        metrics, again = tables(gpu.metrics()._repr_html_())
        assert metrics[0] == ["Metrics of 'a<b>'"]
        assert again[0] == ["Requests"]
    assert tables(gpu._repr_html_())[0][:2] == [["<CudnnRef 'a<b>' on cpu: stopped>"], ["state", "stopped"]]
    assert tables(service_behind(gpu)._repr_html_())[0][0] == ["<CudnnService 'a<b>' on cpu: stopped>"]


def test_a_blocking_handle_is_shown_in_the_same_way() -> None:
    with blocking.spawn(device="cpu", isolation="thread", name="a") as gpu:
        health, _ = tables(gpu._repr_html_())
        assert health[:2] == [["<BlockingRef 'a' on cpu>"], ["state", "ready"]]
