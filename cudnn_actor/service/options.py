"""What a service is told when it is spawned."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar

import msgspec

from cudnn_actor.protocol.checks import did_you_mean, require_name, require_seconds, require_whole
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.service.giving_up import OnGiveUp
from cudnn_actor.supervision import Fault, FaultPlan

__all__ = ["NAME", "Isolation", "Options", "make_options", "takes_options"]

NAME = "cudnn"
"""What a service is called that is given no name."""
_LONGEST_NAME = 100

Isolation = Literal["process", "thread"]
_ISOLATIONS = ("process", "thread")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `spawn`, `start` and `child_spec`: their signatures are made of these fields.

    Parameters
    ----------
    name
        What the service is called in its log lines and events, where a process has several; up to 100
        characters, which need not be unique. None: "cudnn", or `child_spec`'s `id`.
    device
        "cpu"; "cuda:N", counted from 0 among the GPUs that this process is shown; "auto": the first GPU where
        one can be used, else the CPU.
    isolation
        "process": the actor runs in a worker process, whose death harms nobody; "thread": on a thread of
        this one. None: a process for a GPU, and wherever `standby`, `verify` or a fault asks for one; else
        a thread.
    faults
        Scripted failures, for tests; None for none.
    mailbox
        Messages that may wait before `submit` and `tell` are refused.
    max_restarts, period_s
        The actor is replaced at most so many times within so many seconds; then the service stops.
    hang_after_s
        Seconds in which an actor that has work may make no progress with it, such as the end of a message,
        before it counts as hung and is replaced.
    workspace_limit
        Bytes of workspace that plans may use; None for the engine's own bound.
    memory_limit
        Bytes that buffers may take from the system, in steps of 2 MiB, so that less holds none; None for no
        limit.
    plan_store
        A directory where built plans are kept between processes, which may share it; None for none. What
        lies there is run as native code, so point it only at a directory that nobody but you can write.
        Without effect on the CPU engine, whose plans take no time to build.
    autotune
        Whether `warm` measures every plan that the library offers and keeps the fastest (in `plan_store`
        too, if there is one). Until it is found the library's own first choice serves, as it does for
        requests that were never warmed. Without effect on the CPU engine.
    standby
        1 keeps a second worker ready, which takes over when the first one dies; on a GPU its context takes
        device memory, some hundred MiB. 0 starts a new one then.
    executable
        Path of the Python that runs the processes of the service; None for the one that runs this process.
        For a frozen application and for embedded Python, where that is not to be found: a Python of the same
        version that has this package and its dependencies.
    verify
        Whether uploaded values are checked after a crash: a checksum of each is kept while nothing else is
        written to its buffer, and a buffer that has another is torn. Uploads and restarts take longer.
    on_give_up
        What happens, beside `ServiceStopped` for all requests, when a service that was ready gives up.
        "raise": the `async with` body is cancelled, and raises it too. "exit": this process gets SIGTERM, and
        ends with status 70 if it is still there after 30 s. A callable gets the `Escalated`, on the
        supervisor's thread; the service's end is told when it returns.

    Raises
    ------
    InvalidRequest
        A value is out of its range, or `isolation="thread"` is given what needs a process.
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
    memory_limit: int | None = None
    plan_store: str | os.PathLike[str] | None = None
    autotune: bool = False
    standby: int = 0
    verify: bool = False
    on_give_up: OnGiveUp = "raise"
    executable: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.isolation is not None and self.isolation not in _ISOLATIONS:
            hint = did_you_mean(self.isolation, _ISOLATIONS)
            raise _invalid("isolation", self.isolation, "is unknown", f'{hint}use "process" or "thread"')
        if type(self.standby) is not int or self.standby not in (0, 1):
            raise _invalid("standby", self.standby, "is neither 0 nor 1", "use 1 for a standby, 0 for none")
        require_whole("mailbox", self.mailbox, 1)
        require_whole("max_restarts", self.max_restarts, 0)
        for name in ("workspace_limit", "memory_limit"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), 1)
        for name in ("period_s", "hang_after_s"):
            require_seconds(name, getattr(self, name), positive=True)
        if self.hang_after_s > threading.TIMEOUT_MAX:
            raise _invalid(
                "hang_after_s", self.hang_after_s, "is longer than a thread can wait", "1e6 is eleven days"
            )
        for name in ("autotune", "verify"):
            if type(getattr(self, name)) is not bool:
                raise _invalid(name, getattr(self, name), "is not a bool", "use True or False")
        _check_plan_store(self.plan_store)
        _check_executable(self.executable)
        _check_faults(self.faults)
        _check_on_give_up(self.on_give_up)
        if self.isolation == "thread" and (needy := self._needs_process()) is not None:
            value = getattr(self, needy)
            raise _invalid(needy, value, "needs a worker process", 'use isolation="process", or leave it out')

    def _needs_process(self) -> str | None:
        """The option that only a worker process can honour; None where there is none."""
        if self.standby:
            return "standby"
        if self.verify:
            return "verify"
        kills = self.faults is not None and any(rule.fault is Fault.KILL for rule in self.faults.rules)
        return "faults" if kills else None

    def isolation_on(self, device: str) -> str:
        """What `isolation` stands for on a device."""
        if self.isolation is not None:
            return self.isolation
        return "thread" if device == "cpu" and self._needs_process() is None else "process"


def make_options(given: Mapping[str, Any]) -> Options:
    """Options from keyword arguments. Raises `InvalidRequest`, also for a name that is none."""
    return _made(Options, (), given)


P = ParamSpec("P")
TakenT = TypeVar("TakenT", bound=Options)
R = TypeVar("R")


def takes_options(record: Callable[P, TakenT]) -> Callable[[Callable[[TakenT], R]], Callable[P, R]]:
    """Have a function called with the fields of a record as its arguments, where it is written to take one.

    So the fields, their types, defaults and meanings are written once, in `Options`. `help` and
    `inspect.signature` show them, and type checkers know them, as if each function had listed them itself.

    Parameters
    ----------
    record
        `Options`, or a class derived from it with what the function takes besides.
    """

    def decorate(function: Callable[[TakenT], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            return function(_made(record, args, given))

        shown: Any = call
        del shown.__wrapped__  # whose one parameter is not what a caller gives
        returns = inspect.signature(function).return_annotation
        shown.__signature__ = _signature(record).replace(return_annotation=returns)
        shown.__annotations__ = {**_annotations(record), "return": returns}
        shown.__doc__ = _documented(inspect.getdoc(function), record)
        return call

    return decorate


_signature = functools.cache(inspect.signature)


def _made(record: Callable[..., TakenT], args: tuple[Any, ...], given: Mapping[str, Any]) -> TakenT:
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


def _documented(text: str | None, record: Callable[..., Options]) -> str | None:
    """A function's docstring with the parameters of its options before what it raises."""
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
        fix = f'give a short one of printable characters, as in "left"; at most {_LONGEST_NAME}'
        raise _invalid("name", name, "does not fit a line of the log", fix)


def _check_plan_store(path: object) -> None:
    if path is None:
        return
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise _invalid(
            "plan_store", path, "is not a path", "give a directory's, as in 'plans'; None for none"
        )


def _check_executable(path: object) -> None:
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise _invalid("executable", path, "is not a path", "give a Python's, as in '/usr/bin/python3'")
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise _invalid(
            "executable", os.fspath(path), "is not a program", "give the path of a Python that exists"
        )


def _check_faults(faults: FaultPlan | None) -> None:
    if faults is None:
        return
    if not isinstance(faults, FaultPlan):
        raise _invalid("faults", faults, "is not a FaultPlan", "build one: FaultPlan().at(3, Fault.STICKY)")


def _check_on_give_up(on_give_up: object) -> None:
    if inspect.iscoroutinefunction(on_give_up):
        problem, fix = "is a coroutine function, which nobody would await", "use a plain function"
    elif on_give_up not in ("raise", "exit") and not callable(on_give_up):
        problem, fix = "is unknown", 'use "raise", "exit", or a function that takes the Escalated event'
    else:
        return
    raise _invalid("on_give_up", on_give_up, problem, fix)


def _invalid(field: str, value: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix=fix)
