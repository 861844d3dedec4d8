"""Options of `spawn`: bad ones are named at once, before anything starts."""

from __future__ import annotations

import asyncio
import inspect
import os
import pydoc
import re
import threading
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from cudnn_actor import Fault, FaultPlan, InvalidRequest, child_spec, spawn, start
from cudnn_actor.options import Isolation, Options
from cudnn_actor.service import Spawning

from ..patience import PATIENCE_S
from .rigs import Trio

BAD: list[tuple[str, Any]] = [
    ("device", "tpu"),
    ("device", "cuda:0"),
    ("device", None),
    ("isolation", "fork"),
    ("isolation", True),
    ("faults", "sticky"),
    ("mailbox", 0),
    ("mailbox", 1.5),
    ("mailbox", True),
    ("max_restarts", -1),
    ("max_restarts", None),
    ("period_s", 0),
    ("period_s", float("inf")),
    ("period_s", "60"),
    ("hang_after_s", -1),
    ("hang_after_s", float("nan")),
    ("hang_after_s", True),
    ("hang_after_s", 10**400),
    ("hang_after_s", 1e300),
    ("workspace_limit", 0),
    ("graph_limits", 5),
    ("threads", 0),
    ("threads", 257),
    ("memory_limit", -1),
    ("memory_limit", (2 << 20) - 1),
    ("memory_limit", 1e9),
    ("memory_limit", 1 << 70),
    ("standby", 2),
    ("standby", -1),
    ("standby", True),
    ("verify", 1),
    ("verify", None),
    ("plan_store", ""),
    ("plan_store", 7),
    ("plan_store", b"plans"),
    ("plan_store", "pl\0ans"),
    ("executable", 7),
    ("executable", b"python"),
    ("executable", ""),
    ("executable", "/nowhere/python"),
    ("executable", os.curdir),
    ("executable", __file__),
    ("autotune", 1),
    ("autotune", None),
    ("mail_box", 10),
    ("on_give_up", "restart"),
    ("on_give_up", None),
    ("on_give_up", 70),
    ("on_give_up", asyncio.sleep),
    ("name", ""),
    ("name", 3),
    ("name", "two\nlines"),
    ("name", "n" * 101),
]


BAD_BY_WAY: list[tuple[Any, str, Any]] = [(child_spec, *bad) for bad in BAD]
BAD_BY_WAY += [(way, *bad) for way in (spawn, start) for bad in BAD[:4]]  # `Options` checks all of them


def _made(way: Any, options: dict[str, Any]) -> None:
    """Make a service; where its driver is asked only when it starts, start it too."""
    made = way(**options)
    if options["device"] == "cuda:0" and isinstance(made, Spawning):
        asyncio.run(_started(made))


async def _started(spawning: Spawning) -> None:
    await spawning


@pytest.mark.parametrize(("way", "name", "value"), BAD_BY_WAY)
def test_a_bad_option_is_named_and_nothing_is_started(way: Any, name: str, value: Any) -> None:
    threads = threading.active_count()
    with pytest.raises(InvalidRequest) as caught:
        _made(way, {"device": "cpu", name: value})
    assert caught.value.field == name
    assert caught.value.fix in str(caught.value)
    for thread in threading.enumerate():
        if thread.name == "engine_for":
            thread.join(PATIENCE_S)  # it has answered, and has not ended yet
    assert threading.active_count() == threads


@pytest.mark.parametrize(("name", "least"), [("mailbox", 1), ("memory_limit", 2 << 20), ("max_restarts", 0)])
def test_a_whole_number_of_more_than_64_bits_is_told_the_range(name: str, least: int) -> None:
    options: dict[str, Any] = {"device": "cpu", name: 10**30}
    with pytest.raises(
        InvalidRequest, match=rf"must be a whole number( of bytes)? from {least} to 2\*\*63 - 1;"
    ):
        spawn(**options)


@pytest.mark.parametrize("name", ["memory_limit", "workspace_limit", "cache_limit"])
def test_a_limit_of_bytes_is_told_how_they_are_written(name: str) -> None:
    options: dict[str, Any] = {"device": "cpu", name: "1GB"}
    with pytest.raises(InvalidRequest, match=r"a whole number of bytes from .*; .* as in 1 << 30$"):
        spawn(**options)


def test_a_device_that_is_none_is_told_all_that_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r'use "auto", "cpu", "cuda" or "cuda:0"$'):
        spawn(device="gpu")


MISSPELT: list[tuple[str, Any, str]] = [
    ("mail_box", 10, "mailbox"),
    ("max_restart", 1, "max_restarts"),
    ("isolation", "tread", "thread"),
    ("isolation", "Process", "process"),
    ("device", "cuda0", "cuda:0"),
    ("device", "gpu", "cuda:0"),
    ("device", "GPU:1", "cuda:0"),
]


@pytest.mark.parametrize(("name", "value", "meant"), MISSPELT)
@pytest.mark.parametrize("way", [spawn, start, child_spec])
def test_a_misspelt_word_is_told_which_was_meant(way: Any, name: str, value: Any, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f'did you mean "{meant}"\\?') as caught:
        way(**{"device": "cpu", name: value})
    assert f"{name}={value!r}: " in str(caught.value)


