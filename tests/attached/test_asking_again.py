"""A client sends the same message again, in fewer steps: what holds for the first time holds then, too."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor import CudnnActorError, CudnnRef, Receipt, ServiceStopped, StaleBufferError, connect
from cudnn_actor.actors import submit
from cudnn_actor.actors.waking import Waking
from cudnn_actor.attached import ServedSocket, serve_socket
from cudnn_actor.attached.client import kept_messages
from cudnn_actor.attached.server.received import Received
from cudnn_actor.attached.wire import ExportBuffer, ForgetMessages, Request, Requests
from cudnn_actor.broker.service_state import Export
from cudnn_actor.messages import ConvFwd, Download, Fill
from cudnn_actor.processes.channel import Channel
from cudnn_actor.protocol.messages.codec import encode_message

from ..inside import answers_cannot_be_taken, requests_cannot_be_noted, service_behind, sessions_of
from ..patience import PATIENCE_S
from ..service.injection_program import Injected, Injector
from ..service.rigs import Gate, Trio, in_thread, outcome, spawn_gated

WINDOW = 8


class Rig(NamedTuple):
    """A service, its gate and its socket, and a client with messages that it may send again."""

    gpu: CudnnRef
    gate: Gate
    served: ServedSocket
    client: CudnnRef
    one: Trio
    product: ConvFwd
    total: ConvFwd

    def again(self) -> asyncio.Future[Any] | None:
        """The future of the product, if it may be sent again."""
        future: asyncio.Future[Any] | None = service_behind(self.client).state.mailbox.ask_again(self.product)
        return future

    def sent(self, way: str, message: ConvFwd | Fill) -> asyncio.Future[Receipt]:
        """The answer to a message that is sent in one of the two ways."""
        if way == "submit":
            return self.client.submit(message)
        return asyncio.ensure_future(self.client.ask(message))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    gate = Gate()
    async with (
        asyncio.timeout(PATIENCE_S),
        spawn_gated(gate) as gpu,
        serve_socket(gpu, tmp_path / "s", requests=WINDOW) as served,
        connect(served.path) as client,
    ):
        one = await Trio.on(client)
        made = Rig(gpu, gate, served, client, one, one.product(), one.sum())
        assert made.again() is None  # not before the first time
        for message in (made.product, made.total):
            await client.ask(message)
        yield made


async def turns() -> None:
    """Let the loop, which is the client's and the server's, do what it has to do."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_message_that_was_sent_is_sent_again(rig: Rig) -> None:
    future = rig.again()
    assert future is not None
    assert isinstance(await future, Receipt)
    assert rig.product == rig.one.product()
    assert service_behind(rig.client).state.mailbox.ask_again(rig.one.product()) is None  # another object


async def test_it_overtakes_no_message_that_waits(rig: Rig) -> None:
    rig.client.tell(Fill(dst=rig.one.x, value=5.0))
    assert rig.again() is None
    assert isinstance(await rig.client.ask(rig.product), Receipt)
    assert await rig.one.result() == 10.0


@pytest.mark.parametrize("what", ["told", "submitted", "observer", "end"])
async def test_one_who_is_woken_by_an_answer_overtakes_nothing_either(rig: Rig, what: str) -> None:
    """What keeps a message from being sent again counts from the moment on at which a woken task brings it
    about."""
    link = service_behind(rig.client).state.mailbox

    async def asks() -> object:
        await rig.client.ask(rig.product)
        if what == "told":
            rig.client.tell(Fill(dst=rig.one.x, value=5.0))
        elif what == "submitted":
            for value in (4.0, 5.0):  # the first is sent at once, so the second waits
                rig.client.submit(Fill(dst=rig.one.x, value=value))
        elif what == "observer":
            link.observer = object()
        else:
            service_behind(rig.client).end("tired")
        refused = rig.again() is None
        link.observer = None
        if what == "end":
            return refused
        await rig.client.ask(rig.product)
        return refused

    first, second = await asyncio.gather(asks(), asks(), return_exceptions=True)
    assert first is True
    # If the second answer comes in another frame, the task gets the end of the service instead.
    assert second is True or (what == "end" and isinstance(second, ServiceStopped))
    if what in ("told", "submitted"):
        assert await rig.one.result() == 10.0


