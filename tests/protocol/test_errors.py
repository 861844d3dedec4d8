"""Every error that a caller can see."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.protocol import (
    BufferRef,
    ContextLost,
    CudnnActorError,
    DeadlineExceeded,
    DType,
    ErrorRecord,
    ExecutionFailed,
    InvalidRequest,
    MailboxFull,
    MalformedMessage,
    NoEventLoop,
    NotDeployed,
    NoValues,
    OutcomeUnknown,
    OutOfDescriptors,
    OutOfMemory,
    QuarantinedRequest,
    ReentrantAsk,
    ServiceStopped,
    StaleBufferError,
    StaleReason,
    StartFailed,
    TensorSpec,
    UnsupportedGraph,
    decode_reply,
    encode_reply,
    errors,
)
from cudnn_actor.protocol.errors import Words

from ..in_one_test import cases_in_one_test, in_one_test

EVERY_ERROR: list[CudnnActorError] = [
    CudnnActorError("something of its own"),
    InvalidRequest(field="stride", value=(0, 1), problem="holds 0", fix="use 1"),
    InvalidRequest(field="layout", value="NWHC", problem="is not a layout", fix="use NHWC"),
    InvalidRequest(field="y", value=Words("dtype int4"), problem="is no type", fix="use int8"),
    ReentrantAsk(field="ask", value="ConvFwd", problem="never answers", fix="use submit"),
    MalformedMessage(detail="truncated"),
    *(StaleBufferError(slot=3, generation=2**64 - 1, reason=reason) for reason in StaleReason),
    UnsupportedGraph(engine="cuda", digest="ab" * 32, detail="int8 backward"),
    UnsupportedGraph(engine="cuda", digest="ab" * 32, detail="int8 backward", reproduce="eNp"),
    OutOfMemory(requested=2**40, in_use=5, limit=None),
    OutOfMemory(requested=2**40, in_use=5, limit=7),
    OutOfDescriptors(limit=1024),
    OutOfDescriptors(limit=None),
    NoEventLoop(library=None),
    NoEventLoop(library="trio"),
    NoValues(what="<buffer 3.1>", fix="download it"),
    NotDeployed(model=3, inputs="", unloaded=True),
    NotDeployed(model=3, inputs="x: float32 (2, 3)", unloaded=False),
    MailboxFull(capacity=1024),
    DeadlineExceeded(timeout_s=0.25, started=False),
    DeadlineExceeded(timeout_s=0.25, started=True),
    ServiceStopped(reason="closed"),
    StartFailed(detail="no GPU"),
    ExecutionFailed(status="CUDNN_STATUS_X", detail="launch failed", plan="cpu/conv_fwd/12"),
    ExecutionFailed(status="CUDNN_STATUS_X", detail="launch failed", plan="cpu/conv_fwd/12", reproduce="eNp"),
    ContextLost(status="CUDA_ERROR_ILLEGAL_ADDRESS", detail="gone"),
    OutcomeUnknown(request_id=9, cause="killed", why="it accumulates"),
    OutcomeUnknown(request_id=9, cause="killed", why="it was sent with again=False", torn=False),
    QuarantinedRequest(request_id=9, digest="cd" * 32, cause="killed", reproduce="eNp"),
    QuarantinedRequest(request_id=9, digest="", cause="killed", message="WriteWeights"),
    OutOfMemory(requested=0, in_use=7, limit=None, injected=True, where="y"),
]
CLASSES: list[type[CudnnActorError]] = [
    cls
    for cls in map(errors.__dict__.get, errors.__all__)
    if inspect.isclass(cls) and issubclass(cls, CudnnActorError)
]


def facts_of(error: CudnnActorError) -> dict[str, object]:
    return {name: value for name, value in vars(error).items() if not name.startswith("_")}


def is_same(one: CudnnActorError, other: object) -> bool:
    return (
        isinstance(other, CudnnActorError)
        and type(one) is type(other)
        and str(one) == str(other)
        and facts_of(one) == facts_of(other)
    )


def test_the_list_above_holds_every_class() -> None:
    assert {type(error) for error in EVERY_ERROR} == set(CLASSES)


@in_one_test("error", EVERY_ERROR)
def test_an_error_survives_pickling_and_copying(error: CudnnActorError) -> None:
    assert is_same(error, pickle.loads(pickle.dumps(error)))
    assert is_same(error, copy.deepcopy(error))


@in_one_test("error", EVERY_ERROR)
def test_an_error_survives_the_wire(error: CudnnActorError) -> None:
    record = decode_reply(encode_reply(error.to_record()))
    assert isinstance(record, ErrorRecord)
    assert is_same(error, record.to_error())


@in_one_test("cls", CLASSES)
def test_a_class_says_when_it_is_raised_and_what_to_do(cls: type[CudnnActorError]) -> None:
    assert inspect.getdoc(cls).startswith("Raised when ")  # type: ignore[union-attr]
    assert cls.ran in (True, False, None)
    assert isinstance(cls.retry_safe, bool)


@in_one_test("error", EVERY_ERROR[1:])
def test_every_fact_is_a_declared_attribute(error: CudnnActorError) -> None:
    declared = {name for cls in type(error).__mro__ for name in vars(cls).get("__annotations__", {})}
    assert set(facts_of(error)) <= declared
    assert facts_of(error)


def test_a_request_that_may_have_run_is_never_safe_to_send_again() -> None:
    assert all(cls.ran is False for cls in CLASSES if cls.retry_safe)


@cases_in_one_test
@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (EVERY_ERROR[1], "use 1"),
        (StaleBufferError(slot=1, generation=1, reason="torn"), "upload or compute it again"),
        (OutOfMemory(requested=1, in_use=1, limit=1), "free buffers"),
        (OutOfMemory(requested=1, in_use=1, limit=None), "; free buffers, or send less at once"),
        (OutOfMemory(requested=1, in_use=0, limit=None), "; send less at once (a smaller batch)"),
        (OutOfMemory(requested=1, in_use=0, limit=None, ulimit="v"), "own limit (ulimit -v), or send less"),
        (OutOfMemory(requested=2, in_use=1, limit=None, most=1), "the machine has 1; send less at once"),
        (OutOfDescriptors(limit=1), "ulimit -n"),
        (NoEventLoop(library="trio"), "asyncio.run"),
        (MailboxFull(capacity=1), "await ask"),
        (DeadlineExceeded(timeout_s=1, started=False), "allow more time"),
        (ServiceStopped(reason="closed"), "spawn a new one"),
        (StartFailed(detail="no"), "cudnn-actor doctor"),
        (UnsupportedGraph(engine="cpu", digest="a", detail="b"), "cudnn-actor docs support"),
        (ContextLost(status="a", detail="b"), "upload again"),
        (OutcomeUnknown(request_id=1, cause="b", why="c"), "upload or compute it again"),
        (OutcomeUnknown(request_id=1, cause="b", why="c", torn=False), "so none is torn: send it again"),
        (QuarantinedRequest(request_id=1, digest="a", cause="b"), "change the request"),
        (
            QuarantinedRequest(request_id=1, digest="", cause="b", message="Fill"),
            "this Fill was running at two crashes (b); find the cause before you send another",
        ),
        (
            OutOfMemory(requested=1, in_use=1, limit=1, injected=True),
            "out of memory: injected by the fault plan; no memory is short, so send it again",
        ),
        (MalformedMessage(detail="a"), "same release"),
        (ExecutionFailed(status="a", detail="b", plan="c:1"), "plan c:1 failed with a: b; its outputs are"),
        (ExecutionFailed(status="a", detail="b", plan="c"), "request c failed with a: b; its outputs are"),
        (ExecutionFailed(status="a", detail="b", plan="c:1", of_model=True), "it may be sent again"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_text_names_the_fix(error: CudnnActorError, fix: str) -> None:
    assert fix in str(error)


def test_an_error_of_a_plan_ends_with_the_command_that_reproduces_it() -> None:
    failed = ExecutionFailed(status="a", detail="b", plan="c", reproduce="eNp1")
    unsupported = UnsupportedGraph(engine="cpu", digest="a", detail="b", reproduce="eNp1")
    quarantined = QuarantinedRequest(request_id=1, digest="a", cause="b", reproduce="eNp1")
    for error in (failed, unsupported, quarantined):
        assert str(error).endswith("; to reproduce: cudnn-actor reproduce eNp1")
    assert "reproduce" not in str(ExecutionFailed(status="a", detail="b", plan="c"))


@pytest.mark.parametrize(
    ("cls", "also"),
    [
        (InvalidRequest, ValueError),
        (ReentrantAsk, InvalidRequest),
        (MalformedMessage, ValueError),
        (StaleBufferError, LookupError),
        (OutOfMemory, MemoryError),
        (DeadlineExceeded, TimeoutError),
    ],
)
def test_errors_are_caught_under_their_usual_names(cls: type[Exception], also: type[Exception]) -> None:
    assert issubclass(cls, also)


def test_everything_is_caught_under_the_root() -> None:
    assert all(issubclass(cls, CudnnActorError) for cls in CLASSES)


@pytest.mark.parametrize(
    "record",
    [
        ErrorRecord(kind="SystemExit", facts={}),
        ErrorRecord(kind="MailboxFull", facts={}),
        ErrorRecord(kind="MailboxFull", facts={"capacity": 1, "more": 2}),
        ErrorRecord(kind="StaleBufferError", facts={"slot": 1, "generation": 1, "reason": "tired"}),
        ErrorRecord(kind="DeadlineExceeded", facts={"timeout_s": "soon", "started": True}),
        ErrorRecord(kind="UnsupportedGraph", facts={"engine": "cpu", "digest": None, "detail": ""}),
        ErrorRecord(kind="CudnnActorError", facts={}),
    ],
    ids=repr,
)
def test_a_record_of_no_error_is_malformed(record: ErrorRecord) -> None:
    with pytest.raises(MalformedMessage):
        record.to_error()


def test_a_string_has_its_quotes_and_what_describes_a_value_has_none() -> None:
    texts = [
        str(InvalidRequest(field="x", value=value, problem="is wrong", fix="mend it"))
        for value in ("1", 1, "", DType.INT8, Words("dtype int4"), b"1")
    ]
    shown = [text.removeprefix("x=").removesuffix(": is wrong; mend it") for text in texts]
    assert shown == ["'1'", "1", "''", "'int8'", "dtype int4", "b'1'"]


@pytest.mark.parametrize("value", ["long" * 100, ["long"] * 100, 10**5000, -(10**5000)], ids=lambda _: "")
def test_the_text_of_a_long_value_is_short(value: object) -> None:
    error = InvalidRequest(field="x", value=value, problem="is long", fix="shorten it")
    assert len(str(error)) < 250
    assert is_same(error, pickle.loads(pickle.dumps(error)))


def test_a_value_that_is_no_plain_data_is_kept_as_its_text() -> None:
    error = InvalidRequest(field="x", value=object, problem="is a class", fix="pass an object")
    assert error.value == "<class 'object'>"
    msgspec.msgpack.encode(error.to_record())


@pytest.mark.parametrize(
    "use",
    [np.asarray, lambda ref: ref + 1, lambda ref: 2 * ref, lambda ref: np.ones(3) - ref, lambda ref: -ref],
)
def test_a_reference_says_that_its_values_are_to_be_downloaded(use: Callable[[Any], object]) -> None:
    ref = BufferRef(slot=3, generation=1, spec=TensorSpec.packed((3,)), device="cpu")
    with pytest.raises(NoValues, match=r"<buffer 3\.1 .*> holds no values .*; download it: array = await"):
        use(ref)
