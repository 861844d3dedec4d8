"""Tests use what users use. These use private names of the product, so often: the numbers only fall."""

from __future__ import annotations

from pathlib import Path

from .private_names import private_names
from .test_packages import ROOT

TESTS = ROOT / "tests"
ALLOWED = {
    "the place that reaches behind handles for all other tests": {"inside.py": 21},
    "the guards against leaks, which look at every descriptor and child": {"conftest.py": 11},
    "a client's steps, one by itself: a request that no client makes, or an answer that comes late": {
        "attached/test_deadlines.py": 2,
        "attached/test_known_graphs.py": 1,
        "attached/test_seam.py": 1,
        "attached/test_sessions.py": 2,
    },
    "a lock that another thread holds, or at which it is to come": {
        "actors/test_waiting_for_messages.py": 2,
        "isolation/test_socket_owner.py": 1,
        "isolation/test_standby.py": 1,
        "service/fork_programs.py": 5,
        "service/test_several_lives.py": 1,
    },
    "words that are rarely drawn, a builder without cuDNN, and a step of the fast path": {
        "engines/operations/test_random.py": 1,
        "engines/cuda/checking/test_rehearsals.py": 1,
        "memory/test_ready_slots.py": 1,
    },
    "what a Ray pool has, behind functions for all tests of Ray": {"ray/scenarios.py": 2},
    "names of Python's threads, which the product has, too": {"engines/cpu/fast/test_lanes.py": 3},
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
        "from cudnn_actor.isolation import _dispatcher\n"
        "def test(gpu, monkeypatch):\n"
        "    assert gpu._service\n"
        "    monkeypatch.setattr(gpu, '_state', 3)\n"
        "    monkeypatch.setattr(gpu, '_MOST', 3)\n"
        "class Own:\n"
        "    def __init__(self): self._portal = self._isolation = 1\n"
        "    def other(self): return super()._engine\n"
        "def use(own): return own._portal, own._replace()\n"
    )
    assert sorted(private_names(file)) == ["_dispatcher", "_service", "_state"]
