"""Being told of each instruction of some functions before it runs, on every Python that runs the tests.

Python 3.11 has `sys.settrace` for it. From 3.12 on `sys.monitoring` tells: there, to switch the tracing of
instructions on and off again and again crashes the interpreter at times (seen with 3.12.1 and 3.12.3), so
the functions are instrumented once, and stay so.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

__all__ = ["Hear", "functions_in", "instructions"]

Hear = Callable[[CodeType, int], None]
"""Called before an instruction, with the code and the instruction's offset in it. It may raise."""


def functions_in(*paths: str) -> list[CodeType]:
    """The code of every function that has been loaded from files whose path contains one of these."""
    found: dict[int, CodeType] = {}

    def add(code: CodeType) -> None:
        found[id(code)] = code
        for part in code.co_consts:
            if isinstance(part, CodeType):
                add(part)

    with _nothing_spared():
        functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    for each in functions:
        if any(path in each.__code__.co_filename for path in paths):
            add(each.__code__)
    return list(found.values())


@contextlib.contextmanager
def _nothing_spared() -> Iterator[None]:
    """What `tests/conftest.py` has frozen is not among the collector's objects otherwise.

    Garbage is collected first: it would be kept, and in the end, all that was frozen would be looked at, too.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.collect()
        gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


class _Listener(threading.local):
    hear: Hear | None = None


_listener = _Listener()
_watched: dict[int, CodeType] = {}
"""By identity: to compute the hash of code takes a microsecond."""


def _tell(code: CodeType, offset: int) -> None:
    hear, _listener.hear = _listener.hear, None  # of what happens meanwhile, nothing is told
    if hear is not None:
        hear(code, offset)
        _listener.hear = hear


@contextlib.contextmanager
def instructions(codes: Iterable[CodeType], hear: Hear) -> Iterator[None]:
    """Have `hear` called before each instruction of these functions on this thread, until the block ends.

    If it raises, it is called no more.
    """
    new = [code for code in codes if id(code) not in _watched]
    _watched.update((id(code), code) for code in new)
    _listener.hear = hear
    try:
        with _instrumented(new):
            yield
    finally:
        _listener.hear = None


if sys.version_info >= (3, 12):
    _TOOL = 4  # the tools that have a number by convention have others
    _INSTRUCTION = sys.monitoring.events.INSTRUCTION

    def _instrumented(codes: Iterable[CodeType]) -> contextlib.AbstractContextManager[None]:
        if sys.monitoring.get_tool(_TOOL) is None:
            sys.monitoring.use_tool_id(_TOOL, __name__)
            sys.monitoring.register_callback(_TOOL, _INSTRUCTION, _tell)
        for code in codes:
            sys.monitoring.set_local_events(_TOOL, code, _INSTRUCTION)
        return contextlib.nullcontext()
else:

    @contextlib.contextmanager
    def _instrumented(_codes: Iterable[CodeType]) -> Iterator[None]:
        hear = _listener.hear
        assert hear is not None

        def trace_call(frame: FrameType, _event: str, _argument: object) -> Any:
            if id(frame.f_code) not in _watched:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return trace_opcode

        def trace_opcode(frame: FrameType, event: str, _argument: object) -> Any:
            """The interpreter calls it for nothing that happens meanwhile, and no more once it has raised."""
            if event == "opcode":
                hear(frame.f_code, frame.f_lasti)
            return trace_opcode

        before = sys.gettrace()
        sys.settrace(trace_call)
        try:
            yield
        finally:
            sys.settrace(before)