@pytest.mark.parametrize("way", ["ask", "submit"])
async def test_messages_keep_their_order_whichever_way_they_are_sent(rig: Rig, way: str) -> None:
    """The second of each round reads what the first writes."""
    answers = []
    for number in range(WINDOW):
        answers.append(rig.sent(way, Fill(dst=rig.one.y, value=float(number))))
        answers.append(rig.sent(way, rig.total))
        await turns()
    receipts = await asyncio.gather(*answers)
    numbers = [receipt.request_id for receipt in receipts]
    assert numbers == sorted(numbers)
    assert await rig.one.result() == WINDOW - 1 + 6.0


async def test_a_buffer_of_it_that_was_freed_is_stale_at_once(rig: Rig) -> None:
    await rig.client.free(rig.one.x)
    assert rig.again() is None
    with rig.gate.closed(), pytest.raises(StaleBufferError):
        await rig.client.ask(rig.product)


@pytest.mark.parametrize("way", ["ask", "submit"])
async def test_the_error_of_an_answer_is_raised(rig: Rig, way: str) -> None:
    await rig.gpu.free(rig.one.x)  # the client does not know
    errors = [await outcome(future) for future in [rig.sent(way, rig.product) for _ in range(3)]]
    assert [type(error) for error in errors] == [StaleBufferError] * 3
    assert isinstance(await rig.client.download(rig.one.y), object)  # the connection goes on


@pytest.mark.parametrize("way", ["ask", "submit"])
async def test_one_that_is_cancelled_before_it_has_started_does_not_run(rig: Rig, way: str) -> None:
    before = rig.gate.passed
    with rig.gate.closed():
        first = rig.sent(way, rig.product)
        await in_thread(rig.gate.wait_for_arrival)
        late = [rig.sent(way, rig.total) for _ in range(3)]
        await turns()  # they are sent
        for each in late:
            each.cancel()
        await turns()  # so is that they are withdrawn
    assert isinstance(await first, Receipt)
    await rig.client.drain()
    assert rig.gate.passed == before + 1
    assert isinstance(await rig.client.ask(rig.product), Receipt)


@pytest.mark.parametrize("way", ["ask", "submit"])
async def test_one_that_is_cancelled_while_it_runs_is_done_all_the_same(rig: Rig, way: str) -> None:
    with rig.gate.closed():
        running = rig.sent(way, rig.total)
        await in_thread(rig.gate.wait_for_arrival)
        running.cancel()
        await turns()
    await rig.client.drain()
    assert running.cancelled()
    assert await rig.one.result() == 6.0 + 12.0


@pytest.mark.parametrize("way", ["ask", "submit"])
async def test_all_that_are_on_their_way_get_the_end(rig: Rig, way: str) -> None:
    with rig.gate.closed():
        waiting = [rig.sent(way, rig.product) for _ in range(4)]
        await in_thread(rig.gate.wait_for_arrival)
        for session in tuple(sessions_of(rig.served)):
            session.end()
        errors = [await outcome(future) for future in waiting]
    assert all(isinstance(error, ServiceStopped) for error in errors), errors
    assert rig.again() is None
    with pytest.raises(ServiceStopped):
        await rig.client.ask(rig.product)


async def test_it_is_refused_as_soon_as_the_client_ends(rig: Rig) -> None:
    service_behind(rig.client).end("tired")
    assert rig.again() is None
    with pytest.raises(ServiceStopped, match="tired"):
        await rig.client.ask(rig.product)


@pytest.mark.parametrize("way", ["ask", "submit"])
async def test_no_more_than_the_window_are_on_their_way(rig: Rig, way: str) -> None:
    (session,) = sessions_of(rig.served)
    with rig.gate.closed():
        answers = [rig.sent(way, rig.product) for _ in range(WINDOW)]
        await in_thread(rig.gate.wait_for_arrival)
        await turns()
        assert rig.again() is None
        answers += [rig.sent("ask", rig.product) for _ in range(2 * WINDOW)]
        await turns()
        assert len(session.asked) == WINDOW
    assert [type(each) for each in await asyncio.gather(*answers)] == [Receipt] * 3 * WINDOW


