"""The options of a service."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from cudnn_actor.broker.execution_state import CACHE_BYTES
from cudnn_actor.memory import ARENA_STEP
from cudnn_actor.plan_store.cache import PLAN_CAPACITY
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.types.checks import did_you_mean, require_name, require_seconds, require_whole
from cudnn_actor.protocol.types.short_repr import short_repr
from cudnn_actor.supervision import Escalated, Fault, FaultPlan

__all__ = ["MOST_THREADS", "NAME", "Isolation", "OnGiveUp", "Options", "make_options", "takes_options"]

NAME = "cudnn"
"""The name of a service for which no name is given."""
_LONGEST_NAME = 100
MOST_THREADS = 256
"""The most threads that `Options.threads` may ask for."""

Isolation = Literal["process", "thread"]
_ISOLATIONS = ("process", "thread")
_LEAST = {
    "mailbox": 1,
    "max_restarts": 0,
    "cache_limit": 0,
    "plan_capacity": 1,
    "workspace_limit": 1,
    "memory_limit": ARENA_STEP,  # with less, no buffer fits
    "deployed_limit": 0,
    "threads": 1,
}
"""The options that are whole numbers, and the least value of each."""
_MOST = {"threads": MOST_THREADS}
"""The options that have a largest value, and that value."""
_REQUIRED = ("mailbox", "max_restarts", "cache_limit", "plan_capacity")
"""The options that may not be None."""
OnGiveUp = Literal["raise", "exit"] | Callable[[Escalated], object]
"""The values of `Options.on_give_up`."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `spawn`, `start` and `child_spec`: their signatures are generated from these fields.

    Parameters
    ----------
    name
        The service's name in its log lines and events, to tell several services in a process apart; up to 100
        characters, not necessarily unique. None: "cudnn", or `child_spec`'s `id`.
    device
        "cpu"; "cuda:N", counted from 0 among the GPUs that are visible to this process; "cuda": the first of
        them; "auto": the first GPU if one can be used, else the CPU, with a `RuntimeWarning` if a GPU could
        be expected. In production use "cuda", which never falls back.
    isolation
        "process": the actor runs in a worker process, whose death does not harm this process; "thread": on a
        thread of this process. None: a process for a GPU, and if `standby`, `verify` or a fault needs one;
        else a thread.
    faults
        Scripted failures, for tests; None for none.
    mailbox
        Messages that may wait before `submit` and `tell` are refused.
    max_restarts, period_s
        The actor is replaced at most `max_restarts` times within `period_s` seconds. One failure more stops
        the service.
    hang_after_s
        Seconds that an actor with work may go without progress, such as finishing a message, before it counts
        as hung and is replaced.
    workspace_limit
        Bytes of workspace that plans may use; None for the engine's own bound.
    graph_limits
        The size limits for graphs that are sent to the service; None for the defaults of `GraphLimits`.
    cache_limit
        Bytes of host memory, approximately, that a process of the service may use for each of its caches:
        messages, graphs, and plans. The least recently used entry is dropped first. The latest entry of each
        cache stays, however large it is.
    plan_capacity
        The most plans that are kept ready, at least 1, refusals of graphs that cannot run included; the least
        recently used is dropped first. `cache_limit` bounds them, too. The default is 256.
    memory_limit
        Bytes that buffers may take from the system, at least 2 MiB; memory is taken in steps of 2 MiB. On the
        CPU, arrays of `CudnnRef.staging` count, too.
        None: on the CPU, in a container with a memory limit (Linux's control groups), three quarters of the
        memory that this limit leaves when the service starts, less 64 MiB for its own processes; else no
        limit.
    deployed_limit
        Bytes of buffers that all models of the service together may keep for the inputs and outputs of graphs
        that no run uses now: a model has a graph for each set of dims. Over that, the buffers of the least
        recently used graph are freed; its plan stays, and its next run allocates them again. None: a quarter
        of the device's memory, or of `memory_limit`.
    plan_store
        A directory where built plans are stored, for later processes and for others that share it; None for
        none. Its files are run as native code, so choose a directory that only you can write to. No effect on
        the CPU engine, whose plans take no time to build.
    autotune
        Whether `warm` measures every candidate plan of the library and keeps the fastest (in `plan_store`
        too, if there is one). Until it is found, the library's own first choice is used, as it is for
        requests that were never warmed. No effect on the CPU engine.
    dynamic_shapes
        Whether graphs that differ in sizes alone, such as the batch size, share the kernels that cuDNN
        compiles for fused convolutions and matrix products. A plan for a new size then takes tens of
        milliseconds to build, not up to a second for each such convolution or product. For most sizes the
        shared kernels take longer to run, up to twice as long (see `cudnn-actor docs measurements`). A size
        of 1 counts as another graph, and for products cuDNN chooses among several kernels by size, each
        compiled when it is first chosen. No effect on the CPU engine.
    exact
        Whether the CPU engine computes everything in float64 and rounds each result once, to its dtype: slow,
        and what other engines are compared with. By default it computes float32 and smaller floats in
        float32, block by block. No effect on a GPU.
    threads
        On how many threads the CPU engine computes, its BLAS included; 1 to 256. None: as many as this
        process can run at the same time, which a container may limit. No effect on a GPU.
    onnx_runtime
        Whether the CPU engine has ONNX Runtime run graphs, in float32, where it has all of a graph's
        operations. None: where the package is installed, and a graph is large enough for that to pay. True:
        wherever that is possible. False: never. `exact` excludes it. No effect on a GPU.
    standby
        1 keeps a second worker ready, which takes over when the first one dies; on a GPU its context takes
        some hundred MiB of device memory. 0 starts a new worker when the first one dies.
    executable
        Path of the Python that runs the service's processes: of the same version, with this package and its
        dependencies. None for the Python that runs this process. Needed in a frozen application and for
        embedded Python, where this process's Python cannot be found.
    verify
        Whether uploaded values are checked after a crash. A checksum of each upload is kept until something
        else is written to its buffer; a buffer whose checksum differs counts as torn. Uploads and restarts
        take longer.
    on_give_up
        What happens, in addition to `ServiceStopped` for all requests, when a service that was ready gives
        up. "raise": the `async with` body is cancelled, and raises `ServiceStopped` too. "exit": this process
        gets SIGTERM, and ends with status 70 if it is still running after 30 s. A callable: it gets the
        `Escalated` event, on the supervisor's thread; the service's end is reported when it returns.

    Raises
    ------
    InvalidRequest
        A value is out of its range, or `isolation="thread"` is combined with an option that needs a process.
    """

    name: str | None = None
    device: str = "auto"
    isolation: Isolation | None = None
    faults: FaultPlan | None = None
    mailbox: int = 1024
    max_restarts: int = 3
    period_s: float = 60.0
    hang_after_s: float = 30.0
    workspace_limit: int | None = None
    graph_limits: GraphLimits | None = None
    cache_limit: int = CACHE_BYTES
    plan_capacity: int = PLAN_CAPACITY
    memory_limit: int | None = None
    deployed_limit: int | None = None
    plan_store: str | os.PathLike[str] | None = None
    autotune: bool = False
    dynamic_shapes: bool = False
    exact: bool = False
    threads: int | None = None
    onnx_runtime: bool | None = None
    standby: int = 0
    verify: bool = False
    on_give_up: OnGiveUp = "raise"
    executable: str | os.PathLike[str] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.isolation is not None and self.isolation not in _ISOLATIONS:
            hint = did_you_mean(self.isolation, _ISOLATIONS)
            raise _invalid("isolation", self.isolation, "is unknown", f'{hint}use "process" or "thread"')
        if type(self.standby) is not int or self.standby not in (0, 1):
            raise _invalid("standby", self.standby, "is neither 0 nor 1", "use 1 for a standby, 0 for none")
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None or name in _REQUIRED:
                whole = require_whole(name, value, least, _MOST.get(name), of_bytes=name.endswith("_limit"))
                msgspec.structs.force_setattr(self, name, whole)
        if type(self.graph_limits) not in (GraphLimits, type(None)):
            fix = "give GraphLimits(operations=..., nbytes=...)"
            raise _invalid("graph_limits", self.graph_limits, "is not a GraphLimits", fix)
        for name in ("period_s", "hang_after_s"):
            require_seconds(name, getattr(self, name), positive=True)
        if self.hang_after_s > threading.TIMEOUT_MAX:
            raise _invalid(
                "hang_after_s", self.hang_after_s, "is longer than a thread can wait", "1e6 is eleven days"
            )
        for name in ("autotune", "dynamic_shapes", "exact", "verify"):
            if type(getattr(self, name)) is not bool:
                raise _invalid(name, getattr(self, name), "is not a bool", "use True or False")
        _check_onnx_runtime(self.onnx_runtime, exact=self.exact)
        _check_plan_store(self.plan_store)
        _check_executable(self.executable)
        _check_faults(self.faults)
        _check_on_give_up(self.on_give_up)
        if self.isolation == "thread" and (needy := self._needs_process()) is not None:
            value = getattr(self, needy)
            raise _invalid(needy, value, "needs a worker process", 'use isolation="process", or leave it out')

    def _needs_process(self) -> str | None:
        """The option that only a worker process supports; None if there is none."""
        if self.standby:
            return "standby"
        if self.verify:
            return "verify"
        kills = self.faults is not None and any(rule.fault is Fault.KILL for rule in self.faults.rules)
        return "faults" if kills else None

    def isolation_on(self, device: str) -> str:
        """The isolation that `isolation` selects on a device."""
        if self.isolation is not None:
            return self.isolation
        return "thread" if device == "cpu" and self._needs_process() is None else "process"


def make_options(given: Mapping[str, Any]) -> Options:
    """Options from keyword arguments. Raises `InvalidRequest`, also for an unknown name."""
    return _make_record(Options, (), given)


P = ParamSpec("P")
TakenT = TypeVar("TakenT", bound=Options)
R = TypeVar("R")


def takes_options(record: Callable[P, TakenT]) -> Callable[[Callable[[TakenT], R]], Callable[P, R]]:
    """Decorate a function that takes one record, so that callers pass the record's fields as arguments.

    Thus the fields, their types, defaults and meanings are written once, in `Options`. `help`,
    `inspect.signature` and type checkers show them as if each function had listed them itself.

    Parameters
    ----------
    record
        `Options`, or a derived class with the function's further arguments.
    """

    def decorate(function: Callable[[TakenT], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            return function(_make_record(record, args, given))

        shown: Any = call
        del shown.__wrapped__  # a caller does not pass the wrapped function's one parameter
        returns = inspect.signature(function).return_annotation
        shown.__signature__ = _signature(record).replace(return_annotation=returns)
        shown.__annotations__ = {**_annotations(record), "return": returns}
        shown.__doc__ = _with_options(inspect.getdoc(function), record)
        return call

    return decorate


_signature = functools.cache(inspect.signature)


def _make_record(record: Callable[..., TakenT], args: tuple[Any, ...], given: Mapping[str, Any]) -> TakenT:
    signature = _signature(record)
    for name, value in given.items():
        if name not in signature.parameters:
            known = ", ".join(signature.parameters)
            hint = did_you_mean(name, signature.parameters)
            raise _invalid(name, value, "is not an option", f"{hint}the options are {known}")
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        raise TypeError(f'{error}: options are given by name, as in device="cpu"') from None
    return record(*args, **given)


def _annotations(record: Callable[..., Options]) -> dict[str, Any]:
    return {name: each.annotation for name, each in _signature(record).parameters.items()}


def _with_options(text: str | None, record: Callable[..., Options]) -> str | None:
    """A function's docstring with its options' parameters inserted before the Raises section."""
    if text is None:  # python -OO
        return None
    head, raises, tail = text.partition("\nRaises\n------\n")
    classes: Any = inspect.getmro(record)[: inspect.getmro(record).index(Options) + 1]  # type: ignore[arg-type]
    listed = "\n".join(filter(None, map(_parameters_of, classes)))
    return f"{head.rstrip()}\n\nParameters\n----------\n{listed}\n{raises}{tail}"


def _parameters_of(cls: type) -> str:
    text = inspect.cleandoc(cls.__doc__ or "")
    return text.partition("Parameters\n----------\n")[2].partition("\n\nRaises\n------\n")[0]


def _check_name(name: str | None) -> None:
    if name is None:
        return
    require_name("name", name)
    if len(name) > _LONGEST_NAME or not name.isprintable():
        fix = f'use at most {_LONGEST_NAME} printable characters, as in "left"'
        raise _invalid("name", name, "is too long or not printable, so it cannot be logged", fix)


def _check_onnx_runtime(value: object, *, exact: bool) -> None:
    if type(value) not in (bool, type(None)):
        raise _invalid("onnx_runtime", value, "is not a bool", "use True, False or None")
    if exact and value:
        raise _invalid("onnx_runtime", value, "is not exact", "leave it out, or leave out exact=True")


def _check_plan_store(path: object) -> None:
    if path is None:
        return
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise _invalid("plan_store", path, "is not a path", "give a directory, as in 'plans', or None")


def _check_executable(path: object) -> None:
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise _invalid("executable", path, "is not a path", "give a Python, as in '/usr/bin/python3'")
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise _invalid(
            "executable", os.fspath(path), "is not an executable file", "give the path of a Python"
        )


def _check_faults(faults: FaultPlan | None) -> None:
    if faults is None:
        return
    if not isinstance(faults, FaultPlan):
        raise _invalid("faults", faults, "is not a FaultPlan", "build one: FaultPlan().at(3, Fault.STICKY)")


def _check_on_give_up(on_give_up: object) -> None:
    if inspect.iscoroutinefunction(on_give_up):
        problem, fix = "is a coroutine function, which is never awaited", "use a plain function"
    elif on_give_up not in ("raise", "exit") and not callable(on_give_up):
        problem, fix = "is unknown", 'use "raise", "exit", or a function that takes the Escalated event'
    else:
        return
    raise _invalid("on_give_up", on_give_up, problem, fix)


def _invalid(field: str, value: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix=fix)
