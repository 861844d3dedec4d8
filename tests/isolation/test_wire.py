"""What is sent of a message that runs a graph, and the message that the worker makes of it."""

from __future__ import annotations

import msgspec
import pytest

from cudnn_actor import BufferRef, GraphBuilder, Loop, RunGraph, RunLoop
from cudnn_actor.isolation.known_graphs import LoopKnown, RunKnown
from cudnn_actor.isolation.process.child.decoders import MESSAGES
from cudnn_actor.isolation.process.wire import encode_message
from cudnn_actor.protocol import Graph


def graph_of(inputs: int) -> Graph:
    g = GraphBuilder()
    given = [g.input(f"x{n}", (1, 1, 1)) for n in range(inputs)]
    return g.build(y=sum(map(g.exp, given[1:]), g.exp(given[0])))


def message_of(graph: Graph, alignments: dict[str, int]) -> RunGraph:
    """With buffers of the ports' specs, but for some alignments."""
    buffers = {}
    for place, port in enumerate(graph.ports):
        spec = msgspec.structs.replace(port.spec, alignment=alignments.get(port.name, port.spec.alignment))
        buffers[port.name] = BufferRef(slot=7 + place, generation=(5 << 32) + place, spec=spec, device="cpu")
    return RunGraph.bind(graph, buffers)


@pytest.mark.parametrize("alignments", [{}, {"x0": 64, "y": 256}])
def test_a_message_arrives_as_it_was_sent(alignments: dict[str, int]) -> None:
    graph = graph_of(1)
    message = message_of(graph, alignments)
    known = MESSAGES.decode(encode_message(message))
    assert known.message(graph, "cpu") == message


def test_each_further_buffer_takes_some_bytes() -> None:
    """Specs, which take over a hundred each, and long to decode, are not sent."""
    few, many = (len(encode_message(message_of(graph_of(count), {}))) for count in (2, 102))
    assert many - few <= 100 * 16


@pytest.mark.parametrize(("alignments", "inputs"), [({}, 2), ({5: 64}, 1)])
def test_what_is_no_message_for_a_graph_is_an_error(alignments: dict[int, int], inputs: int) -> None:
    graph = graph_of(1)
    known = RunKnown.of(message_of(graph, {}))
    known = msgspec.structs.replace(known, alignments=alignments)
    with pytest.raises((ValueError, IndexError)):
        known.message(graph_of(inputs), "cpu")


class TestLoops:
    """A loop is sent without its body, which the worker has."""

    @staticmethod
    def message() -> RunLoop:
        graph = graph_of(30)
        loop = Loop(body=graph, carried={"x0": "y"}, scanned=("x1",))
        specs = {**loop.specs(3), "scratch": loop.scratch}
        refs = [
            BufferRef(slot=n, generation=n, spec=spec, device="cpu") for n, spec in enumerate(specs.values())
        ]
        return RunLoop(loop=loop, buffers=tuple(refs[:-1]), scratch=refs[-1], turns=3)

    def test_it_arrives_as_it_was_sent(self) -> None:
        message = self.message()
        known = MESSAGES.decode(encode_message(message))
        assert known.message(message.graph, "cpu") == message

    def test_with_another_body_it_is_an_error(self) -> None:
        known = LoopKnown.of(self.message())
        with pytest.raises(ValueError, match=r"^scanned='x1'"):
            known.message(graph_of(1), "cpu")