async def test_another_loop_may_send_it_too(rig: Rig) -> None:
    assert await in_thread(lambda: asyncio.run(asks_from_here(rig))) == [None, Receipt]


async def asks_from_here(rig: Rig) -> list[Any]:
    return [rig.again(), type(await rig.client.ask(rig.product))]


async def test_an_observer_is_told_of_it(rig: Rig) -> None:
    class Observer:
        def __init__(self) -> None:
            self.told: list[str] = []

        def sent(self, _: object) -> None:
            self.told.append("sent")

        def answered(self, *_: object) -> None:
            self.told.append("answered")

    link: Any = service_behind(rig.client).state.mailbox
    observer = link.observer = Observer()
    assert rig.again() is None
    await rig.client.ask(rig.product)
    link.observer = None
    await rig.client.ask(rig.product)
    assert observer.told == ["sent", "answered"]


class _Cycle:
    """Garbage that sends a message when it is collected."""

    def __init__(self, send: Callable[[], object]) -> None:
        self.me, self._send = self, send

    def __del__(self) -> None:
        self._send()


@pytest.mark.parametrize("timeout", [None, PATIENCE_S], ids=["again", "with an envelope"])
async def test_what_a_finalizer_sends_while_another_message_is_sent_costs_neither(
    rig: Rig, timeout: float | None
) -> None:
    answers: list[asyncio.Future[Receipt]] = []
    thresholds = gc.get_threshold()

    def send() -> None:
        answers.append(rig.client.submit(rig.total))

    gc.disable()
    try:
        for after in range(-2, 40):  # the collector runs when so many more objects have been made
            for _ in range(2):  # so that the next one waits for a frame
                send()
            _Cycle(send)
            gc.set_threshold(gc.get_count()[0] + after, 1000, 1000)
            gc.enable()
            answers.append(rig.client.submit(rig.product, timeout=timeout))
            gc.disable()
            gc.collect()
            assert [type(each) for each in await asyncio.gather(*answers)] == [Receipt] * 4
            answers.clear()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


async def test_what_a_finalizer_asks_while_callers_are_woken_is_sent(rig: Rig) -> None:
    """Wherever an object is made for a frame: also where the interpreter has no tuple to use again."""
    answers: list[asyncio.Future[Receipt]] = []
    thresholds, link = gc.get_threshold(), service_behind(rig.client).state.mailbox

    def send() -> None:
        answers.append(rig.client.submit(rig.total))

    gc.disable()
    try:
        taken: list[tuple[int, ...]] = []

        def woken(after: int, _: object) -> None:
            send()
            send()
            _Cycle(send)
            taken.extend((each, each, each, -each) for each in range(3000))
            gc.set_threshold(gc.get_count()[0] + after, 1000, 1000)
            gc.enable()
            link.turn()
            gc.disable()
            gc.collect()

        for after in range(12):
            woken_ones = [rig.client.submit(rig.product) for _ in range(3)]
            woken_ones[1].add_done_callback(functools.partial(woken, after))
            await asyncio.gather(*woken_ones)
            assert [type(each) for each in await asyncio.gather(*answers)] == [Receipt] * 3
            answers.clear()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


