"""The floor of a request, two devices, builds and networks, measured for a moment on the CPU engine."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.table import Table

from benchmarks import building, floor, two_gpus
from benchmarks.against import environment
from benchmarks.placement import placements, sweep
from benchmarks.recording import Row, attempted, keep
from benchmarks.relayed import Relayed
from benchmarks.stages import stages_of
from benchmarks.uploads import ratios_of
from cudnn_actor.engines.cuda.planning.partition import cut

from .running import measured


def recorded(name: str, words: str, tmp_path: Path) -> tuple[str, bytes]:
    """What a benchmark prints, and what it writes."""
    out = tmp_path / "out.json"
    _, printed = measured(name, f"{words} --rounds 1 --seconds 0.1", out)
    return printed, out.read_bytes()


def found_by(name: str, words: str, tmp_path: Path) -> list[dict[str, Any]]:
    """The rows that a benchmark writes."""
    measured(name, words, tmp_path)
    return rows_of(name, tmp_path)


def rows_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of the one record in a folder."""
    (written,) = folder.glob(f"{name}-*.json")
    rows: list[dict[str, Any]] = json.loads(written.read_text())["found"]
    return rows


def test_the_floor_is_measured_beside_a_ping_and_a_convolution(tmp_path: Path) -> None:
    printed, written = recorded("floor", "", tmp_path)
    report = msgspec.json.decode(written, type=floor.Report)
    assert {"floor", "ping", "convolution", "ping, one", "ping, one, shared"} <= set(report.costs)
    assert all(
        cost.per_s[0] > 0 and cost.loop_us[0] > 0 and cost.other_us[0] > 0 for cost in report.costs.values()
    )
    assert all(name in printed for name in report.costs)


def test_two_devices_are_measured_alone_and_together_and_with_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_gpus, "_KILLED_AFTER_S", 0.1)
    monkeypatch.setattr(two_gpus, "_PAUSE_S", 0.1)
    printed, written = recorded("two_gpus", "--devices cpu cpu --kills 1", tmp_path)
    report = msgspec.json.decode(written, type=two_gpus.Report)
    for found in (report.one_loop, report.two_loops):
        assert {*found.alone, *found.both} == {"left", "right"}
    assert len(report.kills.behind_ms) == len(report.kills_frozen.behind_ms) == 1
    assert "behind a kill" in printed


def test_a_transformer_of_images_is_measured_with_its_slowest_pieces(tmp_path: Path) -> None:
    words = "--device cpu --small --batches 2"
    _, printed = measured("vit", words, tmp_path)
    rows = rows_of("vit", tmp_path)
    assert [row["isolation"] for row in rows] == ["thread", "process"]
    for row in rows:
        assert min(row["run_us"], row["on_device_us"]["p50"], row["numpy_us"]["p50"]) > 0
        assert len(row["slowest"]) == 10
    assert "ViT in bfloat16" in printed


def test_batched_clients_are_measured_beside_fixed_batches(tmp_path: Path) -> None:
    words = "--device cpu --small --clients 8 --max-batch 2 --seconds 0.05"
    _, printed = measured("batching", words, tmp_path)
    rows = rows_of("batching", tmp_path)
    fixed = [f"batch {batch}, {tasks} in flight" for batch in (1, 2) for tasks in (1, 2)]
    assert [row["what"] for row in rows] == 2 * [*fixed, "8 clients"]
    for row in rows:
        assert row["pictures_per_s"] > 0
    for clients in rows[4::5]:
        assert min(clients["of_the_best"], clients["p99_by_p50"], clients["mean_batch"]) > 0
    assert "of the best fixed" in printed


@pytest.fixture(scope="module")
def clients_of_servers() -> None:
    """The imports of the benchmark's clients, before a test begins: what they open stays open."""
    importlib.import_module("tests.serving.servers")


