"""The protocol through which the actor uses a device library; every engine implements it.

An engine belongs to one thread: the actor opens, uses and closes it on the
actor's own thread. It knows graphs, memory and fences, but not messages,
requests, slots or supervision.
"""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from cudnn_actor.actors import Crash
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.timing import PlanTimes
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = [
    "Binding",
    "Builder",
    "BuilderAccess",
    "ContextDead",
    "Effort",
    "Engine",
    "EngineFailure",
    "Fence",
    "PieceByPiece",
    "Plan",
    "ProgressCallback",
    "RunAnywhere",
    "StickyError",
    "blame",
    "blamed_operations",
    "no_progress",
    "unheard",
]

Binding = Any
"""An engine's own handle on a buffer, such as an array view or a device pointer."""

Fence = Any
"""An engine's own marker in its stream of work, such as an event."""

ProgressCallback = Callable[[int, int, str], None]
"""Called with how many plans have been tried, how many there are (0: unknown), and what is tried next.

Also when a plan turns out to be one that cannot be built, with the reason.

Also while a builder waits for another client's work: with 0, 0. It must not raise then.
"""


def unheard(done: int, of: int, what: str) -> None:
    """Ignore progress."""


class EngineFailure(Exception):
    """Raised when one call of the device library fails; call `probe` to see whether the context still works.

    Carries `status` (the library's own name for the failure), `detail`, and `operations`: the numbers of the
    graph's operations that it is about; empty if that is unknown.
    """

    def __init__(self, status: str, detail: str, operations: Sequence[int] = ()) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.operations = tuple(operations)


class StickyError(EngineFailure):
    """Raised when the failure has destroyed the device context: nothing more can run in it."""


def blame(error: BaseException, operations: Sequence[int]) -> None:
    """Note on an error that it is about these operations of the graph."""
    with contextlib.suppress(AttributeError):  # a library's class may have no room for it
        error.operations = tuple(operations)  # type: ignore[attr-defined]


def blamed_operations(error: BaseException) -> tuple[int, ...]:
    """The numbers of the graph's operations that an error is about; empty if that is unknown."""
    found: tuple[int, ...] = getattr(error, "operations", ())
    return found


def no_progress() -> None:
    """Do nothing: the `on_progress` of a run whose progress nobody watches."""


class ContextDead(Crash):
    """Raised to end an actor whose device context has died: none of its work runs or writes any more."""


class Plan(Protocol):
    """A graph that is ready to run; immutable, and tied to the kind of engine that built it."""

    @property
    def tag(self) -> str:
        """Engine, operation and the first digits of the graph's digest; where the library has a choice, also
        its own name for what runs: `cpu/conv_fwd/1f2e3d4c`, `cuda/conv_fwd/1f2e3d4c/eng42_k2=1`. On the CPU,
        that of a plan in float64 ends with `exact`, and ONNX Runtime's with `ort`."""

    def explain(self, graph: OperationGraph) -> Explanation:
        """How the plan runs the graph, whose labels the explanation has. It has the digest of the one that
        the plan was built for."""

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory that a run needs."""

    @property
    def checked(self) -> bool:
        """Whether the plan has passed its self-check. A plan that has not is used but not kept."""

    @property
    def provisional(self) -> bool:
        """Whether it stands in for a preferred plan, which takes long to build."""


Effort = Literal["soon", "best", "behind"]
"""The plan that a build gives, and when it is built.

"soon": a plan as quickly as possible, which may be provisional. "best": the preferred plan. "behind": the
preferred plan, after all builds for which requests wait.
"""


class BuilderAccess(Protocol):
    """Gives access to a service's builder process. Any thread."""

    @property
    def journal(self) -> str:
        """Path of the file in which this service's builder processes record the plans that they check."""

    def connect(self) -> socket.socket:
        """A connection to the process, which may not have been started yet. Never blocks.

        Raises `OSError`.
        """