async def test_what_a_finalizer_sends_while_a_frame_is_sent_goes_behind_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if all numbers of messages have to be taken back for it."""
    answers: list[asyncio.Future[Receipt]] = []
    send, finalizers = Channel.send, [False]

    def finalizing(channel: Channel, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        if isinstance(frame, Requests) and finalizers:
            del finalizers[0]
            monkeypatch.setattr(kept_messages, "_MOST", 1)
            answers.append(rig.client.submit(rig.one.product()))
        send(channel, frame, descriptors)

    monkeypatch.setattr(Channel, "send", finalizing)
    answers.append(rig.client.submit(rig.product))
    assert not finalizers
    inner, outer = await asyncio.gather(*answers)
    assert outer.request_id < inner.request_id


async def test_what_a_finalizer_sends_while_a_buffer_is_moved_goes_behind_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[asyncio.Future[Receipt]] = []
    send = Channel.send

    def finalizing(channel: Channel, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        if isinstance(frame, ExportBuffer):
            answers.append(rig.client.submit(rig.product))
        send(channel, frame, descriptors)

    link = service_behind(rig.client).state.mailbox
    monkeypatch.setattr(Channel, "send", finalizing)
    moved = submit(link, Export(buffer=rig.product.x))
    (answer,) = answers
    await asyncio.wait([moved])
    assert not isinstance(moved.exception(), ServiceStopped)
    assert isinstance(await answer, Receipt)


async def test_if_an_answer_cannot_be_taken_nobody_waits_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for want of memory. The answers before it are delivered, and the connection ends."""
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    with rig.gate.closed():
        before = rig.client.submit(rig.product)
        lost = [rig.client.submit(message) for message in (rig.one.product(), rig.product, rig.product)]
        await in_thread(rig.gate.wait_for_arrival)
        answers_cannot_be_taken(monkeypatch)
    outcomes = await asyncio.gather(before, *lost, return_exceptions=True)
    assert isinstance(outcomes[0], Receipt)
    assert all(isinstance(outcome, ServiceStopped) for outcome in outcomes[1:])
    assert "could not take an answer" in str(outcomes[1])
    assert [type(error) for error in reported] == [MemoryError]


class Frames:
    """The frames of requests, and those that take numbers back, that clients of this process send."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sent: list[Any] = []
        send = Channel.send

        def noting(channel: Channel, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
            self.sent.append(frame)
            send(channel, frame, descriptors)

        patch.setattr(Channel, "send", noting)

    def bodies(self) -> list[bytes | int]:
        """What names the message of each request, in order. From here on, only later ones count."""
        requests = [each for frame in self.sent if isinstance(frame, Requests) for each in frame.requests]
        self.sent.clear()
        return [each if isinstance(each, int) else each.body for each in requests]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages a server has kept, after each of its requests."""
    numbers: list[int] = []
    note = Received.note_number

    def noting(received: Received, request: Request | int) -> None:
        note(received, request)
        numbers.append(len(received.kept))

    monkeypatch.setattr(Received, "note_number", noting)
    return numbers


