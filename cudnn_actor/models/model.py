"""A model that users run: its inputs and outputs, its runs and warm-ups, and its replacement by another
model.

What it keeps is in `keeping`, how graphs are made ready in `preparing`, what a run sends in `running`, and
writes of weights in `writing`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from cudnn_actor.actors import Deadline, within
from cudnn_actor.models.inputs import Alike, Values, checked_inputs, named_once, spec_of
from cudnn_actor.models.keeping import MOST_KEPT, Keeping, Kept, Replaced, Unload
from cudnn_actor.models.kept_graphs import KeptGraphs
from cudnn_actor.models.preparing import Preparing
from cudnn_actor.models.running import Running
from cudnn_actor.models.sizes import Sizes, one_set_of_specs, require_sizes_or_inputs, sets_of_specs
from cudnn_actor.models.source import Feature, NeedsValues, Source, Specialised, fixed_specs
from cudnn_actor.models.steps import explained_steps
from cudnn_actor.models.writing import Writing
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, Words
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.messages import LendStaging
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.messages.planning_messages import Explain
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.short_repr import listing
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.protocol.types.tune import Tune

__all__ = ["Model"]

_ROOM = 60
"""Characters of a model's repr for its inputs, and for its outputs."""
T = TypeVar("T")
_Method = TypeVar("_Method", bound=Callable[..., Coroutine[Any, Any, Any]])


