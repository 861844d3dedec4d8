"""What guards every test: nothing may be left over, and no event loop may be blocked."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pykka
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from structlog.typing import EventDict

from cudnn_actor.logging import TextFormatter
from cudnn_actor.processes.launching import close_launchers
from cudnn_actor.processes.server_process import ForkedServer

from .compiling import FOLDERS_OF_MARKERS, import_share
from .forked_programs import end_server, forking_forkservers, server_descriptors
from .inside import launchers
from .left_out import left_out
from .log_lines import Taking, capture_logs, handled_by
from .patience import PATIENCE_S
from .quick_watch import quick_watch
from .whole import PRODUCTS, WHOLE, covering, together_for

if TYPE_CHECKING:
    from .tracing import Tracing

# No example fails for the time that it takes: another process may have the processor meanwhile.
settings.register_profile(
    "busy", deadline=None, max_examples=300 if WHOLE else 50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")

SETTLED_WITHIN_S = PATIENCE_S / 10
"""How long what a test leaves may take to end by itself: it is looked for again and again meanwhile."""
UNFROZEN_AFTER_S = 2.5
HERE = Path(__file__).parent
_listdir, _fstat, _readlink = os.listdir, os.fstat, os.readlink
_open, _read, _close = os.open, os.read, os.close
"""As they are before blocking calls are watched for: to look at each of these takes longer than the call."""
FAILED = pytest.StashKey[bool]()
LINES = pytest.StashKey[deque[str]]()
BRIEF = pytest.StashKey[bool]()
"""Whether only news is sent of a test: see `is_news`."""
_FORMATTER = TextFormatter()
HAS_BLOCKBUSTER = importlib.util.find_spec("blockbuster") is not None


def pytest_report_header() -> str:
    """Say whether a blocked event loop would be noticed."""
    return f"blocked event loops: {'fail the test' if HAS_BLOCKBUSTER else 'not looked for (no blockbuster)'}"


@pytest.hookimpl(trylast=True)  # behind what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-all` runs, unless the command line names a test with its parameters."""
    if WHOLE or any("[" in word for word in config.args):
        return
    left_out: set[pytest.Item] = set()
    for together, cases in _products(items):
        run = covering([tuple(case.callspec.params.values()) for case in cases], together=together)
        left_out |= {*cases} - {cases[place] for place in run}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _products(items: list[pytest.Item]) -> Iterable[tuple[int, list[pytest.Function]]]:
    """The cases of each test with a marker of `PRODUCTS`, for each engine, without those for a GPU.

    With each, how many values together are run.
    """
    found: dict[tuple[object, str, object], list[pytest.Function]] = {}
    together: dict[tuple[object, str, object], int] = {}
    for item in items:
        marker = next(filter(None, map(item.get_closest_marker, PRODUCTS)), None)
        if marker is not None and not item.get_closest_marker("gpu"):
            assert isinstance(item, pytest.Function)
            test = item.parent, item.originalname, item.callspec.params.get("new_engine")
            found.setdefault(test, []).append(item)
            together[test] = together_for(item, marker)
    return [(together[test], cases) for test, cases in found.items()]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a folder if `-m` leaves out what marks each of its tests: gpu/ has thousands, for nobody."""
    named_as_its_marker = collection_path.parent == HERE and collection_path.name in FOLDERS_OF_MARKERS
    return True if named_as_its_marker and left_out(collection_path.name, config.option.markexpr) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect no garbage meanwhile: nearly all that is made stays, and to look at it takes a third longer."""
    gc.disable()
    try:
        import_share(session.config)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep all modules and tests out of garbage collections: one follows each of thousands of tests.

    Objects that are garbage now stay, too: to find them takes half a second of each process.
    """
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Spare it what a module leaves, too: caches, and what pytest and hypothesis remember.

    A collection would take half a second in the end. Behind it, an error that nobody took fails the test.
    """
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            _spare_the_collector()
        untaken = [_UNTAKEN.popleft() for _ in range(len(_UNTAKEN))]
        if untaken and not item.stash.get(FAILED, False):
            pytest.fail(f"nobody took these errors, of this module's tests: {untaken}", pytrace=False)


def _spare_the_collector() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def tracing() -> Iterator[Tracing]:
    """A tracer provider whose spans are kept in memory."""
    from .tracing import recording

    with recording() as found:
        yield found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for the fixtures whether the test itself failed.

    A failure is reported at once, as pytest does: what comes after it may end the process.
    """
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    if report.failed and (lines := item.stash.get(LINES, None)):
        report.sections.append(("Log lines of services", "\n".join(lines)))
    if report.failed and item.stash.get(BRIEF, False):
        item.ihook.pytest_runtest_logreport(report=report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test as pytest does, but send less, in a process of pytest-xdist: see `is_news`.

    A report takes both processes a quarter of a millisecond. All are sent where `--durations` or `--junitxml`
    is to say how long each part of a test took.
    """
    ask = item.config.getoption
    if not hasattr(item.config, "workerinput") or ask("durations", None) is not None or ask("xmlpath", None):
        return None
    item.stash[BRIEF] = True
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = any(report.failed for report in reports)  # then the rest has what was printed
    for report in reports:
        if not report.failed and (failed or is_news(report)):
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def is_news(report: pytest.TestReport) -> bool:
    """Whether a report says more than that a test was set up, or has ended."""
    return report.when == "call" or not report.passed