@pytest.mark.parametrize("way", ["ask", "submit"])
async def test_it_is_a_number_in_its_frame(rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    frames = Frames(monkeypatch)
    await asyncio.gather(*[rig.sent(way, rig.product) for _ in range(3)], rig.sent(way, rig.total))
    one, two, three, other = frames.bodies()
    assert one == two == three != other
    assert {type(one), type(other)} == {int}
    await rig.client.ask(rig.product, timeout=PATIENCE_S)  # with an envelope
    assert frames.bodies() == [one]
    await rig.client.ask(rig.one.product())  # equal, but another object
    assert [type(body) for body in frames.bodies()] == [bytes]
    await rig.client.write(rig.one.x, [[[[5.0]]]])
    await rig.client.ask(rig.product)
    assert await rig.one.result() == 10.0


async def test_no_more_messages_have_numbers_than_the_server_keeps(
    rig: Rig, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers are taken back then."""
    monkeypatch.setattr(kept_messages, "_MOST", 4)
    frames = Frames(monkeypatch)
    messages = [rig.one.product() for _ in range(9)]
    for message in messages * 3:
        await rig.client.ask(message)
    assert max(kept) == 4
    assert sum(isinstance(frame, ForgetMessages) for frame in frames.sent) > 3
    frames.sent.clear()
    for _ in range(3):
        await rig.client.ask(messages[-1])
    assert [type(body) for body in frames.bodies()] == [int] * 3
    assert await rig.one.result() == 6.0


async def test_no_more_bytes_of_messages_have_numbers_than_the_server_keeps(
    rig: Rig, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = len(encode_message(rig.product))
    monkeypatch.setattr(kept_messages, "_BYTES", 3 * nbytes)
    for message in [rig.one.product() for _ in range(8)] * 2:
        await rig.client.ask(message)
    assert max(kept) == 3
    monkeypatch.setattr(kept_messages, "_LONGEST", nbytes - 1)
    frames, long = Frames(monkeypatch), rig.one.product()
    for _ in range(3):
        await rig.client.ask(long)
    assert [type(body) for body in frames.bodies()] == [bytes] * 3


async def test_a_message_that_could_not_be_decoded_fails_each_time_and_costs_no_connection(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError

    message = rig.one.product()
    with monkeypatch.context() as patched:
        patched.setattr(Received, "decode", fail)
        failed = [await outcome(rig.client.submit(message)) for _ in range(2)]
    assert [type(error) for error in failed] == [CudnnActorError] * 2
    assert isinstance(await rig.client.ask(message), Receipt)


@pytest.fixture
async def reported() -> list[Any]:
    """The exceptions of callbacks of the loop."""
    exceptions: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: exceptions.append(context["exception"])
    )
    return exceptions


class Interrupt(BaseException):
    """Of a signal handler."""


@pytest.mark.parametrize("error", [MemoryError, Interrupt])
async def test_if_receipts_cannot_be_given_nobody_waits_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, reported: list[Any], error: type[BaseException]
) -> None:
    """All get the end of the connection."""

    def fail(*_: object) -> None:
        raise error

    with rig.gate.closed():
        lost = [rig.sent(way, rig.product) for way in ("submit", "ask", "submit", "ask")]
        await in_thread(rig.gate.wait_for_arrival)
        monkeypatch.setattr(Waking, "set_results", fail)
    outcomes = await asyncio.gather(*lost, return_exceptions=True)
    assert [isinstance(each, ServiceStopped) for each in outcomes] == [True] * 4
    assert [type(each) for each in reported] == [error]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("error", [MemoryError, Interrupt])
async def test_requests_whose_sending_fails_are_sent_after_all_or_get_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, reported: list[Any], error: type[BaseException], times: int
) -> None:
    send, errors = Channel.send, [error() for _ in range(times)]

    def failing(channel: Channel, frame: Any, descriptors: tuple[int, ...] = ()) -> None:
        if errors and isinstance(frame, Requests):
            raise errors.pop()
        send(channel, frame, descriptors)

    with rig.gate.closed():
        waiting = [rig.sent("submit", rig.product)]
        await in_thread(rig.gate.wait_for_arrival)
        monkeypatch.setattr(Channel, "send", failing)
        waiting += [rig.sent(way, rig.product) for way in ("submit", "ask")]
        await turns()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(each, Receipt if times == 1 else ServiceStopped) for each in outcomes] == [True] * 3
    assert [type(each) for each in reported] == [error]


async def test_a_request_that_cannot_be_noted_ends_the_connection(rig: Rig) -> None:
    """As for want of memory: those behind it would have wrong numbers."""

    requests_cannot_be_noted(rig.client)
    errors = [await outcome(rig.sent("ask", rig.product)), await outcome(rig.sent("ask", rig.total))]
    assert [type(error) for error in errors] == [MemoryError, MemoryError]
    with pytest.raises(MemoryError):
        rig.client.submit(rig.one.product())
    await turns()
    assert isinstance(await outcome(rig.sent("ask", rig.total)), ServiceStopped)


async def test_a_signal_handler_that_raises_while_answers_are_delivered_leaves_nobody_waiting(
    rig: Rig, reported: list[Any]
) -> None:
    """Requests with and without an envelope, of which some give values, wherever it raises."""
    injector, raised = Injector("/client/delivery.py", "/client/link.py", "/actors/waking.py"), 0
    for at in itertools.count(1):
        async with connect(rig.served.path) as client:
            one = await Trio.on(client)
            message = one.product()
            await client.ask(message)
            with rig.gate.closed():
                before = rig.gpu.submit(rig.product)
                await in_thread(rig.gate.wait_for_arrival)
                waiting: list[asyncio.Future[Any]]
                waiting = [asyncio.ensure_future(client.ask(message)) for _ in range(2)]
                waiting += [client.submit(message, timeout=PATIENCE_S), client.submit(message)]
                waiting += [client.submit(Download(src=one.y))]
                await turns()
            with injector.armed(at):
                await asyncio.wait([before, *waiting], timeout=PATIENCE_S)
            outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)
            assert all(isinstance(each, Receipt | np.ndarray | ServiceStopped) for each in outcomes), outcomes
            await before
        raised += bool(injector.where)
        if not injector.where:
            break
    assert raised > 10
    assert {type(error) for error in reported} == {Injected}
