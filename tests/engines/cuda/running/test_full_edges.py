"""Edges of CUDA graphs stand in the place of barriers only in captures, and where that has been proved."""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace
from typing import Any

import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library import failures
from cudnn_actor.engines.cuda.running import full_edges, program
from cudnn_actor.engines.cuda.running.full_edges import LEAST_REPLAYS, PROVED, Versions, wait_by_edge
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import Buffer, GraphStep, Recipe

from ....test_packages import ROOT

KERNEL, NODE = "kernel", "node"
GRAPH = 77


def pointed_at(reference: Any) -> Any:
    """What `ctypes.byref` was given."""
    return vars(type(reference))["_obj"].__get__(reference)


def put(value: int, reference: Any) -> None:
    """Store a number where a reference points."""
    pointed_at(reference).value = value


class Capture:
    """The driver's library, a stream, the frontend's graphs and a barrier, as far as a capture needs them.

    `nodes`: the kind of each node so far, and the number of the nodes that it waits for.
    """

    ptr = 5

    def __init__(self) -> None:
        self.nodes: list[tuple[str, int]] = []
        self.launched: list[str] = []
        self.captures = False
        self.status = 0
        self._last = (ctypes.c_void_p * 1)()

    # The stream.

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_capture(self, _mode: int) -> None:
        """Begin to note nodes."""
        self.captures, self.nodes = True, []

    def end_capture(self) -> Any:
        """A graph that notes that it is launched."""
        self.captures = False
        return SimpleNamespace(launch=lambda _: self.launched.append("graph"), graphExec=1)

    def add(self, kind: str) -> None:
        """A launch, or a node of its capture."""
        if self.captures:
            self.nodes.append((kind, len(self.nodes)))
            self._last[0] = len(self.nodes)
        else:
            self.launched.append(kind)

    # The frontend, and the barrier.

    def execute(self, *_: Any, **__: Any) -> None:
        """A run of one of cuDNN's graphs."""
        self.add(KERNEL)

    def compile(self) -> None:
        """It is."""

    def __call__(self, *_: Any) -> None:
        self.add("barrier")

    # The driver.

    def cuStreamGetCaptureInfo_v3(self, stream: Any, *found: Any) -> int:  # noqa: N802
        assert stream.value == self.ptr
        status, _, graph, nodes, _, count = found
        put(1, status)
        put(GRAPH, graph)
        put(ctypes.addressof(self._last), nodes)
        put(int(bool(self.nodes)), count)
        return self.status

    def cuGraphAddEmptyNode(self, node: Any, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        assert (graph.value, count.value) == (GRAPH, 1)
        assert ctypes.c_void_p.from_address(nodes.value).value == len(self.nodes), "behind the last one"
        self.add(NODE)
        put(len(self.nodes), node)
        return 0

    def cuStreamUpdateCaptureDependencies_v2(  # noqa: N802
        self, stream: Any, node: Any, data: Any, count: Any, flags: int
    ) -> int:
        assert stream.value == self.ptr
        assert (pointed_at(node).value, data, count.value) == (len(self.nodes), None, 1)
        assert flags == 1, "nothing else is waited for"
        return 0


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    found = Capture()
    runtime = SimpleNamespace(streamCaptureModeThreadLocal=1, driverGetVersion=lambda: 13000)
    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(compute_capability="90"))
    loaded = SimpleNamespace(
        runtime=runtime, cupy=SimpleNamespace(cuda=cuda), cudnn=SimpleNamespace(backend_version=lambda: 91900)
    )
    for module in (program, full_edges):
        monkeypatch.setattr(module, "libraries", lambda: loaded)
    monkeypatch.setattr(full_edges, "libcuda", lambda: found)
    monkeypatch.setattr(program, "barrier", lambda: found)
    return found


def program_of(capture: Capture, **options: bool) -> Program:
    """Two of cuDNN's steps, the second of which reads beside its product what the first has written."""
    steps = (
        GraphStep("eng1", 0, (1, 2), (Buffer(0), Buffer(1))),
        GraphStep("eng1", 0, (1, 2, 3), (Buffer(0), Buffer(1), Buffer(2)), beside=(1,)),
    )
    recipe = Recipe(tag="two", steps=steps, scratch=0, buffers=3, scalars=0)
    return Program(CudaPlan(recipe, (capture, capture)), None, capture, fast=False, **options)


def run(found: Program, times: int) -> None:
    """Run it with the same buffers, until it is captured if that is often."""
    for _ in range(times):
        found.run((1, 2, 3), (1, 2, 3), (), 0)


def test_a_capture_has_barriers_unless_edges_are_proved(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_edges, "PROVED", frozenset())
    run(program_of(capture), 4)
    assert [kind for kind, _ in capture.nodes] == [KERNEL, "barrier", KERNEL]


def test_a_capture_has_edges_with_versions_that_are_proved(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for proved, wanted in (
        (Versions(91900, 13000, "90"), NODE),
        (Versions(92801, 13000, "90"), "barrier"),
        (Versions(91900, 13010, "90"), "barrier"),
        (Versions(91900, 13000, "100"), "barrier"),
    ):
        monkeypatch.setattr(full_edges, "PROVED", frozenset((proved,)))
        run(program_of(capture), 4)
        assert [kind for kind, _ in capture.nodes] == [KERNEL, wanted, KERNEL]


def test_runs_that_are_not_captured_have_barriers(capture: Capture) -> None:
    found = program_of(capture, full_edges=True)
    run(found, 3)
    assert capture.launched == [KERNEL, "barrier", KERNEL] * 3
    run(found, 1)
    assert capture.nodes == [(KERNEL, 0), (NODE, 1), (KERNEL, 2)]


def test_a_failed_capture_leaves_barriers_to_the_runs_behind_it(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "raise_status", lambda status: pytest.fail("not this one"))
    monkeypatch.setattr(full_edges, "check_status", failing)
    found = program_of(capture, full_edges=True)
    run(found, 3)
    capture.status = 1
    capture.launched.clear()
    run(found, 2)
    assert capture.launched == [KERNEL, "barrier", KERNEL] * 2
    assert not found.replays


def failing(status: int) -> None:
    """As `check_status`, which needs the driver for its text."""
    if status:
        raise EngineFailure("CUDA_ERROR", str(status))


def test_nothing_is_added_where_nothing_was_captured(capture: Capture) -> None:
    capture.begin_capture(1)
    wait_by_edge(capture)
    assert capture.nodes == []


def test_each_proved_version_has_a_record() -> None:
    records = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("full-edges-*")]
    for proved in PROVED:
        # The first record says which GPU it was, not its compute capability.
        told = [({"capability": "90"} if "H100" in each["versions"]["GPU"] else {}, each) for each in records]
        of_version = [each for more, each in told if more | each["versions_proved"] == proved._asdict()]
        rows = [row for each in of_version for row in each["found"]]
        assert rows, proved
        assert all(row.get("different") == row["different_with_barriers"] == 0 for row in rows)
        assert all(row["replays"] >= LEAST_REPLAYS for row in rows)
        assert any(row["barriers"] and row["different_without"] for row in rows), "they would show a fault"