class Builder(Protocol):
    """Makes plans for one engine, on a second thread, which alone opens, uses and closes the builder.

    No method waits for the engine's own thread or blocks it, except by holding the interpreter's lock.
    """

    @property
    def fingerprint(self) -> str:
        """The library version and the kind of device, on which exported plans depend. Set by `open`."""

    def open(self) -> None:
        """Take a library handle of the builder's own. Raises `EngineFailure`. Blocks."""

    def expect_builds(self) -> None:
        """Start preparing for builds, before `open`, if that takes long. Does not wait for the end."""

    def close(self) -> None:
        """Release the handle. Safe to call twice, and after a sticky error."""

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        """Like `Engine.build`, but allocates no workspace: the engine's `prepare` does.

        `progress` is called before each plan is tried, of which a large graph needs many; `of` is 0.
        """

    def tune(self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback) -> Plan:
        """Measure every plan that the library offers and return the fastest. Blocks for seconds.

        `progress` is called before each candidate is tried. Raises the same as `build`.
        """

    def export(self, plan: Plan) -> bytes | None:
        """A plan as bytes for `restore`, also in another process; None if it cannot be serialised."""

    def interrupt(self) -> None:
        """Make the current build fail, where it can be interrupted, and every later build. Any thread.

        Does not block. The owner must still call `close`.
        """

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        """The plan that `export` serialised. Raises `EngineFailure` if the bytes are not such a plan."""


class PieceByPiece(ABC):
    """A `Builder` of graphs in pieces that gives the plan of each piece before that of the whole.

    So the process that is to run the whole can load what it consists of while the rest is built.
    """

    on_piece: Callable[[bytes], object] | None = None
    """Called by `build` with each piece's plan, exported, once that is checked. Must not raise."""

    @abstractmethod
    def load_piece(self, data: bytes) -> None:
        """Load what `on_piece` was given, perhaps in another process, for a `restore` that follows.

        Blocks for milliseconds. Does not raise: `restore` meets again what is wrong.
        """

    @abstractmethod
    def forget_pieces(self) -> None:
        """Drop what `load_piece` has loaded and `restore` has not taken: the build has ended."""


class RunAnywhere(ABC):
    """A function of `Engine.expect` that can also run on other buffers than those that were expected.

    Only of a synchronous engine. What a run reads and writes where it lies need not be copied.
    """

    @abstractmethod
    def __call__(self) -> None:
        """Run on the buffers that were expected."""

    @abstractmethod
    def may_pay(self, nbytes: int) -> bool:
        """Whether `instead` may give arrays for a run whose inputs and outputs have `nbytes` bytes
        together."""

    @abstractmethod
    def instead(
        self, sources: Sequence[tuple[int, Binding]], targets: Sequence[tuple[int, Binding | None]]
    ) -> dict[int, Binding]:
        """The arrays that a run can read and write in place of the buffers that were expected, by the places
        of these buffers.

        These are arrays on the host, or bindings. All other sources and targets have to be copied.

        Parameters
        ----------
        sources, targets
            The arrays from which a run reads its inputs, and to which it writes its outputs, with their
            places among the buffers. None for a new array.
        """

    @abstractmethod
    def run_on(self, arrays: Any) -> None:
        """Run on the arrays that `instead` has given, and keep none of them. Raises as a run.

        `arrays`: the very object that it has returned.
        """


