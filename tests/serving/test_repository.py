"""A folder of models: the highest version serves, and what is new is switched in when it is warm."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from cudnn_actor import InvalidRequest, spawn
from cudnn_actor.serving.catalog import Catalog, Origin
from cudnn_actor.serving.failures import NotServed, Refused
from cudnn_actor.serving.model_settings import Batching, Settings, read_settings
from cudnn_actor.serving.served import Served, load
from cudnn_actor.serving.watch import Watch, found_models

from ..inside import gpu_behind
from ..onnx.small_models import FLOAT, model_of, node

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
async def catalog() -> AsyncIterator[Catalog]:
    async with spawn(device="cpu") as gpu:

        async def load_origin(name: str, origin: Origin) -> Served:
            settings = await asyncio.to_thread(read_settings, origin.path.with_name("model.toml"), Settings())
            return await load(gpu, name, origin.path, origin.version, settings, if_possible=False)

        catalog = Catalog(load_origin)
        yield catalog
        await catalog.close()


def put(folder: Path, version: int, op: str = "Mul") -> Path:
    """Write a version of the model `square`, or of one that adds."""
    place = folder / "square" / str(version)
    place.mkdir(parents=True, exist_ok=True)
    dims = {"x": (FLOAT, ("N", 3))}
    onnx.save(model_of([node(op, "x x", "y")], dims, {"y": (FLOAT, ("N", 3))}), place / "model.onnx")
    return place


async def test_a_new_version_is_switched_in_once_two_looks_agree(catalog: Catalog, tmp_path: Path) -> None:
    put(tmp_path, 2)
    watch = Watch(catalog, tmp_path)
    await watch.look(at_once=True)
    _, before = catalog.find("square")
    assert before.version == "2"
    put(tmp_path, 10, "Add")
    await watch.look()
    assert catalog.find("square")[1] is before  # it may still be being copied
    await watch.look()
    _, after = catalog.find("square", "10")
    np.testing.assert_array_equal((await after.run({"x": ROWS}, None))["y"], ROWS + ROWS)
    counted = {each.model for each in gpu_behind(after).metrics().requests}
    assert "square" in counted  # not "model", which is the file's name
    assert "model" not in counted
    with pytest.raises(NotServed, match="but version '10'"):
        catalog.find("square", "2")


async def test_a_changed_file_of_weights_is_loaded(catalog: Catalog, tmp_path: Path) -> None:
    place = tmp_path / "scaled" / "1"
    weights = place / "weights" / "w.data"
    weights.parent.mkdir(parents=True)
    (place / "weights" / "again").symlink_to(weights.parent)  # folders in a circle, and a file that hides
    (place / "elsewhere").symlink_to(tmp_path)
    (place / "to itself").symlink_to("to itself")  # before the folder of weights, in order
    scaled = model_of(
        [node("Mul", "x w", "y")],
        {"x": (FLOAT, ("N", 3))},
        {"y": (FLOAT, ("N", 3))},
        {"w": np.full(3, 2, np.float32)},
    )
    onnx.external_data_helper.set_external_data(scaled.graph.initializer[0], "weights/w.data")
    scaled.graph.initializer[0].ClearField("raw_data")
    onnx.save(scaled, place / "model.onnx")
    weights.write_bytes(np.full(3, 2, np.float32).tobytes())
    watch = Watch(catalog, tmp_path)
    await watch.look(at_once=True)
    _, before = catalog.find("scaled")
    np.testing.assert_array_equal((await before.run({"x": ROWS}, None))["y"], 2 * ROWS)
    (place / ".w.data.swp").touch()
    for _ in range(3):
        await watch.look()
    assert catalog.find("scaled")[1] is before
    weights.with_name("new").write_bytes(np.full(3, 5, np.float32).tobytes())
    weights.with_name("new").replace(weights)
    await watch.look()
    assert catalog.find("scaled")[1] is before  # it may still be being copied
    await watch.look()
    _, after = catalog.find("scaled")
    np.testing.assert_array_equal((await after.run({"x": ROWS}, None))["y"], 5 * ROWS)


async def test_a_file_that_cannot_be_loaded_leaves_the_old_version_at_work(
    catalog: Catalog, tmp_path: Path
) -> None:
    put(tmp_path, 1)
    watch = Watch(catalog, tmp_path)
    await watch.look(at_once=True)
    (put(tmp_path, 2) / "model.onnx").write_bytes(b"no model")
    await watch.look()
    await watch.look()
    entry, served = catalog.find("square")
    assert served.version == "1"
    assert "cannot be loaded" in entry.reason
    (tmp_path / "square" / "1" / "model.onnx").unlink()
    (tmp_path / "square" / "2" / "model.onnx").unlink()
    await watch.look()
    with pytest.raises(NotServed, match="unknown"):
        catalog.find("square")


async def test_what_was_unloaded_stays_so_until_it_is_loaded(catalog: Catalog, tmp_path: Path) -> None:
    put(tmp_path, 1)
    watch = Watch(catalog, tmp_path)
    await watch.look(at_once=True)
    await catalog.unload("square")
    await watch.look()
    with pytest.raises(NotServed, match="not loaded"):
        catalog.find("square")
    await catalog.load("square")
    assert catalog.find("square")[1].version == "1"


async def test_model_toml_says_how_batches_are_formed(catalog: Catalog, tmp_path: Path) -> None:
    place = put(tmp_path, 1)
    (place / "model.toml").write_text("[batch]\nsizes = [1, 4]\ndelay_us = 500\n")
    await Watch(catalog, tmp_path).look(at_once=True)
    config = catalog.find("square")[1].config("square")
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"] == {
        "preferred_batch_size": [1, 4],
        "max_queue_delay_microseconds": 500,
    }


async def test_model_toml_says_in_which_dtype_a_model_computes(catalog: Catalog, tmp_path: Path) -> None:
    weights = np.float32(1.01) * np.eye(3, dtype=np.float32)
    narrow = weights.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (np.diag(weights) != np.diag(narrow)).all()
    dims = (FLOAT, ("N", 3))
    model = model_of([node("MatMul", "x w", "y")], {"x": dims}, {"y": dims}, {"w": weights})
    watch = Watch(catalog, tmp_path)
    for version, text, expected in ((1, "", weights), (2, 'dtype = "bfloat16"\n', narrow)):
        place = put(tmp_path, version)
        onnx.save(model, place / "model.onnx")
        (place / "model.toml").write_text(text)
        await watch.look(at_once=True)
        _, served = catalog.find("square", str(version))
        np.testing.assert_array_equal(
            (await served.run({"x": np.eye(3, dtype=np.float32)}, None))["y"], expected
        )


@pytest.mark.parametrize(
    "text", ["[dims]\nN = 2\nL = [3, 5]\n", "[batch]\nsizes = [2]\n[dims]\nL = [3, 5]\n"]
)
async def test_model_toml_says_which_dims_are_warmed(text: str, catalog: Catalog, tmp_path: Path) -> None:
    place = put(tmp_path, 1)
    dims = ("N", "L")
    model = model_of([node("Mul", "x x", "y")], {"x": (FLOAT, dims)}, {"y": (FLOAT, dims)})
    onnx.save(model, place / "model.onnx")
    (place / "model.toml").write_text(text)
    await Watch(catalog, tmp_path).look(at_once=True)
    warmed = catalog.find("square")[1].model
    assert await warmed.warm(N=2, L=(3, 5)) == 0
    assert await warmed.warm(N=2, L=4) == 1


def test_the_model_toml_of_the_page_is_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "serving.md"
    [text] = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path / "model.toml"
    path.write_text(text)
    batch = Batching(sizes=(1, 4, 16), max_delay_us=1000)
    shown = Settings(dtype="bfloat16", tune="cached", batch=batch, dims={"L": (128, 512)})
    assert read_settings(path, Settings()) == shown
    text, replaced = re.subn(r"^sizes = .*# or: (.*)$", r"\1", text, flags=re.MULTILINE)
    assert replaced == 1
    path.write_text(text)
    assert read_settings(path, Settings()).batch == Batching(max=16, max_delay_us=1000)


@pytest.mark.parametrize(
    "text", ["batches = 3", "[batch]\nmost = 2", "dtype = 'int8'", "= 1", "[batch]\nmax='x'"]
)
def test_a_model_toml_with_anything_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(Refused, match=r"model\.toml is not valid"):
        read_settings(path, Settings())
    assert read_settings(tmp_path / "none.toml", Settings(batch=Batching(max=2))).batch == Batching(max=2)


def test_names_and_versions_that_are_none_are_skipped(tmp_path: Path) -> None:
    for name, version in (("a", "1"), ("a", "02"), ("a", "x"), (".hidden", "1"), ("b c", "1"), ("d", "3")):
        place = tmp_path / name / version
        place.mkdir(parents=True)
        (place / "model.onnx").touch()
    (tmp_path / "d" / "7").mkdir()  # nothing in it yet
    assert {name: each.version for name, each in found_models(tmp_path).items()} == {"a": "1", "d": "3"}


async def test_the_name_of_a_model_is_text(catalog: Catalog, tmp_path: Path) -> None:
    origin = Origin(put(tmp_path, 1) / "model.onnx", "1")
    catalog.add(3, origin)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="name"):
        await catalog.load(3, origin)  # type: ignore[arg-type]


class Unforeseen(Exception):
    """What no code of the watch expects."""


async def test_the_watch_goes_on_after_an_error_that_nobody_foresaw(tmp_path: Path) -> None:
    loads: asyncio.Queue[str] = asyncio.Queue()

    async def load_origin(name: str, origin: Origin) -> Served:
        loads.put_nowait(origin.version)
        raise Unforeseen

    watching = asyncio.ensure_future(Watch(Catalog(load_origin), tmp_path).keep_looking(0.0))
    for version in (1, 2):
        put(tmp_path, version)
        assert await asyncio.wait_for(loads.get(), 60) == str(version)
        assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_model_that_is_removed_while_it_is_loaded_is_freed(tmp_path: Path) -> None:
    place = put(tmp_path, 1)
    origin, lent = Origin(place / "model.onnx", "1"), list[tuple[str, bool]]()
    loading, goes_on = asyncio.Event(), asyncio.Event()
    goes_on.set()
    async with spawn(device="cpu") as gpu:

        async def load_origin(name: str, origin: Origin) -> Served:
            served = await load(gpu, name, origin.path, origin.version, Settings(), if_possible=False)
            versions.append(served)
            loading.set()
            await goes_on.wait()
            return served

        versions = list[Served]()
        catalog = Catalog(load_origin, lambda name, model: lent.append((name, model is not None)))
        catalog.add("square", origin)
        await catalog.load("square")
        loading.clear()
        goes_on.clear()
        again = asyncio.ensure_future(catalog.load("square"))
        after_it = asyncio.ensure_future(catalog.unload("square"))
        await loading.wait()
        catalog.remove("square")
        added = catalog.add("square", origin)
        goes_on.set()
        for each in (again, after_it):
            with pytest.raises(NotServed, match="was removed"):
                await each
        assert (added.wanted, added.served) == (True, None)
        assert lent == [("square", True), ("square", False)]
        await catalog.close()
        for served in versions:
            with pytest.raises(InvalidRequest, match="closed"):
                await served.run({"x": ROWS}, None)


async def test_closing_cancels_loads_under_way_and_frees_what_they_made(tmp_path: Path) -> None:
    origin = Origin(put(tmp_path, 1) / "model.onnx", "1")
    loading, never, made = asyncio.Event(), asyncio.Event(), list[Served]()
    async with spawn(device="cpu") as gpu:

        async def load_origin(name: str, origin: Origin) -> Served:
            served = await load(gpu, name, origin.path, origin.version, Settings(), if_possible=False)
            made.append(served)
            loading.set()
            try:
                await never.wait()
            except asyncio.CancelledError:
                if name == "cancelled":
                    await served.close()
                    raise
            return served  # it was warm before it could be cancelled

        catalog = Catalog(load_origin)
        loads = []
        for name in ("cancelled", "late"):
            catalog.add(name, origin)
            loading.clear()
            loads.append(asyncio.ensure_future(catalog.load(name)))
            await loading.wait()
        loads.append(asyncio.ensure_future(catalog.load("late")))
        await asyncio.sleep(0)  # it waits for the one before
        await catalog.close()
        assert all(each.done() for each in loads)
        for each in loads:
            with pytest.raises(NotServed, match="was removed"):
                await each
        for served in made:
            with pytest.raises(InvalidRequest, match="closed"):
                await served.run({"x": ROWS}, None)
        assert list(catalog.entries) == []


async def test_a_caller_that_is_cancelled_cancels_its_load(tmp_path: Path) -> None:
    origin, loading, ended = Origin(tmp_path, "1"), asyncio.Event(), asyncio.Event()

    async def load_origin(name: str, origin: Origin) -> Served:
        loading.set()
        try:
            return await asyncio.Future[Served]()
        finally:
            ended.set()

    catalog = Catalog(load_origin)
    catalog.add("square", origin)
    caller = asyncio.ensure_future(catalog.load("square"))
    await loading.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    assert catalog.entry("square").state == "UNAVAILABLE"
    await catalog.close()


async def test_a_caller_that_is_cancelled_as_its_load_ends_leaves_no_model(tmp_path: Path) -> None:
    origin, made = Origin(put(tmp_path, 1) / "model.onnx", "1"), list[Served]()
    async with spawn(device="cpu") as gpu:

        async def load_origin(name: str, origin: Origin) -> Served:
            served = await load(gpu, name, origin.path, origin.version, Settings(), if_possible=False)
            made.append(served)
            asyncio.get_running_loop().call_soon(caller.cancel)  # after this ends, before the caller knows
            return served

        catalog = Catalog(load_origin)
        catalog.add("square", origin)
        caller = asyncio.ensure_future(catalog.load("square"))
        with pytest.raises(asyncio.CancelledError):
            await caller
        await catalog.close()
        with pytest.raises(InvalidRequest, match="closed"):
            await made[0].run({"x": ROWS}, None)