def _of_latest(method: _Method) -> _Method:
    """Decorate a method of a model. If another model has replaced the model, that one runs the method
    instead."""

    @functools.wraps(method)
    async def call(self: Model, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return await method(self._latest(), *args, **kwargs)
            except Replaced:
                continue

    return call  # type: ignore[return-value]  # it has the same signature


class Model:
    """A model that a service runs. Made by `CudnnRef.load`, and run by `CudnnRef.run`.

    Any number of tasks may run it at a time. Its weights stay in buffers of the service until `close`. If it
    is collected before that, they are freed too, with a `ResourceWarning`.

    Parameters
    ----------
    gpu
        The `CudnnRef` of the service.
    ref
        The model in the service, by which messages name it.
    source
        The source of the model's graphs.
    unload
        See `keeping.Unload`.
    discard
        Frees a buffer without waiting.
    values
        See `inputs.Values`.
    most_operations
        How many operations a graph of the service may have.
    graphs
        The graphs of all models of the service, and how many bytes the graphs of one model may take.
    tune
        Whether the model's plans are tuned when it is warmed.
    """

    def __init__(
        self,
        gpu: Any,
        ref: ModelRef,
        source: Source,
        values: Values,
        *,
        discard: Callable[[BufferRef], None],
        unload: Unload,
        most_operations: int,
        graphs: KeptGraphs,
        tune: Tune = False,
    ) -> None:
        self._gpu = gpu
        self._values = values
        self._successor: Model | None = None
        """The model that has replaced this one, and does everything in its place; None for no model."""
        self._features = source.inputs, source.defaults, source.outputs
        self._alike: Alike | None = None
        """The facts about the inputs of the latest run whose inputs were arrays alone. Any thread may replace
        them."""
        shown = f"<model: {self._signature()}>"
        self._keeping = Keeping(gpu, ref, source, shown, discard=discard, unload=unload, graphs=graphs)
        self._writing = Writing(gpu, self._keeping)
        self._preparing = Preparing(gpu, self._keeping, self._writing, most_operations, tune)
        self._running = Running(gpu, self._keeping, self._preparing)

    @property
    def ref(self) -> ModelRef:
        """The model's reference, by which messages name it: `RunModel(model=model.ref, ...)`, sent by a pykka
        actor for example. A model that is replaced gets another reference."""
        return self._latest()._keeping.ref

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self._features[0]

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be left out, since the model has default values for them, in order."""
        return self._features[1]

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self._features[2]

    def __repr__(self) -> str:
        closed = "closed " if self._latest()._keeping.closed else ""
        return f"<{closed}model: {self._signature()}>"

    def _signature(self) -> str:
        inputs, outputs = (listing(map(str, each), len(each), _ROOM) for each in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}"

    def belongs_to(self, service: object) -> bool:
        """Whether a service has loaded it."""
        return self._gpu.is_of(service)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """The bytes that the model's weights take in the service now; 0 before the first run, warm-up or
        explanation."""
        return self._latest()._keeping.nbytes

    @property
    def fixed(self) -> bool:
        """Whether each dim of each input is a number."""
        return fixed_specs(self.inputs) is not None

    async def __aenter__(self) -> Model:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @_of_latest
    async def prepare(self, deadline: Deadline) -> None:
        """Import the model and upload its weights now, if its inputs have fixed dims, and tune it if `tune`
        asks for that.

        Raises as `run`.
        """
        specs = fixed_specs(self.inputs)
        if specs is None:
            return
        try:
            kept = await self._preparing.acquire(specs, {}, deadline)
        except NeedsValues:
            return
        try:
            if self._preparing.tune:
                await self._preparing.deploy(kept, deadline)
        finally:
            self._keeping.release(kept)

    async def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        keep: Collection[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """See `CudnnRef.run`: `run(image=x)`, or `run({"image": x})`."""
        given = named_once(inputs, named)
        # Not `if keep`: an array that was meant for an input of that name has no truth value. It is refused
        # by name.
        alike = self._alike if isinstance(keep, tuple) and not keep else None
        arrays = None if alike is None else alike.views(given)
        if alike is None or arrays is None:
            views = self.validated_inputs(given, keep)
            alike = self._alike = Alike.to(views)
            specs = _specs_of(views) if alike is None else alike.specs
            with within(timeout) as deadline:
                return await self._run_with(views, specs, deadline, keep=keep)
        with within(timeout) as deadline:
            if self._successor is None:
                results = await self._running.run_arrays(arrays, alike.specs, deadline)
                if results is not None:
                    return results
            return await self._run_with(arrays, alike.specs, deadline)

    def validated_inputs(
        self, inputs: Mapping[str, Any], keep: Collection[str] = ()
    ) -> dict[str, BufferRef | np.ndarray]:
        """The inputs of a run as references and arrays, by name. Raises `InvalidRequest`."""
        return checked_inputs(self._keeping.source, self._values, inputs, keep)

    async def run_checked(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        deadline: Deadline,
        *,
        keep: Collection[str] = (),
        again: bool = True,
        crashes: int = 0,
    ) -> dict[str, Any]:
        """Run the model with inputs that `validated_inputs` has returned. `again` and `crashes` are those of
        `RunModel`."""
        specs = _specs_of(given)
        return await self._run_with(given, specs, deadline, keep=keep, again=again, crashes=crashes)

    @_of_latest
    async def _run_with(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        specs: Mapping[str, TensorSpec],
        deadline: Deadline,
        *,
        keep: Collection[str] = (),
        again: bool = True,
        crashes: int = 0,
    ) -> dict[str, Any]:
        """Run the model on inputs of these specs."""
        run = partial(self._running.run, given, keep, deadline, again=again, crashes=crashes)
        return await self._with_graph(specs, given, deadline, run, soon=True)

    async def lend(self, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
        """Arrays in memory that the device reads without another copy: see `LendStaging`."""
        return {name: await self._gpu.ask(LendStaging(spec=spec)) for name, spec in specs.items()}

    @_of_latest
    async def reserve(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> Callable[[], None]:
        """Warm the model for inputs of these specs, and keep the graph. Returns a function that ends this
        keeping.

        Raises as `warm`.
        """

        async def deploy_and_hold(kept: Kept) -> Callable[[], None]:
            await self._preparing.deploy(kept, deadline)
            self._keeping.hold(kept)
            return partial(self._keeping.release, kept)

        with self._refusing_values():
            return await self._with_graph(specs, {}, deadline, deploy_and_hold)

    async def warm(
        self, sizes: Mapping[str, Sizes] | None = None, /, *, timeout: float | None = None, **named: Sizes
    ) -> int:
        """Import the model for these sizes of its named dims, upload its weights, and build the plans.

        `warm(N=8)` warms one size, `warm(N=(1, 8, 32))` several; with several dims, every combination is
        warmed. A run with such dims then imports and builds nothing. Returns how many plans were newly built.
        If the model was loaded with `tune=True`, they are tuned as well: see `CudnnRef.load`.

        Parameters
        ----------
        sizes, named
            The sizes of all named dims of the inputs: whole numbers from 0 on. A dim that is named `timeout`
            can only be given in `sizes`. Give none if every dim of the inputs is a number.
        timeout
            Seconds for everything together.

        Raises
        ------
        InvalidRequest
            A name is missing or unknown, a size is no whole number, an input has dims without a name or
            decides over shapes by its values, or there are more than 64 combinations.
        UnsupportedModel
            Nodes cannot be run with these dims.
        CudnnActorError
            As `CudnnRef.warm`. A plan that cannot be built is reported by the first run.
        """
        given = named_once(sizes, named)
        sets_of_specs(self.inputs, given, MOST_KEPT)  # before the clock: a dim may be named timeout
        with within(timeout) as deadline:
            return await self.warm_for(given, deadline)

    async def warm_for(self, sizes: Mapping[str, Sizes], deadline: Deadline, field: str = "sizes") -> int:
        """`warm` for a mapping of sizes; `field`: the name of the caller's argument."""
        sets = sets_of_specs(self.inputs, sizes, MOST_KEPT, field)
        return sum([await self._warm_graph(specs, deadline) for specs in sets])

    @_of_latest
    async def _warm_graph(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> int:
        with self._refusing_values():
            return await self._with_graph(
                specs, {}, deadline, partial(self._preparing.deploy, deadline=deadline)
            )

    @property
    def weights(self) -> dict[str, TensorSpec]:
        """The weights that `write` takes, as they are in the file: name → spec. Raises as `write`.

        A weight is missing here if imports of graphs have found that its values decide over shapes, axes or
        factors.
        """
        self._require_swappable()
        return self._latest()._writing.specs

    @_of_latest
    async def write(self, weights: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Overwrite weights between two runs, either all that are given or none: no run sees a mixture.

        Runs that were sent before use the old weights, and later runs the new ones, for all dims. Values that
        the model computes from constants alone are computed again. A crash changes none of this.

        Parameters
        ----------
        weights
            The new values, by the names of the file's initialisers, with the same dims and dtypes. Each is an
            array on the host, which is copied, or a reference to a buffer, whose values are downloaded before
            the write, since graphs of other dims need them. If the model was loaded with a dtype, the values
            are rounded as by `load`.
        timeout
            Seconds for everything together. After a `DeadlineExceeded` with `started`, or if this is
            cancelled, the weights may still be overwritten later.

        Raises
        ------
        InvalidRequest
            The model was not loaded with `swappable=True`; a name is no weight, or decides over shapes; or
            dims or dtype differ from the file's. Nothing was written.
        CudnnActorError
            See `ask`, and `download` for references. The old weights stay, also after a write that has ended
            two workers.
        """
        self._require_swappable()
        given = self._writing.check(self._values, weights)
        with within(timeout) as deadline:
            await self._writing.write(await self._writing.fetch(given, deadline), deadline)

    @property
    def options(self) -> dict[str, Any]:
        """The options with which the model's file was read, by name: those of `dtype`, `random` and
        `swappable` that were given."""
        return dict(getattr(self._keeping.source, "options", {}))

    @property
    def tune(self) -> Tune:
        """Whether the model's plans are tuned when it is warmed: see `CudnnRef.load`."""
        return self._latest()._preparing.tune

    @property
    def swappable(self) -> bool:
        """Whether the model's weights may be overwritten."""
        return bool(getattr(self._keeping.source, "swappable", False))

    def _require_swappable(self) -> None:
        if not self.swappable:
            raise InvalidRequest(
                field="model",
                value=self,
                problem="was loaded without swappable=True, so its weights are not kept apart",
                fix="load it so: await gpu.load(path, swappable=True)",
            )

    @_of_latest
    async def explain(
        self,
        /,
        inputs: Mapping[str, Any] | None = None,
        *,
        measure: bool = False,
        timeout: float | None = None,
        **sizes: int,
    ) -> Explanation:
        """How the service runs the model, and with `measure` how long each piece takes: `CudnnRef.explain`.

        A loop has the pieces of one turn, with their times; `run_us` is the time of all turns.

        Parameters
        ----------
        inputs
            The same as for `run`. They are not needed if no input's values decide over shapes, and if each
            input's dims are numbers, or names whose sizes are given.
        measure, timeout
            As for `CudnnRef.explain`.
        sizes
            The sizes of named dims, in place of inputs: `explain(N=8)`.

        Raises as `CudnnRef.explain` does, and, if inputs are given, as `run`.
        """
        given: dict[str, Any] = {}
        if inputs is None and not sizes:
            require_sizes_or_inputs(self.inputs, "model.explain")
        if inputs is None and (sizes or self.fixed):
            specs = one_set_of_specs(self.inputs, sizes)
        else:
            given = checked_inputs(self._keeping.source, self._values, {} if inputs is None else inputs)
            specs = {name: spec_of(value) for name, value in given.items()}
        with within(timeout) as deadline:
            with self._refusing_values():
                kept = await self._preparing.acquire(specs, given, deadline)
            try:
                return await self._explain_graph(kept.of, deadline, measure=measure)
            finally:
                self._keeping.release(kept)

    @staticmethod
    @contextlib.contextmanager
    def _refusing_values() -> Iterator[None]:
        """Turn `NeedsValues` into `InvalidRequest`: values of inputs are needed that were not given."""
        try:
            yield
        except NeedsValues as needs:
            raise InvalidRequest(
                field="inputs", value=None, problem=f"must be given: {needs}", fix="pass them as for run"
            ) from needs

    async def _explain_graph(self, of: Specialised, deadline: Deadline, *, measure: bool) -> Explanation:
        if not of.graphs:
            raise InvalidRequest(
                field="model",
                value=self,
                problem="has outputs that are constants, so that nothing is computed",
                fix="run it: there is nothing to explain",
            )
        if of.graph is not None:
            message = Explain(graph=of.graph.body, measure=measure, weights=_weights(of, of.graph))
            explanation: Explanation = await self._gpu.ask(message, timeout=deadline.left_s)
            return explanation
        found: list[Explanation] = [
            await self._gpu.explain(graph, measure=measure, timeout=deadline.left_s) for graph in of.graphs
        ]
        return explained_steps(of.steps, found)

    async def close(self) -> None:
        """Free the weights, and drop the graphs and their plans, once no run needs them.

        Idempotent. A run after that raises `InvalidRequest`.
        """
        self.end()

    def end(self) -> None:
        """Close the model without waiting, on any thread, also within a finalizer."""
        self._latest()._keeping.end()

    # The replacement of a model.

    def _latest(self) -> Model:
        """The model that has replaced this one last; this model if none has."""
        return self if self._successor is None else self._successor._latest()

    async def replaceable_by(self, other: Model, deadline: Deadline) -> None:
        """Warm another model for all dims for which this one has graphs.

        Raises `InvalidRequest` if inputs or outputs differ, and as `run`.
        """
        for what in ("inputs", "defaults", "outputs"):
            mine, given = getattr(self, what), getattr(other, what)
            if mine != given:
                raise InvalidRequest(
                    field="model",
                    value=Words(", ".join(map(str, given)) or f"no {what}"),
                    problem=f"are not the {what} of the model that is to be replaced, "
                    f"{', '.join(map(str, mine)) or 'none'}",
                    fix="load it as a model of its own",
                )
        keeping = self._latest()._keeping
        with keeping.lock:
            keeping.check_open()
            wanted = [(kept.specs, kept.values) for kept in keeping.kept.values()]
        for specs, values in wanted:
            deploy = partial(other._preparing.deploy, deadline=deadline)
            await other._with_graph(specs, values, deadline, deploy)

    def replace_by(self, other: Model) -> None:
        """Let another model do everything in place of this one from now on. Runs that have begun finish; then
        this model's graphs and weights are given back. Any thread may call this."""
        latest = self._latest()
        with latest._keeping.lock:
            latest._keeping.check_open()
            # This is one step: callers from now on find the other model, which is warm.
            latest._successor, latest._keeping.replaced = other, True
        self._successor = other  # so that no model in between is kept
        self._keeping.source = other._keeping.source
        latest._keeping.end()

    async def _with_graph(
        self,
        specs: Mapping[str, TensorSpec],
        given: Mapping[str, Any],
        deadline: Deadline,
        use: Callable[[Kept], Coroutine[Any, Any, T]],
        *,
        soon: bool = False,
    ) -> T:
        """Call `use` with the graph for these inputs. If its weights turn out to be torn, call it again with
        a graph that is made from the source."""
        while True:
            kept = self._preparing.ready(specs)
            if kept is None:
                kept = await self._preparing.acquire(specs, given, deadline, soon=soon)
            try:
                return await use(kept)
            except CudnnActorError as error:
                if not self._keeping.forget_torn(kept, error):
                    raise
            finally:
                self._keeping.release(kept)


def _specs_of(given: Mapping[str, BufferRef | np.ndarray]) -> dict[str, TensorSpec]:
    return {name: spec_of(value) for name, value in given.items()}


def _weights(of: Specialised, graph: Graph) -> tuple[int, ...]:
    """The indices of a model's weights among the buffers of its graph: the ports that are neither inputs nor
    outputs of a run."""
    given = {*of.inputs.values(), *([] if of.random is None else [of.random.port])}
    ports = {graph.ports[place].uid for name, place in graph.places.items() if name in given}
    changed = {*graph.body.written, *(tensor.overwrites for tensor in graph.body.tensors)}
    return tuple(place for place, uid in enumerate(graph.body.bound) if uid not in ports | changed)
