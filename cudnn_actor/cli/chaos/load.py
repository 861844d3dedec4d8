"""The load: tasks that run their programs on a service, and have every answer judged.

A task owns its buffers, and only it writes them, so its models need no lock. No task writes the shared
inputs. The requests of a task reach the service in the order in which they are sent, whichever of the
`senders` it uses. So a burst can be judged in that order afterwards.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.cli.chaos.convolutions import (
    CLASS,
    INPUTS,
    PROBLEMS,
    READS,
    VALUES,
    WRITES,
    Answers,
    Kind,
)
from cudnn_actor.cli.chaos.oracle import Contents, Deed, Model, Oracle, Torn, both
from cudnn_actor.cli.chaos.senders import Sender
from cudnn_actor.cli.chaos.tally import Tally, Waiting
from cudnn_actor.cli.chaos.task_program import PLACES, Action, Step
from cudnn_actor.protocol import (
    Allocate,
    BufferRef,
    Copy,
    Download,
    ExecutionFailed,
    Fill,
    Free,
    OutOfMemory,
    QuarantinedRequest,
    ServiceStopped,
    StaleBufferError,
    TensorSpec,
    Upload,
)
from cudnn_actor.service.client import CudnnRef

__all__ = ["Ground", "Task"]


class _Place(NamedTuple):
    """One of a task's buffers."""

    problem: int
    role: str
    number: int

    @property
    def spec(self) -> TensorSpec:
        return PROBLEMS[self.problem].spec(self.role)


@dataclass(kw_only=True, eq=False)
class Ground:
    """The state that all tasks of a run share."""

    gpu: CudnnRef
    answers: Answers
    oracle: Oracle
    tally: Tally
    ending: threading.Event
    """Set when no new burst may begin."""
    abandoned: threading.Event
    """Set when all callers must stop waiting: unanswered requests count as lost."""
    problems: range
    """The problems of the load, by number."""
    others: set[str] = field(default_factory=set)
    """Callers outside the run itself that have not ended, and so still read the shared inputs."""
    inputs: dict[tuple[int, str, int], Model] = field(default_factory=dict)
    """The shared inputs by problem, role and number; all tasks read them, none writes them."""
    quarantined: set[tuple[int, Kind, bool]] = field(default_factory=set)
    """Quarantined plans, which are not used again: problem, kind, and whether it accumulates."""


