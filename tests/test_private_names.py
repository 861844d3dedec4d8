"""Tests use what users use. These use private names of the product, so often: the numbers only fall."""

from __future__ import annotations

from pathlib import Path

from .private_names import private_names
from .test_packages import ROOT

TESTS = ROOT / "tests"
ALLOWED = {
    "the place that reaches behind handles for all other tests": {"inside.py": 10},
    "the guards against leaks, which look at every descriptor, child and block of staging memory": {
        "conftest.py": 11,
        "staging_use.py": 2,
    },
    "a server's sessions and a client's link, which no handle shows: what each keeps, and lies to them": {
        "attached/test_copies.py": 4,
        "attached/test_deadlines.py": 4,
        "attached/test_known_graphs.py": 16,
        "attached/test_asking_again.py": 2,
        "attached/test_moves.py": 1,
        "attached/test_seam.py": 1,
        "attached/test_served_models.py": 6,
        "attached/test_sessions.py": 2,
        "attached/test_shared_segments.py": 4,
        "cli/test_chaos_attached.py": 3,
        "pool/test_shared_weights.py": 2,
    },
    "a lock, an owner or a step of a thread, at which another one is to come": {
        "actors/test_waiting_for_messages.py": 2,
        "blocking/test_threads.py": 5,
        "engines/fast/test_lanes.py": 3,
        "engines/test_device_memory.py": 3,
        "isolation/test_one_at_the_host.py": 3,
        "isolation/test_socket_owner.py": 1,
        "isolation/test_standby.py": 2,
        "isolation/test_want_of_memory.py": 2,
        "service/fork_programs.py": 5,
        "service/test_batched_misfits.py": 1,
        "service/test_batched_models.py": 2,
        "service/test_closed_loops.py": 2,
        "service/test_several_lives.py": 2,
    },
    "how long an isolation waits and what it has noted, which only its supervisor asks for": {
        "service/noticed_hangs.py": 17,
    },
    "what is kept, and how much of it: no public number says so": {
        "benchmarks/test_serving_torch.py": 1,
        "engines/fast/test_by_definition.py": 4,
        "isolation/test_launching.py": 1,
        "pool/test_pool.py": 6,
        "ray/scenarios.py": 3,
    },
    "one step by itself, of a class whose whole has tests of its own": {
        "cli/test_chaos_model.py": 1,
        "cli/test_command_line.py": 1,
        "cli/test_doctor.py": 2,
        "cli/test_top.py": 1,
        "isolation/test_channel_reading.py": 1,
        "isolation/test_inbox.py": 1,
        "isolation/test_long_frames.py": 1,
        "isolation/test_worker_host.py": 1,
        "memory/test_ready_slots.py": 1,
        "onnx/test_reading.py": 1,
        "pool/test_member.py": 2,
        "protocol/test_composed_functions.py": 2,
        "protocol/test_graph_builder.py": 1,
        "protocol/test_graph_gradients.py": 3,
        "serving/test_hung_processes.py": 3,
        "serving/test_repository.py": 1,
    },
    "kernels and pieces of plans without an engine, and the engine's own handle and workspace for them": {
        "benchmarks/test_library_faults.py": 1,
        "engines/conftest.py": 3,
        "engines/fast/test_gathering.py": 1,
        "engines/fast/test_plans.py": 1,
        "engines/remote/craft.py": 3,
        "engines/test_blas.py": 3,
        "engines/test_cuda_lines.py": 2,
        "engines/test_cuda_loading.py": 1,
        "engines/test_cuda_norms.py": 4,
        "engines/test_divided_plans.py": 4,
        "engines/test_random.py": 1,
        "engines/test_rehearsals.py": 10,
        "engines/test_resampling.py": 3,
        "gpu/operations/attention.py": 1,
        "gpu/operations/channel_norms.py": 4,
        "gpu/operations/response_norm.py": 2,
        "gpu/test_plans.py": 1,
    },
    "names of pykka and asyncio, which the product has, too": {
        "actors/test_pykka_face.py": 1,
    },
}
"""Why, and in which file how often."""


def test_no_test_uses_a_private_name_without_a_reason() -> None:
    allowed = {name: count for files in ALLOWED.values() for name, count in files.items()}
    found = {str(file.relative_to(TESTS)): private_names(file) for file in sorted(TESTS.rglob("*.py"))}
    wrong = {name: sorted(used) for name, used in found.items() if len(used) != allowed.pop(name, 0)}
    assert wrong == {}, (
        "use a public name, or a function of tests/inside.py; where there are fewer, lower the number"
    )
    assert allowed == {}, "there is no such file"


def test_each_way_to_a_private_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "from cudnn_actor.serving.grpc_schema import _POOL\n"
        "from cudnn_actor.isolation import _life\n"
        "def test(gpu, monkeypatch):\n"
        "    assert gpu._service\n"
        "    monkeypatch.setattr(gpu, '_state', 3)\n"
        "    monkeypatch.setattr(gpu, '_MOST', 3)\n"
        "class Own:\n"
        "    def __init__(self): self._portal = self._isolation = 1\n"
        "    def other(self): return super()._engine\n"
        "def use(own): return own._portal, own._replace()\n"
    )
    assert sorted(private_names(file)) == ["_life", "_service", "_state"]