@pytest.hookimpl(specname="pytest_runtest_protocol", wrapper=True)
def pytest_keep_lines(item: pytest.Item) -> Generator[None, object, object]:
    """Keep the lines that a test logs, for when it fails. A fixture would take each test longer.

    As text: pytest's own handler would keep the records, and with an error its frames and their arrays.
    """
    lines: deque[str] = deque(maxlen=200)
    item.stash[LINES] = lines
    with handled_by(lambda record: lines.append(_FORMATTER.format(record))):
        return (yield)


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """What services log during the test: see `capture_logs`."""
    with capture_logs() as entries:
        yield entries
    entries.clear()  # fields may hold errors, whose frames hold arrays


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """What holds for the whole session. Fixtures would do, but each test asks again for each of them.

    Forkservers end with the session, and not before: the first worker of each costs its imports, and so does
    the first program of the server of test programs.
    """
    if session.config.getoption("dist", "no") != "no":  # other processes run the tests
        return (yield)
    _let_libuv_open_its_pipe()
    with _no_loop_blocked(), _no_error_untaken(), forking_forkservers():
        try:
            return (yield)
        finally:
            close_launchers()
            end_server()


def _let_libuv_open_its_pipe() -> None:
    """Where uvloop is installed, let it open what it keeps before anybody compares descriptors."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every thread, descriptor, arena and actor of a test is gone when the test is.

    Compared are sets, not counts, so that one leak cannot hide behind one loss. What is tolerated, and why:

    - everywhere, a moment, which only a hang or a leak makes longer than `SETTLED_WITHIN_S`: a service says
      that it has stopped on the thread that stopped it, which then needs a little to end, and so do threads
      that a test has told to end;
    - everywhere, what only garbage holds: tracebacks of expected errors have the frames, and the frames the
      arrays, so it is collected first;
    - what was there before: engines that a module of `tests/engines` shares, with their arenas;
    - descriptors 0, 1 and 2, which pytest's capture changes;
    - libuv's pipe, which its first loop opens for the whole process, before the first test;
    - once the CUDA driver is loaded, descriptors: it opens its own at its first use, and keeps them;
    - forkservers, with the descriptors that this process has of them: the next test's workers come from
      there. Their children, the workers, are looked for like all else;
    - the server of test programs, with the socket to it: the next test's programs come from there;
    - a test that failed keeps its frames, for the report.
    """
    _MAPS.look_again_if_changed()
    before = {what: look() for what, look in _LOOKS.items()}
    yield
    _MAPS.look_again_if_changed()
    if request.node.stash.get(FAILED, False):
        return
    left = {what: _what_stays(look, before[what]) for what, look in _LOOKS.items()}
    left["descriptors"] = [*map(_with_name, left["descriptors"])]
    assert not any(left.values()), f"leaked: {left}"


_UNTAKEN = deque[str]()


@contextlib.contextmanager
def _no_error_untaken() -> Iterator[None]:
    """Note futures and tasks that are collected with an error that nobody took: asyncio logs it then.

    Who sends such a request would read it in the log of a program, and so does who runs the tests.
    """

    def note(record: logging.LogRecord) -> None:
        if "exception was never retrieved" in (text := record.getMessage()):
            _UNTAKEN.append(text)
        elif logging.lastResort is not None:
            logging.lastResort.handle(record)  # as it would be without this handler

    handler = Taking(note)
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _no_loop_blocked() -> Iterator[None]:
    """A call of ours that could block raises in a thread whose event loop is running.

    Only stacks with our own code in them count: tests may wait for their own gates. Three may wait there: the
    question whether there is a GPU, which a process asks once, whoever waits for a pykka future, and whoever
    uses the blocking client.

    For the whole session: to replace 60 functions and put them back takes longer than many tests do.
    """
    if not HAS_BLOCKBUSTER:
        yield
        return
    from blockbuster import BlockBuster

    watched = BlockBuster("cudnn_actor")
    for function in watched.functions.values():
        function.can_block_in("cudnn_actor/engines/cuda/diagnosis/gpus.py", "find_driver_apart")
        function.can_block_in("cudnn_actor/actors/pykka_future.py", "_wait")
        function.can_block_in("cudnn_actor/blocking/spawning.py", "spawn")
        function.can_block_in("cudnn_actor/blocking/portal.py", "close")
        function.can_block_in("cudnn_actor/trials/bench/__init__.py", "_on")  # its loops serve nobody else
        function.can_block_in("benchmarks/gpu/resnet.py", "_one_problem")  # nor does this one
        function.can_block_in("tests/engines/devices.py", "why_not")  # it decides whether a test is skipped
        function.can_block_in("tests/forked_programs.py", "wait")  # as `Popen.wait`, for one that has ended
    with quick_watch():
        watched.activate()
    try:
        yield
    finally:
        watched.deactivate()