# What the three functions show.

WAYS = pytest.mark.parametrize(
    ("way", "own"), [(spawn, []), (start, ["parent"]), (child_spec, ["id", "restart"])]
)


@WAYS
def test_the_signature_has_every_option_by_name_with_its_default(way: Any, own: list[str]) -> None:
    shown = dict(inspect.signature(way).parameters)
    others = {name: shown.pop(name) for name in own}
    assert list(shown) == list(Options.__struct_fields__)
    for field in msgspec.structs.fields(Options):
        assert shown[field.name].default == field.default
        assert shown[field.name].kind is inspect.Parameter.KEYWORD_ONLY
    assert shown["isolation"].annotation == Literal["process", "thread"] | None
    assert all(each.default is not inspect.Parameter.empty for each in others.values())


@WAYS
def test_help_shows_every_option_and_what_it_means(way: Any, own: list[str]) -> None:
    text = pydoc.plain(pydoc.render_doc(way))
    head, _, meanings = text.partition("Parameters")
    for name in (*own, *Options.__struct_fields__):
        assert re.search(rf"\b{name}: ", head), "in the signature"
        assert re.search(rf"^ *([a-z_]+, )*{name}(, [a-z_]+)*$", meanings, re.MULTILINE), "with its meaning"
    assert "**options" not in text
    assert meanings.count("Parameters\n") == 0, "all in one section"
    assert "Raises" in meanings


def test_a_service_is_called_what_its_name_says_and_a_child_its_id() -> None:
    for name, called in ((None, "cudnn"), ("left", "left")):
        service = start(device="cpu", name=name)
        assert service.name == called
        service.stop()
    for name, called in ((None, "a"), ("b", "b"), ("cudnn", "cudnn")):
        spec, service = child_spec("a", device="cpu", name=name)
        assert (spec.policy.id, service.name) == ("a", called)
        service.stop()


NEEDS_A_PROCESS: list[tuple[str, Any]] = [
    ("standby", 1),
    ("verify", True),
    ("faults", FaultPlan().at(1, Fault.KILL)),
]


@pytest.mark.parametrize(("name", "value"), NEEDS_A_PROCESS)
def test_what_only_a_process_can_do_is_refused_with_a_thread(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="needs a worker process") as caught:
        child_spec(device="cpu", isolation="thread", **{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(("name", "value"), NEEDS_A_PROCESS)
def test_it_chooses_a_process_where_the_choice_is_left(name: str, value: Any) -> None:
    _, service = child_spec(device="cpu", **{name: value})
    assert service.isolation == "process"
    service.stop()


def test_without_it_the_cpu_is_served_on_a_thread_unless_a_process_is_asked_for() -> None:
    ways: list[tuple[Isolation | None, Isolation]] = [
        (None, "thread"),
        ("thread", "thread"),
        ("process", "process"),
    ]
    for asked, given in ways:
        _, service = child_spec(device="cpu", isolation=asked)
        assert service.isolation == given
        service.stop()


async def test_a_service_in_a_process_says_which_and_one_on_a_thread_says_none() -> None:
    pids = []
    for isolation in ("process", "thread"):
        async with spawn(device="cpu", isolation=isolation) as gpu:
            pids.append(gpu.worker_pid)
        pids.append(gpu.worker_pid)
    assert pids[0] not in (None, os.getpid())
    assert pids[1:] == [None] * 3


async def test_a_kill_that_is_scripted_strikes_the_worker_and_the_request_is_answered() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(4, Fault.KILL)) as gpu:
        trio = await Trio.on(gpu)
        assert (await gpu.ask(trio.product())).generation == 2
        assert await trio.result() == 6.0


def test_options_have_no_places_only_names() -> None:
    untyped: Any = spawn
    with pytest.raises(TypeError, match='by name, as in device="cpu"'):
        untyped("cpu")


@pytest.mark.parametrize("given", ["plans", Path("plans")], ids=repr)
async def test_a_plan_store_and_autotuning_change_nothing_on_the_cpu(
    given: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with spawn(device="cpu", plan_store=given, autotune=True) as gpu:
        trio = await Trio.on(gpu)
        assert await gpu.warm([trio.product()]) == 1
        await gpu.ask(trio.product())
        assert await trio.result() == 6.0
    assert os.listdir(tmp_path) == []


def test_the_plan_store_is_where_the_option_says() -> None:
    _, service = child_spec(device="cpu", plan_store="plans", autotune=True)
    assert service.state.plan_store is not None
    assert service.state.plan_store.directory == os.path.abspath("plans")
    assert service.state.autotune
    service.stop()


async def test_the_limits_of_waiting_are_accepted() -> None:
    async with spawn(device="cpu", hang_after_s=threading.TIMEOUT_MAX, period_s=1e300, max_restarts=0) as gpu:
        assert await gpu.ping() == 1


def test_a_parent_that_is_no_actor_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidRequest, match=r"^parent=3: is not a pykka.ActorRef"):
        start(device="cpu", parent=3)  # type: ignore[arg-type]
