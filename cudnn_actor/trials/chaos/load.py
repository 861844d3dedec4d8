"""The load: tasks that run their programs on a service, and have every answer judged.

A task owns its buffers, and only it writes them, so its models need no lock. No task writes the shared
inputs. The requests of a task reach the service in the order in which they are sent, whichever of the
`senders` it uses. So a burst can be judged in that order afterwards.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

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
from cudnn_actor.protocol.messages.messages import COMPUTE
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.trials.chaos.answers import VALUES, Answers
from cudnn_actor.trials.chaos.computations import (
    Computation,
    accumulates,
    allocates,
    bare,
    message,
    message_to_apply,
    updated_inputs,
)
from cudnn_actor.trials.chaos.graphs import LOAD
from cudnn_actor.trials.chaos.oracle import MOST_CONTENTS, After, Contents, Deed, Model, Oracle, Torn, both
from cudnn_actor.trials.chaos.senders import Sender
from cudnn_actor.trials.chaos.tally import Tally, Waiting
from cudnn_actor.trials.chaos.task_program import PLACES, Action, Step

__all__ = ["Ground", "Task"]

_COMPUTING = (Action.COMPUTE, Action.ACCUMULATE, Action.APPLY)
_ALONE = (Action.APPLY, Action.RENEW)
"""The steps of several requests, which follow the burst."""


class _Place(NamedTuple):
    """One of a task's buffers."""

    problem: int
    role: str
    number: int

    @property
    def spec(self) -> TensorSpec:
        return LOAD[self.problem].specs[self.role]

    @property
    def is_input(self) -> bool:
        """Whether an operation reads it."""
        return self.role in LOAD[self.problem].inputs