def _what_stays(look: Callable[[], set[str]], before: set[str]) -> list[str]:
    begun = time.monotonic()
    unfrozen = False
    while left := look() - before:
        if not unfrozen and time.monotonic() > begun + UNFROZEN_AFTER_S:
            gc.unfreeze()  # it may be garbage since, of a service that outlived its module
            unfrozen = True
        gc.collect()
        _MAPS.look()
        if time.monotonic() > begun + SETTLED_WITHIN_S:
            return sorted(left)
        threading.Event().wait(0.002)
    return []


def _threads() -> set[str]:
    return {f"{thread} {id(thread)}" for thread in threading.enumerate()}


def _descriptors() -> set[str]:
    """Number and file of each, but for the one that lists them."""
    found: set[str] = set()
    if _MAPS.lines_with("libcuda.so"):
        return found
    for number in set(_listdir("/proc/self/fd")) - {"0", "1", "2"}:
        with contextlib.suppress(OSError):
            found.add(_file_of(int(number)))
    return found - _of_servers()


def _file_of(number: int) -> str:
    """Number, device and inode; of files that all have one inode, as those of epoll have, what they are.

    To read the name of each file takes several times as long.
    """
    file = _fstat(number)
    typed = stat.S_IFMT(file.st_mode)
    return f"{number} -> {f'{file.st_dev}:{file.st_ino}' if typed else _readlink(f'/proc/self/fd/{number}')}"


def _with_name(descriptor: str) -> str:
    """With the file's name, for who reads it."""
    with contextlib.suppress(OSError):
        return f"{descriptor} {_readlink('/proc/self/fd/' + descriptor.split(maxsplit=1)[0])}"
    return descriptor


def _of_servers() -> set[str]:
    """The descriptors by which this process holds its forkservers, and the server of test programs."""
    found = set()
    numbers = server_descriptors()
    for launcher in launchers():
        numbers.add(launcher.fileno())
        for server in filter(None, (launcher._server, launcher._heir)):
            numbers |= {server._socket.fileno(), server._process.pidfd}
            if isinstance(server._process, ForkedServer):
                numbers.add(server._process._lifeline._ours)
    for number in numbers:
        with contextlib.suppress(OSError):
            found.add(_file_of(number))
    return found


def _workers() -> set[str]:
    """Children of forkservers, alive or not waited for, and those that have outlived theirs."""
    found: set[str] = set()
    for launcher in launchers():
        found.update(str(child.pid) for child in tuple(launcher._children.values()))
    for pid in filter(None, [launcher.pid for launcher in launchers()]):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found - {str(launcher._heir.pid) for launcher in launchers() if launcher._heir}


def _arenas() -> set[str]:
    return _MAPS.lines_with("cudnn-actor-arena")


def _actors() -> set[str]:
    return {str(ref) for ref in pykka.ActorRegistry.get_all()}


class _Maps:
    """What is mapped, as it was at the last look. A look takes a millisecond, a thousand lines long."""

    def __init__(self) -> None:
        self._text, self._pages = "", ""
        self._lines: dict[str, set[str]] = {}

    def look(self) -> None:
        """Read what is mapped now."""
        self._pages = self._count()
        self._text = Path("/proc/self/maps").read_text()
        self._lines = {}

    def look_again_if_changed(self) -> None:
        """Look if there are more or fewer pages. If it is missed that one took another's place, the next
        look blames a test for the other: nothing stays hidden."""
        if self._pages != self._count():
            self.look()

    def lines_with(self, name: str) -> set[str]:
        """The lines with this name in them."""
        if name not in self._lines:
            has = name in self._text
            self._lines[name] = {line for line in self._text.splitlines() if name in line} if has else set()
        return self._lines[name]

    @staticmethod
    def _count() -> str:
        descriptor = _open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read(descriptor, 100).split()[0].decode()
        finally:
            _close(descriptor)


_MAPS = _Maps()


_LOOKS: dict[str, Callable[[], set[str]]] = {
    "threads": _threads,
    "descriptors": _descriptors,
    "arenas": _arenas,
    "actors": _actors,
    "workers": _workers,
}