@pytest.mark.usefixtures("clients_of_servers")
def test_each_way_into_the_inference_server_is_measured(tmp_path: Path) -> None:
    words = "--network small --clients 4 --max-batch 2 --rounds 1 --seconds 0.05"
    rows = found_by("serving", words, tmp_path)
    ways = [
        "in process",
        "attached",
        "HTTP, binary",
        "gRPC",
        "gRPC, shared memory",
        "a no-op grpc.aio server",
    ]
    assert [row["way"] for row in rows] == ways
    assert all(row["requests_per_s"] > 0 for row in rows)


async def test_a_floor_without_its_processes_raises() -> None:
    relayed = Relayed("relay")
    await relayed.ask()
    os.kill(relayed.relay_pid, signal.SIGSTOP)  # so the next request stays without an answer
    asking = asyncio.ensure_future(relayed.ask())
    await asyncio.sleep(0)
    os.kill(relayed.relay_pid, signal.SIGKILL)
    with pytest.raises(ConnectionError):
        await asking
    relayed.close()


def test_an_attached_process_is_measured_beside_the_floor_and_stage_by_stage(tmp_path: Path) -> None:
    rows = found_by("attached", "--rounds 1 --count 128", tmp_path)
    alone = {row["way"]: row["us"] for row in rows if row["what"] == "one at a time"}
    above = {row["way"]: row["us"] for row in rows if row["what"] == "above"}
    below = {"floor: relay": "floor: direct", "attached": "in process"}
    assert all(above[way] == pytest.approx(alone[way] - alone[than], abs=0.2) for way, than in below.items())
    stages = {row["way"]: row["stages_us"] for row in rows if row["what"] == "stages"}
    assert set(stages) == {"floor: direct", "floor: relay", "in process", "attached", "attached, asleep"}
    assert "relay: awake for the answer" in stages["floor: relay"]
    assert {"server: its turn", "worker: request read"} <= set(stages["attached"])


@pytest.mark.parametrize(
    "members", ["", " --ran-ms 1 --dtype float16 --busy-us 1", " --ran-ms 1 --dtype float16 --per-s 100"]
)
def test_the_caller_of_a_pool_is_measured(tmp_path: Path, members: str) -> None:
    words = "--members 1 --image 8 --batch 2 --callers 4 --rounds 1 --seconds 0.05" + members
    (row,) = found_by("pool_loop", words, tmp_path)
    assert min(row["per_s"], row["loop_us"], row["batch"]) > 0


def test_a_call_by_a_pool_is_measured_beside_one_by_a_members_handle(tmp_path: Path) -> None:
    words = "--callers 16 --rounds 1 --requests 64 --counted 256 --functions 1"
    found = found_by("pool_requests", words, tmp_path)
    assert [row["way"] for row in found] == ["attached", "submit", "asyncio alone", "call"]
    assert all(min(row["loop_us"], row["ratio"], row["instructions"]) > 0 for row in found)


def test_what_a_killed_client_had_is_freed_and_how_soon_is_measured(tmp_path: Path) -> None:
    found = found_by("killed_clients", "--kills 1", tmp_path)
    assert [row["isolation"] for row in found] == ["process", "thread"]
    assert all(row["longest_ms"] > 0 and row["live_bytes"] > 64 << 20 for row in found)


def test_processes_that_share_a_service_are_loaded_while_its_worker_and_a_client_are_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("uvicorn", reason="it is in the group `test`")
    weights, *rows = found_by("shared_service", "--kills 1 --seconds 0.1 --standby 0 --callers 2", tmp_path)
    assert weights["weight_bytes"] <= weights["one_client"] <= weights["all_clients"]
    assert weights["all_clients"] < 2 * weights["weight_bytes"]
    assert [(row["what"], row["kills"]) for row in rows] == [("worker killed", 1), ("client killed", 1)]
    assert all(row["answered"] > 0 and row["failed"] == row["wrong"] == 0 for row in rows)


