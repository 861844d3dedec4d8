"""The process that waits for a plan gets those of its pieces while the rest is built, and loads them."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from cudnn_actor.engines.base import Builder
from cudnn_actor.engines.remote import BuilderHost, RemoteBuilder, serving
from cudnn_actor.engines.remote.builder_messages import ANSWERS, Build, Built, Busy, Open, Piece, Ready
from cudnn_actor.processes.channel import Channel

from .craft import MAKE_IN_PIECES, PIECES, Craft, PieceCraft, Stage, graph
from .test_remote_builds import GRAPH, ready
from .test_remote_ends import until


class Pieces:
    """A builder of pieces in another process, and the one here that loads them."""

    def __init__(self, stage: Stage, host: BuilderHost) -> None:
        self.local = PieceCraft()
        self.builder = self.with_local(self.local, stage, host)

    @staticmethod
    def with_local(local: Builder, stage: Stage, host: BuilderHost) -> RemoteBuilder:
        builder = RemoteBuilder(MAKE_IN_PIECES, (stage.address,), local, host, renew_after=100)
        builder.open()
        return builder


@pytest.fixture
def pieces(stage: Stage, host: BuilderHost) -> Iterator[Pieces]:
    found = Pieces(stage, host)
    yield found
    found.builder.close()


def test_each_piece_is_loaded_before_the_whole_is_restored(pieces: Pieces, stage: Stage) -> None:
    player = ready(pieces.builder, stage, "go")
    plan = pieces.builder.build(GRAPH, workspace_limit=None, effort="soon")
    assert pieces.local.loaded == [*PIECES]
    player.at("build")
    player.told("go")
    assert pieces.builder.build(GRAPH, workspace_limit=None, effort="behind").tag == plan.tag
    player.told("go", "go", "go")
    pieces.builder.tune(GRAPH, workspace_limit=None, progress=lambda *_: None)
    assert len(pieces.local.loaded) == len(PIECES), "nobody waits for the others"


@pytest.mark.parametrize("command", ["go", "alien", "mute"])
def test_no_piece_is_kept_behind_its_build(pieces: Pieces, stage: Stage, command: str) -> None:
    ready(pieces.builder, stage, command)
    pieces.builder.build(GRAPH, workspace_limit=None)
    assert pieces.local.loaded == [*PIECES]
    assert not pieces.local.held


def test_a_builder_that_loads_no_pieces_needs_none(stage: Stage, host: BuilderHost) -> None:
    builder = Pieces.with_local(Craft(), stage, host)
    player = ready(builder, stage, "go")
    assert builder.build(GRAPH, workspace_limit=None) is not None
    player.at("build")
    builder.close()


def test_a_long_piece_comes_with_the_whole_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, long, last = PIECES
    monkeypatch.setattr(serving, "LONGEST_PIECE", len(long) - 1)
    ours, theirs = (Channel(each, ANSWERS) for each in socket.socketpair())
    for data in PIECES:
        serving.tell_piece(ours, data)
    assert [each.data for each in theirs.receive()] == [first, last]
    ours.close()
    serving.tell_piece(ours, first)
    theirs.close()


def test_a_client_that_is_behind_is_not_waited_for() -> None:
    ours, theirs = (Channel(each, ANSWERS) for each in socket.socketpair())
    sent = 0
    while not ours.backed_up:
        serving.tell_piece(ours, PIECES[1])
        sent += 1
    for _ in range(3):
        serving.tell_piece(ours, PIECES[1])
    heard: list[Piece] = []
    while select.select([theirs], (), (), 0)[0]:
        heard += theirs.receive()
        ours.flush()
    assert len(heard) == sent
    for each in (ours, theirs):
        each.close()


def test_pieces_go_to_the_client_whose_build_they_are_of(
    pieces: Pieces, stage: Stage, host: BuilderHost
) -> None:
    """A build that is waited for begins and ends in the midst of one behind."""
    player = ready(pieces.builder, stage)
    behind, soon = others = [Channel(host.connect(), ANSWERS) for _ in range(2)]
    for other in others:
        other.send(Open(MAKE_IN_PIECES, (stage.address,), 100))
        other.send_all()
        until(other, Ready)
    behind.send(Build(graph(6), None, effort="behind"))
    behind.send_all()
    player.at("build")
    soon.send(Build(graph(5), None, effort="soon"))
    soon.send_all()
    player.told("go")
    player.at("build")
    assert Built not in map(type, until(behind, Busy)), "it waits"
    player.told("go")
    assert Piece not in map(type, until(behind, Built))
    heard = []
    while select.select([soon], (), (), 0)[0]:  # this client's answer came first
        heard += soon.receive()
    assert [each.data for each in heard if isinstance(each, Piece)] == [*PIECES]
    assert Built in map(type, heard)
    for other in others:
        other.close()