class Engine(Protocol):
    """A device library behind one interface. Not thread-safe: one thread opens, uses and closes it."""

    on_progress: Callable[[], None]
    """A synchronous engine calls it in `build` and `execute`, after each part of the work.

    Its owner may set it."""

    @property
    def name(self) -> str:
        """ "cpu" or "cuda"."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""

    @property
    def cudnn_version(self) -> str | None:
        """The version of the cuDNN that an open engine has loaded, as "9.28.1"; None if it uses none."""

    @property
    def outlives_context(self) -> bool:
        """Whether a new engine in this same process can take over after a sticky error."""

    @property
    def synchronous(self) -> bool:
        """Whether work is finished when the call that enqueues it returns; then fences are never used."""

    @property
    def converted_bytes(self) -> int:
        """Bytes of the engine's own memory that copies of constant buffers in another form take."""

    def open(self) -> None:
        """Create handle, stream and workspace on the calling thread. Raises `EngineFailure`. Blocks."""

    def close(self) -> None:
        """Release everything. Safe to call twice, and after a sticky error."""

    def create_arena(self, arena: int, nbytes: int) -> int:
        """Allocate `nbytes` of device memory as arena number `arena` and map it.

        Returns a file descriptor that the caller owns: the memory exists as long as a descriptor or a
        mapping of it does. Raises `MemoryError` when the machine has no room.
        """

    def map_arena(self, arena: int, fd: int, nbytes: int) -> None:
        """Map an arena that an earlier engine created. The caller keeps the descriptor."""

    def import_arena(self, arena: int, fd: int, nbytes: int) -> None:
        """Map another service's arena for reading, perhaps that of another device. The caller keeps the
        descriptor, of which nothing is known. Raises `EngineFailure` if this device cannot read it."""

    def unmap_arena(self, arena: int) -> None:
        """Unmap an arena. Its bindings are invalid from then on."""

    def bind(self, arena: int, offset: int, spec: TensorSpec) -> Binding:
        """The engine's handle on a buffer `offset` bytes into an arena, valid until the arena is unmapped."""

    def builder(self, access: BuilderAccess | None) -> Builder | None:
        """A new builder, not open yet, for a second thread; None where `build` is too short to need one.

        If building would block every thread of this process, the builder builds in the process that `access`
        connects to.
        """

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Plan:
        """Make a graph ready to run and allocate its workspace. Blocks for as long as the library takes.

        Raises `UnsupportedGraph` when no plan can run it, `OutOfMemory` when every plan that can needs
        more than `workspace_limit` bytes of workspace, `EngineFailure` when the library fails.
        """

    def prepare(self, plan: Plan) -> None:
        """Allocate the workspace of a plan that a builder made.

        Raises `OutOfMemory` when the device has no room for it; a plan with a smaller workspace may fit.
        """

    def load(self, plan: Plan) -> None:
        """Load the kernels that a plan's first run would have to load. Runs nothing. Blocks for up to 0.1 s.

        Where that is not possible, the first run loads them. Raises as `prepare`, and `StickyError`.
        """

    def execute(self, plan: Plan, buffers: Sequence[Binding], scalars: Sequence[float]) -> None:
        """Enqueue a run. `buffers` and `scalars` are in the order of `graph.bound` and `graph.scalars`.

        Raises `EngineFailure` when the library refuses, `StickyError` when the context has died.
        """

    def expect(
        self,
        plan: Plan,
        buffers: Sequence[Binding],
        scalars: Sequence[float],
        constant: Collection[int] = (),
    ) -> Callable[[], None]:
        """A function that enqueues a run on these buffers, of which many are expected: see `execute`.

        The engine may take longer for the first runs, for faster later ones. Enqueues nothing itself. Raises
        as `prepare`. `constant`: the places of buffers whose values stay what they are now as long as the
        function is called. The engine may read them now or, if its work is enqueued, in the first run. The
        function may be a `RunAnywhere`.
        """

    def keeps(self, plan: Plan, constant: Collection[int]) -> frozenset[int]:
        """The places of the constant buffers that a run which is expected would read only once.

        `expect` must be told again after a write to one of these. An engine whose work is enqueued reads them
        in the order of that work.
        """

    def measure(self, plan: Plan, graph: OperationGraph, constant: Collection[int] = ()) -> PlanTimes:
        """Run a plan of this graph on numbers of its own, and time it and its pieces. Blocks.

        It runs behind the work that is enqueued, for as long as `engines.timing` says. Floats are normally
        distributed, integers 0, scalars 1. What an expected run would compute only once, because these
        buffers are constant, an engine may leave out.

        Raises `OutOfMemory` if a second set of the graph's buffers does not fit, and what `execute` raises.
        """

    def with_candidates(
        self, plan: Plan, explanation: Explanation, graph: OperationGraph, workspace_limit: int | None
    ) -> Explanation:
        """The explanation of a plan of this graph, with the plans that may run each piece as candidates.
        Builds nothing.

        Blocks for as long as the library takes to name them. Raises `EngineFailure`, `StickyError`.
        """

    def write(self, dst: Binding, array: Any) -> None:
        """Enqueue a copy of values of the same dims into a buffer.

        A host array has usually been read when this returns; the call may wait for room in the staging
        memory. The exception is a C-contiguous array of the buffer's dtype in memory that `pin` was given:
        the device may read it only when the copy runs. Such an array **must not change, and its memory must
        stay mapped, until a later fence has passed**. If this raises, the array is not read any more. An
        array on the device, made by `EngineChoice.adopt`, is read when the copy runs.
        """

    def read(self, src: Binding, into: np.ndarray | None = None) -> np.ndarray:
        """A buffer's values as a C-contiguous array, once all work enqueued before is done. Blocks.

        Returns a new array, or `into`, which must be writable, C-contiguous, of the buffer's dims and dtype,
        and may be in memory that another process reads. Values are written to it once; in memory that was
        passed to `pin`, the device writes them itself where it can. Raises `EngineFailure` for any other
        kind of array. After any exception, nothing is written to `into` any more.
        """

    def fetch(self, src: Binding, into: np.ndarray | None = None) -> Callable[[], np.ndarray] | None:
        """Like `read`, without waiting. Call the returned function once, after a later fence has passed.

        Returns None if the buffer is larger than the free staging memory; use `read` then. `into` is as in
        `read`. It may be written at any time from this call until the returned function has run, and its
        memory must stay mapped until a later fence has passed. If the function is never called, nothing is
        written after that fence.
        """

    def direct_copy(
        self, src: Binding | np.ndarray, dst: Binding | np.ndarray
    ) -> Callable[[], object] | None:
        """A function that enqueues a copy of this buffer or array into that one, each time it is called.

        For many copies between the same places: what is the same for all of them is prepared once. Both have
        the same dims and dtype, and arrays are C-contiguous. None if the values have to be converted or
        rearranged on the way: then use `write`, `copy` or `fetch`. An array must stay mapped as long as the
        function is used, and until a fence behind the last call has passed. From a call until then, an array
        that is read must not change.
        """

    def part_copy(self, src: np.ndarray, dst: Binding) -> Callable[[int, int], object] | None:
        """A function that enqueues a copy of the bytes from `begin` to `end` of an array into a buffer.

        None where `direct_copy` gives None. The array must stay mapped for as long as for `direct_copy`. Only
        the bytes that are copied must not change meanwhile.
        """

    def row_copy(self, rows: Binding, place: Binding, *, store: bool) -> Callable[[int], object]:
        """A function that enqueues a copy of one row of `rows` to `place`, given the number of the row.

        With `store`, it copies from `place` to the row. `rows` has the dims of `place` behind one more, and
        its dtype. What is the same for all rows is prepared once. Layouts may be any.
        """

    def pin(self, memory: memoryview) -> None:
        """Let the device read and write host memory directly: arrays in it need no staging memory.

        `memory` is a whole mapping, for example 64 MiB. From here on, arrays passed to `write` and as `into`
        may lie in it. The caller still owns it and must unpin it before unmapping it. If the system refuses,
        a warning is logged and arrays in it are copied like any others; nothing else changes. Blocks while
        the system locks the pages. Raises `StickyError`.
        """

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`, once all work enqueued before is done. Blocks. Does nothing for memory not pinned.

        Closing the engine unpins everything.
        """

    def view(self, src: Binding, owner: object) -> Any:
        """The buffer itself as an array of the device's own array library; it keeps `owner` alive.

        Its holder must drop it before the arena is unmapped or the engine closed.
        """

    def copy(self, src: Binding, dst: Binding) -> None:
        """Enqueue a copy between buffers of the same dims and dtype."""

    def fill(self, dst: Binding, value: float) -> None:
        """Enqueue setting every element to `value`."""

    def fence(self) -> Fence:
        """A marker after all work enqueued so far."""

    def has_passed(self, fence: Fence) -> bool:
        """Whether the work before a fence is done. After it has returned True, do not use the fence again.

        Never blocks. Raises `StickyError`.
        """

    def probe(self) -> str | None:
        """None if the context is healthy, else what is wrong with it. Blocks briefly."""
