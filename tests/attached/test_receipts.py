"""`Receipts`: several answers that are receipts, as a server sends them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from cudnn_actor import CudnnRef, Receipt, ServiceStopped
from cudnn_actor.attached.server.sending import frame_of
from cudnn_actor.attached.wire import FROM_SERVER, Answers, Done, Dropped, Receipts
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame

from ..patience import PATIENCE_S
from ..service.rigs import Trio


def receipt(number: int, plan: str = "cpu/conv", generation: int = 1) -> Receipt:
    return Receipt(request_id=number, generation=generation, plan=plan, queue_us=number + 0.5, run_us=2.0)


@pytest.mark.parametrize("plans", [["cpu/conv"] * 3, ["cpu/conv", "cpu/add", "cpu/conv"], ["a", "b", "c"]])
def test_receipts_arrive_as_they_were(plans: list[str]) -> None:
    answers = [Done(7 * number, receipt(number, plan)) for number, plan in enumerate(plans)]
    frame = FROM_SERVER.decode(msgspec.msgpack.encode(frame_of(answers)))
    assert isinstance(frame, Receipts)
    assert list(map(Done, frame.numbers, frame.receipts())) == answers
    assert isinstance(frame.plans, str) is (len(set(plans)) == 1)


@pytest.mark.parametrize(
    "answers",
    [
        [Done(1, receipt(1))],
        [Done(1, receipt(1)), Dropped(2)],
        [Done(1, receipt(1)), Done(2, receipt(2, generation=2))],
    ],
    ids=["one", "another answer", "two incarnations"],
)
def test_other_answers_are_no_receipts(answers: list[Done | Dropped]) -> None:
    assert frame_of(answers) == Answers([*answers])


WRONG: dict[str, Receipts] = {
    "number": Receipts([1], 1, "", [1, 2], [0.0, 0.0], [0.0, 0.0]),
    "plan": Receipts([1, 2], 1, ["a"], [1, 2], [0.0, 0.0], [0.0, 0.0]),
    "request id": Receipts([1, 2], 1, "", [1], [0.0, 0.0], [0.0, 0.0]),
    "wait": Receipts([1, 2], 1, ["a", "b"], [1, 2], [0.0], [0.0, 0.0]),
    "run": Receipts([1, 2], 1, "", [1, 2], [0.0, 0.0], [0.0]),
}


@pytest.mark.parametrize("missing", WRONG)
def test_lists_of_several_lengths_are_no_valid_frame(missing: str) -> None:
    with pytest.raises(BadFrame, match="several lengths"):
        WRONG[missing].receipts()


@pytest.mark.parametrize("numbers", [[1 << 40, 1 << 41], [6, 6]], ids=["unknown", "twice"])
async def test_receipts_of_no_request_end_the_connection(
    client: CudnnRef, monkeypatch: pytest.MonkeyPatch, numbers: list[int]
) -> None:
    """The connection's sixth and seventh requests wait."""
    trio = await Trio.on(client)
    message = trio.product()
    await client.ask(message)
    await client.ask(message)
    given = Receipts(numbers, 1, "", [1, 2], [0.0, 0.0], [0.0, 0.0])
    with monkeypatch.context() as patched:
        patched.setattr(Channel, "receive", lambda _: [given])
        waiting = [client.submit(message) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=PATIENCE_S)
    assert len(done) == 2
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(each, ServiceStopped) for each in outcomes] == [True, True]
    assert "no valid frame" in str(outcomes[0])
