"""The sampler of threads."""

from __future__ import annotations

import threading

from benchmarks.gpu.sampling import Sampled, sampled


def test_an_instruction_without_a_line_is_counted_at_the_first_line_of_its_function() -> None:
    """The compiler gives some instructions no line, and a thread can be seen at one of them."""
    ended: list[bool] = []

    def spinning() -> None:
        while not ended:
            pass

    first_line = spinning.__code__.co_firstlineno
    no_lines = b"\xff" * len(spinning.__code__.co_code)  # each: eight instructions that have no line
    spinning.__code__ = spinning.__code__.replace(co_linetable=no_lines)
    thread = threading.Thread(target=spinning, daemon=True)
    thread.start()
    seen: list[Sampled] = []
    while not any("spinning" in function.function for function in seen):
        with sampled({"thread": thread}) as answer:
            threading.Event().wait(0.01)
        seen = answer["thread"]
    ended.append(True)
    thread.join()
    assert {function.line for function in seen if "spinning" in function.function} == {first_line}