def test_builds_are_measured_for_each_size_and_recorded(tmp_path: Path) -> None:
    measured("building", "--dry-run", tmp_path)
    (written,) = tmp_path.glob("building-*.json")
    record = json.loads(written.read_text())
    assert record["dry_run"]
    assert [row["operations"] for row in record["found"]["graphs"]] == [10, 20]
    assert list(record["found"]["batches"][0]["build_ms"]) == ["4", "2", "3"]


def test_networks_are_imported_run_and_recorded(tmp_path: Path) -> None:
    words = "--networks whisper_encoder --batches 2 --runs 1"
    found = found_by("models", words, tmp_path)
    assert [(row["network"], row["batch"]) for row in found] == [("whisper_encoder", 2)]
    for name in ("load_ms", "import_ms", "first_ms", "run_ms", "stored_first_ms"):
        assert all(row[name] > 0 for row in found)


def test_networks_whose_plans_are_built_beforehand_have_no_cold_start(tmp_path: Path) -> None:
    words = "--networks whisper_encoder:1,2 --prepared --tune --runs 1 --sides service"
    found = found_by("models", words, tmp_path)
    assert [row["batch"] for row in found] == [1, 2]
    for row in found:
        assert "first_ms" not in row
        assert min(row["stored_first_ms"], row["tune_s"], row["device_ms"], row["tuned_device_ms"]) > 0


def test_requests_of_models_are_taken_apart_stage_by_stage(tmp_path: Path) -> None:
    words = "--device cpu --networks whisper_encoder --runs 5 --batch 2 --seconds 0.01"
    process, thread = found_by("stages", words, tmp_path)
    for row, isolation in ((process, "process"), (thread, "thread")):
        assert (row["network"], row["isolation"], row["batch"]) == ("whisper_encoder", isolation, 2)
        assert row["per_s"].keys() == {
            f"{way}, {count}" for way in ("numpy", "staging") for count in (1, 2, 3)
        }
        assert min(row["device_us"], row["device_per_s"], *row["per_s"].values()) > 0
        assert all(row[way]["p90"] >= row[way]["p50"] > 0 for way in ("request_us", "numpy_us"))
    assert not {"stages_us", "floor_us"} & thread.keys()
    floors = process["floor_us"]
    assert floors.pop("device_us") > 0
    callers, others = ("sleeps", "polls", "loop"), ("sleeps", "polls")
    assert floors.keys() == {f"{caller}, {other}" for caller in callers for other in others}
    stages = list(process["stages_us"])
    expected = ["checked", "in the mailbox", "request encoded", "worker: request read", "worker: run begins"]
    expected += ["worker: run enqueued", "worker: answer made", "worker: answer encoded", "answer read"]
    assert [each for each in stages if each in expected] == expected
    assert stages[-1] == "next asked"


def test_uploads_are_timed_beside_the_least_design(tmp_path: Path) -> None:
    process, thread = found_by("uploads", "--device cpu --mebibytes 1 --seconds 0", tmp_path)
    ours = {"upload", "upload again", "staging", "staging, pipelined", "download"}
    assert process["gb_per_s"].keys() == ours | {"floor", "floor, polls"}
    assert thread["gb_per_s"].keys() == ours
    assert min(process["gb_per_s"].values()) > 0


def test_an_upload_is_compared_with_the_ways_that_were_timed() -> None:
    assert ratios_of({"upload": 6.0, "pageable up": 8.0, "download": 5.0}) == {"up": 0.75}


def test_requests_are_taken_apart_for_each_placement_on_cores(tmp_path: Path) -> None:
    words = "--device cpu --networks whisper_encoder --runs 5 --services 2"
    found = found_by("placement", words, tmp_path)
    assert {row["service"] for row in found} == {1, 2}
    assert [row["placement"] for row in found if row["service"] == 1][:2] == ["free", "free"]
    for row in found:
        assert row["request_us"]["p50"] > 0
        assert row["numpy_us"]["p50"] > 0
        runs = 2 if row["placement"] == "sweep" else 5
        assert sum(row["caller"]["cpus"].values()) == sum(row["worker"]["cpus"].values()) == 2 * runs
        assert "worker: request read" in row["stages_us"]