class Task:
    """One sender of requests, with its own buffers.

    Parameters
    ----------
    ground
        The state shared with the others.
    number
        Its number, for reports.
    sender
        How it sends.
    """

    def __init__(self, ground: Ground, number: int, sender: Sender) -> None:
        self._ground = ground
        self._number = number
        self._sender = sender
        self._burst = 0
        self._own: dict[_Place, Model] = {}

    async def run(self, bursts: Iterator[Sequence[Step]]) -> None:
        """Carry out bursts until the run is ending; then read back every buffer and free it.

        Raises `ServiceStopped`.
        """
        for burst in bursts:
            if self._ground.ending.is_set():
                break
            self._burst += 1
            await self._perform(burst)
        for place in tuple(self._own):
            await self._give_up(self._own.pop(place))

    async def _perform(self, burst: Sequence[Step]) -> None:
        deeds = []
        for step in burst:
            if step.action is Action.RENEW:
                continue
            for place in self._needed(step):
                if place not in self._own:
                    await self._take(place, step)
            deeds.append((step, self._deed(step)))
        outcomes = await self._send([deed for _, deed in deeds])
        for (step, deed), outcome in zip(deeds, outcomes, strict=True):
            if isinstance(outcome, QuarantinedRequest) and type(deed.message) in CLASS.values():
                self._ground.quarantined.add((step.problem, step.kind, deed.accumulates))
        await self._replace_torn()
        for step in burst:
            if step.action is Action.RENEW and (place := self._meant(step)) in self._own:
                await self._give_up(self._own.pop(place))

    async def _replace_torn(self) -> None:
        """Check that torn buffers are reported as torn, and free them: they are allocated again when
        needed."""
        for place, model in tuple(self._own.items()):
            if model.torn is Torn.YES:
                await self._send([Deed(Download(src=model.ref), (model,))])
                self._ground.tally.torn += 1
                del self._own[place]

    # Buffers.

    def _needed(self, step: Step) -> list[_Place]:
        """The task's own buffers that a step uses."""
        meant = self._meant(step)
        match step.action:
            case Action.CONVOLVE | Action.ACCUMULATE:
                reads = READS[step.kind]
                return [meant, _Place(step.problem, "x", 0)] if self._from_own(step, reads) else [meant]
            case Action.COPY:
                return [meant, self._source(step)] if meant.role != "x" else [meant]
            case Action.INSPECT:
                return []
        return [meant]

    @staticmethod
    def _meant(step: Step) -> _Place:
        """The buffer that a step writes, or reads back."""
        if step.action in (Action.CONVOLVE, Action.ACCUMULATE) or not step.own_input:
            return _Place(step.problem, WRITES[step.kind], step.place)
        return _Place(step.problem, "x", 0)

    @staticmethod
    def _from_own(step: Step, reads: tuple[str, str]) -> bool:
        return step.own_input and reads[0] == "x"

    @staticmethod
    def _source(step: Step) -> _Place:
        return _Place(step.problem, WRITES[step.kind], (step.place + 1) % PLACES)

    async def _take(self, place: _Place, step: Step) -> None:
        """Allocate, with the step's timeout or cancellation at the first attempt."""
        value = self._values(place, step) if step.filled else None
        self._own[place] = await self._allocate(place.spec, value, step.timeout_s, step.cancel_after_s)

    async def _allocate(
        self,
        spec: TensorSpec,
        value: np.ndarray | None,
        timeout_s: float | None = None,
        cancel_after_s: float | None = None,
    ) -> Model:
        """A new buffer. Retries while injected faults make the allocation fail."""
        while True:
            message = Allocate(spec=spec, data=value)
            deed = Deed(message, (), timeout_s=timeout_s, cancel_after_s=cancel_after_s)
            (outcome,) = await self._send([deed])
            if isinstance(outcome, BufferRef):
                return Model(outcome, None if value is None else (value,))
            timeout_s = cancel_after_s = None

    def _values(self, place: _Place, step: Step) -> np.ndarray:
        """Values for a buffer: an input, or a result."""
        if place.role == "x":
            return self._ground.answers.value(step.problem, "x", step.first)
        return self._result(step, place.role)

    def _result(self, step: Step, role: str) -> np.ndarray:
        kind = next(kind for kind, written in WRITES.items() if written == role)
        answers, (first, second) = self._ground.answers, READS[kind]
        operands = (
            answers.value(step.problem, first, step.first),
            answers.value(step.problem, second, step.second),
        )
        return answers.result(kind, step.problem, *operands)

    async def _give_up(self, model: Model) -> None:
        """Read a buffer back, then free it; retries while injected faults make that fail.

        In between the buffer is filled: the receipt names the incarnation, and so shows when a fault was
        over.
        """
        zeros = np.zeros(model.ref.spec.dims, np.float32)
        for deed in (
            Deed(Download(src=model.ref), (model,)),
            Deed(Fill(dst=model.ref, value=0.0), (model,), model, lambda: (zeros,)),
            Deed(Free(buffer=model.ref), (model,)),
        ):
            (outcome,) = await self._send([deed])
            while isinstance(outcome, (ExecutionFailed, OutOfMemory)):
                (outcome,) = await self._send([deed])
            if isinstance(outcome, StaleBufferError):
                self._ground.tally.torn += 1
                return

    async def share(self) -> None:
        """Upload the shared inputs. Raises `ServiceStopped`."""
        for problem, role, number in itertools.product(self._ground.problems, INPUTS, range(VALUES)):
            value = self._ground.answers.value(problem, role, number)
            model = await self._allocate(PROBLEMS[problem].spec(role), value)
            model.owned = False
            self._ground.inputs[problem, role, number] = model

    async def unshare(self) -> None:
        """Check that the shared inputs are unchanged, and free them. Raises `ServiceStopped`."""
        while self._ground.inputs:
            _, model = self._ground.inputs.popitem()
            await self._give_up(model)

    # Requests.

    def _deed(self, step: Step) -> Deed:
        match step.action:
            case Action.CONVOLVE | Action.ACCUMULATE:
                deed = self._convolution(step)
            case Action.UPLOAD:
                deed = self._upload(step)
            case Action.FILL:
                deed = self._fill(step)
            case Action.COPY:
                deed = self._copy(step)
            case Action.INSPECT:
                shared = self._ground.inputs[step.problem, READS[step.kind][1], step.second]
                deed = Deed(Download(src=shared.ref), (shared,))
            case _:
                model = self._own[self._meant(step)]
                deed = Deed(Download(src=model.ref), (model,))
        deed.timeout_s, deed.cancel_after_s = step.timeout_s, step.cancel_after_s
        return deed

    def _convolution(self, step: Step) -> Deed:
        accumulates = step.action is Action.ACCUMULATE
        if (step.problem, step.kind, accumulates) in self._ground.quarantined:
            return self._fill(step._replace(own_input=False))
        reads, problem = READS[step.kind], step.problem
        inputs, out = self._ground.inputs, self._own[self._meant(step)]
        first, second = inputs[problem, reads[0], step.first], inputs[problem, reads[1], step.second]
        if self._from_own(step, reads):
            first = self._own[_Place(problem, "x", 0)]
        message: Any = CLASS[step.kind](
            **{reads[0]: first.ref, reads[1]: second.ref, WRITES[step.kind]: out.ref},
            conv=PROBLEMS[problem].conv,
            beta=1.0 if accumulates else 0.0,
        )

        def result() -> Contents:
            if first.contents is None or second.contents is None:
                return None
            pairs = itertools.product(first.contents, second.contents)
            return tuple(self._ground.answers.result(step.kind, problem, *pair) for pair in pairs)

        after = _added(out, result) if accumulates else result
        return Deed(message, (first, second, out), out, after, accumulates)

    def _upload(self, step: Step) -> Deed:
        place = self._meant(step)
        model, value = self._own[place], self._values(place, step)
        return Deed(Upload(dst=model.ref, data=value), (model,), model, lambda: (value,))

    def _fill(self, step: Step) -> Deed:
        place = self._meant(step)
        if place.role == "x":  # always holds one of the inputs
            return self._upload(step)
        model = self._own[place]
        value = np.full(place.spec.dims, step.value, np.float32)
        return Deed(Fill(dst=model.ref, value=step.value), (model,), model, lambda: (value,))

    def _copy(self, step: Step) -> Deed:
        place = self._meant(step)
        own = place.role != "x"
        src = self._own[self._source(step)] if own else self._ground.inputs[step.problem, "x", step.first]
        dst = self._own[place]
        return Deed(Copy(src=src.ref, dst=dst.ref), (src, dst), dst, lambda: src.contents)

    async def _send(self, burst: Sequence[Deed]) -> list[object]:
        """Send a burst, wait for all answers, and have them judged. Raises `ServiceStopped`."""
        if not burst:
            return []
        tally, sender = self._ground.tally, self._sender

        def note(request: Waiting, deed: Deed) -> None:
            tally.sent(request, deed, sender.kind, self._number, self._burst)

        answers = await sender.send(burst, note)
        for request, outcome in answers:
            tally.ended(request, outcome)
        outcomes = [outcome for _, outcome in answers]
        for outcome in outcomes:
            if isinstance(outcome, ServiceStopped):
                raise outcome
        tally.judged(self._number, self._burst, self._ground.oracle.judge(burst, outcomes))
        return outcomes


def _added(out: Model, result: Callable[[], Contents]) -> Callable[[], Contents]:
    def added() -> Contents:
        before, amounts = out.contents, result()
        if before is None or amounts is None:
            return None
        sums: Contents = ()
        for held, amount in itertools.product(before, amounts):
            sums = both(sums, (held + amount,))
        return sums

    return added
