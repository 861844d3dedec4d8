"""Every example runs as a newcomer would run it: alone, in a process of its own, warnings as errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.onnx.small_models import image_model

from .. import forked_programs
from ..patience import PATIENCE_S
from ..whole import WHOLE

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words: str) -> str:
    """What a program prints. `make test-all` runs it in a new interpreter, as a newcomer does.

    Pytest always has one: it warns of packages that were imported before it could rewrite their assertions.
    """
    words = ("-W", "error", *words)
    if WHOLE or "pytest" in words:
        command = [sys.executable, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    else:
        done = forked_programs.run(words, timeout=PATIENCE_S, spare=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = done.stderr.splitlines()
    assert all(
        re.match(r"[\d-]{10} [\d:.]{12} (INFO|WARNING|ERROR) [a-z_]+\.[a-z_]+ ", line) for line in said
    ), said
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_the_first_fifteen_lines_give_the_shape_and_a_receipt() -> None:
    output = run(str(EXAMPLES / "async_client.py"))
    assert "shape (1, 8, 222, 222), dtype float32" in output
    assert re.search(r"plan \w+/conv_fwd/\S+, generation 1, ran for \d+ µs", output)


def test_the_descent_finds_the_filter() -> None:
    output = run(str(EXAMPLES / "fit_filter.py"))
    losses = numbers(r"loss (\S+)", output)
    assert len(losses) == 7
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-9 * losses[0]
    [difference] = numbers(r"hidden filter: (\S+)", output)
    assert difference < 1e-5


def test_the_gradients_of_a_step_are_those_that_numpy_finds() -> None:
    output = run(str(EXAMPLES / "attention_step.py"))
    found, wanted = numbers(r"norm (\S+),", output), numbers(r"NumPy (\S+)", output)
    assert len(found) == 5
    assert found == pytest.approx(wanted, rel=1e-4)
    before, after = numbers(r"loss (\S+)", output)
    assert after < 0.95 * before


def test_a_model_runs_with_two_batch_sizes(tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "onnx_model.py"))
    for line in (
        "<model: image: float32 (N, 3, 32, 32) -> scores: float32 (N, 5)>",
        "batch 1: scores (1, 5)",
        "batch 8: scores (8, 5)",
        "conv_fwd at node 'filter' (Conv)",
        "the same values: True",
    ):
        assert line in output
    path = tmp_path / "model.onnx"
    assert run(str(EXAMPLES / "onnx_model.py"), "--save", str(path)) == ""
    assert "batch 8: scores (8, 5)" in run(str(EXAMPLES / "onnx_model.py"), str(path))
    onnx.save(image_model(2), path)
    assert "batch 8: scores (2, 5), features (2, 4, 2, 2)" in run(str(EXAMPLES / "onnx_model.py"), str(path))


def test_the_pykka_actor_hears_the_escalation_and_starts_a_fresh_service() -> None:
    output = run(str(EXAMPLES / "embedded_in_pykka.py"))
    story = [
        "service 1 started",
        "escalated: cudnn gave up (start failed)",
        "service 2 started",
        "first image: no answer, safe to send again: True",
        "the reason: ",
        "second image: centre 1.000, corner 0.444",
        "service stopped",
    ]
    lines = [line for line in output.splitlines() if line]
    assert [line.startswith(begin) for line, begin in zip(lines, story, strict=True)] == [True] * len(story)


def test_the_users_own_tests_pass() -> None:
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "fault_injection_test.py"))
    assert "7 passed" in output


def test_every_future_in_flight_survives_a_sigkill() -> None:
    output = run(str(EXAMPLES / "surviving_a_kill.py"))
    [in_flight] = numbers(r"with (\d+) of 64 requests in flight", output)
    [first, second] = numbers(r"generation \d: (\d+)", output)
    assert in_flight > 0
    assert first > 0
    assert first + second == 64
    assert "all 64 answered" in output
    [killed] = numbers(r"worker (\d+) killed", output)
    [successor] = numbers(r"worker (\d+) served after", output)
    assert killed != successor
    assert "every output is what the second worker finds once more" in output


def test_a_strategy_says_whose_buffers_are_kept() -> None:
    _, alone, together = re.split(r"one_for_\w+:\n", run(str(EXAMPLES / "two_services.py")))
    for story in (alone, together):
        assert "left itself replaces its worker, generation 2; buffer kept: True" in story
        assert "the supervisor starts left anew" in story
        assert "left's buffer: gone" in story
    assert "right's buffer: kept" in alone
    assert "the supervisor starts right anew" not in alone
    assert "the supervisor starts right anew" in together
    assert "right's buffer: gone" in together


def test_the_users_own_tests_under_kills_pass() -> None:
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "kill_injection_test.py"))
    assert "7 passed" in output


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_has_a_test_here(example: Path) -> None:
    tests = Path(__file__).parent.glob("test_*.py")
    assert any(f'"{example.name}"' in test.read_text(encoding="utf-8") for test in tests)


def test_a_pool_answers_all_requests_while_a_member_is_killed() -> None:
    output = run(str(EXAMPLES / "pool.py"), "cpu", "cpu")
    assert "pool-0 on cpu: replaced 1 times" in output
    assert "answered: 321" in output


def test_two_processes_use_one_service() -> None:
    output = run(str(EXAMPLES / "two_processes.py"))
    assert "the user got (1, 8, 30, 30), each value 27" in output
    assert "has 0 buffers left" in output


def test_what_is_cancelled_before_it_starts_never_runs_and_leaves_no_buffer() -> None:
    output = run(str(EXAMPLES / "cancellation.py"))
    [(cancelled, unrun, withdrawn)] = re.findall(
        r"cancelled: (\d+); never ran: (\d+); withdrawn: (\d+)\n", output
    )
    assert 0 < int(unrun) <= int(cancelled) < 64
    assert unrun == withdrawn
    assert "late: had started: False; may be sent again: True" in output
    assert "task cancelled: True; buffers left: 0" in output


def test_a_model_is_changed_under_its_clients_and_no_run_fails() -> None:
    output = run(str(EXAMPLES / "hot_swap.py"))
    assert output.splitlines()[:3] == ["loaded: 1 2", "written: 10 20", "replaced: 3 4"]
    clients = re.findall(r"a client got (.*)", output)
    assert len(clients) == 8
    assert set(clients) <= {"1 2, then 10 20, then 3 4", "1 2, then 3 4"}  # in order, none mixed


def test_a_model_that_is_flooded_refuses_and_a_third_one_finds_room_when_one_is_closed() -> None:
    output = run(str(EXAMPLES / "several_models.py"))
    [answered] = numbers(r"left: (\d+) answered, and the next refused at once; right: answered", output)
    assert 32 <= answered < 500
    assert "no room for a third; may be sent again: True" in output
    assert output.count("28 MiB of weights, y 256\n") == 2