def test_turns_of_loops_are_timed_beside_their_bodies(tmp_path: Path) -> None:
    words = "--device cpu --isolations thread --units 8 --turns 5 --rounds 1"
    found = found_by("loops", words, tmp_path)
    assert [row["kind"] for row in found] == ["carried", "rows", "condition", "rows and condition"]
    assert all(min(row["turn_us"], row["body_us"]) > 0 for row in found)


def test_blocking_calls_are_timed_beside_asyncio_and_pykka(tmp_path: Path) -> None:
    words = "--rounds 1 --count 64"
    found = found_by("blocking_calls", words, tmp_path)
    assert {row["isolation"] for row in found} == {"thread", "process"}
    assert len(found) == 12
    assert all(row["us"] > 0 for row in found)


def test_counting_is_timed_beside_requests_that_are_not_counted(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="it is in the group `test`")
    words = "--rounds 1 --count 64"
    found = found_by("metrics_cost", words, tmp_path)
    assert [row["isolation"] for row in found] == ["thread", "process"]
    assert all(min(row["counting_us"], row["without_us"], row["scrape_us"]) > 0 for row in found)


def test_two_threads_are_placed_on_one_core_on_two_and_on_two_nodes() -> None:
    cores, nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}, {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    assert placements([0, 1, 2, 3, 4, 5], cores, nodes) == {
        "one core": (0, 1),
        "two cores": (0, 2),
        "two nodes": (0, 4),
        "two nodes, exchanged": (4, 0),
    }
    assert placements([0, 2], cores, nodes) == {"two cores": (0, 2)}
    assert placements([3], cores, nodes) == {}
    assert sweep([0, 2, 4, 6]) == [(4, 0), (6, 2), (0, 4), (2, 6)]
    assert len(sweep(range(64))) == 16
    assert sweep([3]) == []


def test_stages_are_medians_of_the_requests_that_reach_them() -> None:
    stamps = [(0, "asked"), (7_000, "read"), (2_000, "sent"), (10_000, "asked"), (14_000, "sent")]
    stamps += [(15_000, "sent"), (19_000, "read"), (30_000, "asked"), (99_000, "read")]
    assert stages_of(stamps) == {"sent": 3.0, "read": 8.0, "next asked": 15.0}
    assert list(stages_of(stamps)) == ["sent", "read", "next asked"]


def test_what_was_found_before_the_end_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that fails does not end the others; SIGTERM ends them all, and what was found is there."""

    def rows() -> Iterator[Row]:
        yield {"part": "one"}
        yield from attempted("two", lambda: [{"part": 1 // 0}])
        yield {"part": "three"}
        os.kill(os.getpid(), signal.SIGTERM)
        yield {"part": "four"}

    def sheet(found: list[Row]) -> Table:
        table = Table("part")
        for row in found:
            table.add_row(row["part"])
        return table

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            keep(rows(), sheet, tmp_path / "new", "test", versions={})
    finally:
        signal.signal(signal.SIGTERM, before)
    (path,) = (tmp_path / "new").iterdir()
    found = json.loads(path.read_text())["found"]
    assert [row["part"] for row in found] == ["one", "two", "three"]
    printed = capsys.readouterr().out
    assert [line.strip("│ ") for line in printed.splitlines() if line[:1] == "│"] == ["one", "three"]
    assert "failed: two: ZeroDivisionError" in printed


def test_another_checkout_comes_first_and_installed_packages_are_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/packages", "/new"]))
    assert environment(tmp_path)["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/packages", "/new"]


@pytest.mark.parametrize("count", building.COUNTS)
def test_pieces_of_equal_layers_are_equal(count: int) -> None:
    parts = cut(building.chain(count).body)
    assert parts is not None
    assert len({piece.graph.digest() for piece in parts.pieces}) == 3