_Plan = tuple[int, Computation, bool]
"""The key of requests with one plan: problem, operation, and whether they accumulate."""


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
    problems: Sequence[int]
    """The problems of the load, by number."""
    others: set[str] = field(default_factory=set)
    """Callers outside the run itself that have not ended, and so still read the shared inputs."""
    inputs: dict[tuple[int, str, int], Model] = field(default_factory=dict)
    """The shared inputs by problem, role and number; all tasks read them, none writes them."""
    quarantined: set[_Plan] = field(default_factory=set)
    """Quarantined plans, which are not used again."""


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
        steps = [self._possible(step) for step in burst]
        deeds = []
        for step in steps:
            if step.action in _ALONE:
                continue
            for place in self._buffers_of(step):
                await self._take(place, step)
            deeds.append((step, self._deed(step)))
        outcomes = await self._send([deed for _, deed in deeds])
        for (step, deed), outcome in zip(deeds, outcomes, strict=True):
            if isinstance(outcome, QuarantinedRequest) and type(deed.message) in COMPUTE:
                self._ground.quarantined.add(_plan(step))
        await self._replace_torn()
        for step in steps:
            if step.action is Action.APPLY:
                await self._apply(step)
            elif step.action is Action.RENEW and (place := self._target(step)) in self._own:
                await self._give_up(self._own.pop(place))

    def _possible(self, step: Step) -> Step:
        """The step, or the one that replaces it if it is impossible now."""
        operation = _operation(step)
        applies = self._sender.applies and allocates(operation)
        possible = {Action.APPLY: applies, Action.ACCUMULATE: accumulates(operation)}
        if not possible.get(step.action, True):
            step = step._replace(action=Action.COMPUTE)
        if step.action in _COMPUTING and _plan(step) in self._ground.quarantined:
            step = step._replace(action=Action.FILL, own_input=False)
        return step

    async def _replace_torn(self) -> None:
        """Check that torn buffers are reported as torn, and free them: they are allocated again when
        needed."""
        for place, model in tuple(self._own.items()):
            if model.torn is Torn.YES:
                await self._send([Deed(Download(src=model.ref), (model,))])
                self._ground.tally.torn += 1
                del self._own[place]

    # Buffers.

    def _buffers_of(self, step: Step) -> list[_Place]:
        """The task's own buffers that a step uses."""
        match step.action:
            case Action.COMPUTE | Action.ACCUMULATE:
                return [*_outputs(step).values(), *_own_inputs(step).values()]
            case Action.COPY if not step.own_input:
                return [self._target(step), self._source(step)]
            case Action.INSPECT:
                return []
        return [self._target(step)]

    @staticmethod
    def _target(step: Step) -> _Place:
        """The buffer that a step writes, or reads back."""
        if step.own_input:
            return _Place(step.problem, LOAD[step.problem].source, 0)
        places = tuple(_outputs(step).values())
        return places[step.output % len(places)]

    def _source(self, step: Step) -> _Place:
        place = self._target(step)
        return place._replace(number=(place.number + 1) % PLACES)

    async def _take(self, place: _Place, step: Step) -> None:
        """Allocate, unless that is done, with the step's timeout or cancellation at the first attempt."""
        if place in self._own:
            return
        value = self._values(place, step) if step.filled or place.is_input else None
        model = await self._allocate(place.spec, value, step.timeout_s, step.cancel_after_s)
        model.tolerance = LOAD[place.problem].tolerance
        self._own[place] = model

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
        answers, (problem, role, _) = self._ground.answers, place
        if place.is_input:
            return answers.value(problem, role, step.first)
        operation = next(each for each in LOAD[problem].operations if role in each.writes)
        inputs = zip(operation.named(operation.inputs), _numbers(step), strict=False)
        values = {name: answers.value(problem, operand, number) for (name, operand), number in inputs}
        results = answers.results(problem, operation, values)
        return results[next(name for name, output in operation.named(operation.outputs) if output == role)]

    async def _give_up(self, model: Model) -> None:
        """Read a buffer back, then free it; retries while injected faults make that fail.

        In between the buffer is filled: the receipt names the incarnation, and so shows when a fault was
        over.
        """
        zeros = np.zeros(model.ref.spec.dims, model.ref.spec.dtype.numpy)
        for deed in (
            Deed(Download(src=model.ref), (model,)),
            Deed(Fill(dst=model.ref, value=0.0), (model,), {model: lambda: (zeros,)}),
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
        for problem in self._ground.problems:
            for role, number in itertools.product(LOAD[problem].inputs, range(VALUES)):
                value = self._ground.answers.value(problem, role, number)
                model = await self._allocate(LOAD[problem].specs[role], value)
                model.owned = False
                self._ground.inputs[problem, role, number] = model

    async def check_and_free_shared(self) -> None:
        """Check that the shared inputs are unchanged, and free them. Raises `ServiceStopped`."""
        while self._ground.inputs:
            _, model = self._ground.inputs.popitem()
            await self._give_up(model)

    # Requests.

    def _deed(self, step: Step) -> Deed:
        match step.action:
            case Action.COMPUTE | Action.ACCUMULATE:
                deed = self._computation(step)
            case Action.UPLOAD:
                deed = self._upload(step)
            case Action.FILL:
                deed = self._fill(step)
            case Action.COPY:
                deed = self._copy(step)
            case Action.INSPECT:
                role = _operation(step).reads[-1]
                shared = self._ground.inputs[step.problem, role, step.second]
                deed = Deed(Download(src=shared.ref), (shared,))
            case _:
                model = self._own[self._target(step)]
                deed = Deed(Download(src=model.ref), (model,))
        deed.timeout_s, deed.cancel_after_s = step.timeout_s, step.cancel_after_s
        return deed

    def _computation(self, step: Step) -> Deed:
        operation, adds = _operation(step), step.action is Action.ACCUMULATE
        inputs = self._inputs(step)
        outputs = {name: self._own[place] for name, place in _outputs(step).items()}
        refs = {name: model.ref for name, model in (inputs | outputs).items()}
        afters = self._afters(step, inputs)
        writes = {
            model: _sum_of(model, afters[name]) if adds else afters[name] for name, model in outputs.items()
        }
        uses = tuple(dict.fromkeys((*inputs.values(), *writes)))
        impure = adds or bool(updated_inputs(operation))
        return Deed(message(operation, refs, beta=float(adds)), uses, writes, accumulates=impure)

    def _inputs(self, step: Step) -> dict[str, Model]:
        """The buffer of each input, by its name: the task's own, or a shared one."""
        operation, own, shared = _operation(step), _own_inputs(step), self._ground.inputs
        inputs = zip(operation.named(operation.inputs), _numbers(step), strict=False)
        return {
            name: self._own[own[name]] if name in own else shared[step.problem, role, number]
            for (name, role), number in inputs
        }

    def _afters(self, step: Step, inputs: dict[str, Model]) -> dict[str, After]:
        """The contents of each output of a step's operation after the step."""
        answers, operation = self._ground.answers, _operation(step)

        def results(name: str) -> Contents:
            held = [model.contents for model in inputs.values()]
            possible: list[tuple[np.ndarray, ...]] = [each for each in held if each is not None]
            if len(possible) < len(held) or math.prod(map(len, possible)) > MOST_CONTENTS:
                return None
            values = (dict(zip(inputs, chosen, strict=True)) for chosen in itertools.product(*possible))
            found = (answers.results(step.problem, operation, each)[name] for each in values)
            return tuple({id(array): array for array in found}.values())

        return {name: functools.partial(results, name) for name, _ in operation.named(operation.outputs)}

    async def _apply(self, step: Step) -> None:
        """Compute into buffers that the service allocates. They replace the task's own buffers."""
        operation, problem = _operation(step), LOAD[step.problem]
        specs, places = problem.specs_of(operation), _outputs(step)
        inferred = operation.infer({name: specs[name] for name, _ in operation.named(operation.inputs)})
        made = {name: place for name, place in places.items() if inferred.get(name) == specs[name]}
        given = {name: place for name, place in places.items() if name not in made}
        for place in (*_own_inputs(step).values(), *given.values()):
            await self._take(place, step)
        for place in made.values():
            if place in self._own:
                await self._give_up(self._own.pop(place))
        inputs = self._inputs(step)
        afters = self._afters(step, inputs)
        contents = {name: afters[name]() for name in made}
        models = inputs | {name: self._own[place] for name, place in given.items()}
        answered = [name for name in places if name not in updated_inputs(operation)]
        deed = Deed(
            message_to_apply(operation, {name: model.ref for name, model in models.items()}),
            tuple(models.values()),
            {models[name]: afters[name] for name in given},
            gives=tuple(specs[name] for name in answered),
            accumulates=bool(updated_inputs(operation)),
            also=tuple(name for name in made if name in operation.optional),
            timeout_s=step.timeout_s,
            cancel_after_s=step.cancel_after_s,
        )
        (outcome,) = await self._send([deed])
        if isinstance(outcome, QuarantinedRequest):
            self._ground.quarantined.add(_plan(step))
        if isinstance(outcome, BaseException):
            return
        refs = dict(zip(answered, outcome if isinstance(outcome, tuple) else (outcome,), strict=True))
        for name, place in made.items():
            self._own[place] = Model(refs[name], contents[name], tolerance=problem.tolerance)

    def _upload(self, step: Step) -> Deed:
        place = self._target(step)
        model, value = self._own[place], self._values(place, step)
        return Deed(Upload(dst=model.ref, data=value), (model,), {model: lambda: (value,)})

    def _fill(self, step: Step) -> Deed:
        place = self._target(step)
        if place.is_input:  # always holds values that mean something
            return self._upload(step)
        model = self._own[place]
        number = step.value
        if place.spec.dtype is DType.BOOL:
            number = float(step.value != 0)
        elif place.spec.dtype is DType.UINT8:  # the scratch of a loop
            number = abs(step.value)
        value = np.full(place.spec.dims, number, place.spec.dtype.numpy)
        return Deed(Fill(dst=model.ref, value=number), (model,), {model: lambda: (value,)})

    def _copy(self, step: Step) -> Deed:
        place = self._target(step)
        dst = self._own[place]
        if step.own_input:
            src = self._ground.inputs[step.problem, place.role, step.first]
        else:
            src = self._own[self._source(step)]
        return Deed(Copy(src=src.ref, dst=dst.ref), (src, dst), {dst: lambda: src.contents})

    async def _send(self, burst: Sequence[Deed]) -> list[object]:
        """Send a burst, wait for all answers, and have them judged. Raises `ServiceStopped`."""
        if not burst:
            return []
        tally, sender = self._ground.tally, self._sender

        def note(request: Waiting, deed: Deed) -> None:
            tally.note_sent(request, deed, sender.kind, self._number, self._burst)

        answers = await sender.send(burst, note)
        for request, outcome in answers:
            tally.note_outcome(request, outcome)
        outcomes = [outcome for _, outcome in answers]
        for outcome in outcomes:
            if isinstance(outcome, ServiceStopped):
                raise outcome
        tally.note_wrongs(self._number, self._burst, self._ground.oracle.judge(burst, outcomes))
        return outcomes


def _operation(step: Step) -> Computation:
    operation = LOAD[step.problem].operations[step.operation]
    return bare(operation) if step.bare else operation


def _numbers(step: Step) -> Iterator[int]:
    """Yield the number of each input's value."""
    return itertools.chain((step.first,), itertools.repeat(step.second))


def _plan(step: Step) -> _Plan:
    return step.problem, _operation(step), step.action is Action.ACCUMULATE


def _outputs(step: Step) -> dict[str, _Place]:
    """The task's buffer of each output of a step's operation, by the output's name."""
    operation = _operation(step)
    return {name: _Place(step.problem, role, step.place) for name, role in operation.named(operation.outputs)}


def _own_inputs(step: Step) -> dict[str, _Place]:
    """The task's buffers that a step's operation reads, by the inputs' names. State is always the task's."""
    operation, problem = _operation(step), LOAD[step.problem]
    numbers = dict.fromkeys(updated_inputs(operation), step.place)
    if step.own_input:
        numbers = {problem.source: 0} | dict.fromkeys(problem.handed_on, step.place) | numbers
    return {
        name: _Place(step.problem, role, numbers[role])
        for name, role in operation.named(operation.inputs)
        if role in numbers
    }


def _sum_of(out: Model, result: Callable[[], Contents]) -> Callable[[], Contents]:
    def sum_up() -> Contents:
        before, amounts = out.contents, result()
        if before is None or amounts is None:
            return None
        sums: Contents = ()
        for held, amount in itertools.product(before, amounts):
            sums = both(sums, (held + amount,))
        return sums

    return sum_up
