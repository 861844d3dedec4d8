"""The requests that async code can send to a service: the methods that `CudnnRef` and `Scope` have in common.

The file is long because this is one class: users look here for everything that they can call, and most lines
are signatures and their documentation. The work is done elsewhere: `broker.request_checks` checks messages,
`actors.asking` sends them, `outputs` finds the results to allocate, and `models` runs models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec
import numpy as np

from cudnn_actor.actors import ask, submit, tell, within
from cudnn_actor.actors.deadline import Deadline
from cudnn_actor.broker.request_checks import check_message
from cudnn_actor.broker.warm_batches import cut
from cudnn_actor.models import BatchedModel, Feature, Model
from cudnn_actor.models.batch_rules import BatchRules
from cudnn_actor.models.inputs import named_once
from cudnn_actor.models.sizes import Sizes, one_set_of_specs
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.any_message import Answer, AnyMessage
from cudnn_actor.protocol.messages.message_checks import no_plan
from cudnn_actor.protocol.messages.messages import (
    COMPUTE,
    Allocate,
    ClearPlans,
    Compute,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    Copy,
    DeployModel,
    Download,
    Drain,
    Explain,
    Fill,
    Free,
    GetStatistics,
    LendStaging,
    Message,
    Ping,
    RunGraph,
    RunLoop,
    Upload,
    View,
    Warm,
)
from cudnn_actor.protocol.messages.receipts import Receipt, Statistics
from cudnn_actor.protocol.messages.run_graph import bound_names
from cudnn_actor.protocol.messages.run_loop import SCRATCH, Loop
from cudnn_actor.protocol.operations import Operation, Recurrent
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import (
    require_awaited,
    require_flag,
    require_mapping,
    require_type,
)
from cudnn_actor.protocol.types.conv import ConvSpec, Padding
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.epilogue import Epilogue
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.spelling import check_spelling
from cudnn_actor.protocol.types.tensor import Layout, LayoutLike, TensorSpec
from cudnn_actor.protocol.types.tune import Tune, require_tune
from cudnn_actor.service.arrays import about_array, packed_like
from cudnn_actor.service.convolution_arguments import convolution_of, require_operands
from cudnn_actor.service.model_sources import name_of, source_of
from cudnn_actor.service.outputs import INSTEAD, missing_outputs, missing_ports, outputs_of
from cudnn_actor.service.reserves import graph_with_own_reserve
from cudnn_actor.service.service import CudnnService

__all__ = ["Requests"]

_LARGE_BYTES = 256 << 10
"""For a larger array, another process is woken up before the request is made."""
MessageT = TypeVar("MessageT", RunLoop, Operation[BufferRef] | RunGraph)


class Requests:
    """The requests that a service takes, for asyncio code.

    Parameters
    ----------
    service
        A started service.
    """

    def __init__(self, service: CudnnService) -> None:
        self._service = service
        self._state = service.state

    def is_of(self, service: object) -> bool:
        """Whether these requests go to this `CudnnService`."""
        return self._service is service

    @property
    def _without_scope(self) -> Requests:
        """The sender of requests whose answers belong to no scope: the handle itself, also for a scope."""
        return self

    def _require_open(self) -> None:
        """Raise `ServiceStopped` if the service has ended."""
        self._state.mailbox.check_open()

    def _own(self, what: BufferRef | Model) -> None:
        """Note a buffer or a model that a caller is about to get, and has to free. A scope keeps it; a handle
        does nothing."""

    def _discard(self, ref: BufferRef) -> None:
        """Free a buffer that nobody receives, without waiting."""
        self._state.discard(ref)

    @overload
    async def ask(self, message: Operation[BufferRef], *, timeout: float | None = None) -> Receipt: ...
    @overload
    async def ask(self, message: AnyMessage[Answer], *, timeout: float | None = None) -> Answer: ...
    async def ask(self, message: Message, *, timeout: float | None = None) -> Any:
        """Send a request, queueing it even when the mailbox is full, and await its answer.

        Cancelling the wait withdraws a request that has not started. A request that has started runs to its
        end; only a `RunLoop` ends between two turns.

        Parameters
        ----------
        message
            Any message of the protocol; its class determines the type of the answer.
        timeout
            Seconds after which to give up. A request that has not started by then is dropped and never runs.

        Raises
        ------
        InvalidRequest, StaleBufferError
            The request is invalid, or names a buffer that no longer exists. Nothing was sent.
        DeadlineExceeded
            No answer within `timeout`.
        ServiceStopped
            The service has ended, or ends before it starts the request.
        CudnnActorError
            Any other failure of the request; see `protocol.errors`.
        """
        mailbox = self._state.mailbox
        if mailbox.asks_again and timeout is None and (again := mailbox.ask_again(message)) is not None:
            try:
                return await again
            except BaseException:  # as in `actors.ask`
                mailbox.stop_waiting(again)
                raise
        kind = type(message)
        checked_there = kind in mailbox.checks and not mailbox.forked
        found = None if checked_there else check_message(self._state, message, INSTEAD)
        discard = self._state.discard if kind in (Allocate, DeployModel) else None
        return await ask(mailbox, message, timeout=timeout, discard=discard, found=found)

    @overload
    def submit(
        self, message: Operation[BufferRef], *, timeout: float | None = None
    ) -> asyncio.Future[Receipt]: ...
    @overload
    def submit(
        self, message: AnyMessage[Answer], *, timeout: float | None = None
    ) -> asyncio.Future[Answer]: ...
    def submit(self, message: Message, *, timeout: float | None = None) -> asyncio.Future[Any]:
        """Send a request and return the future of its answer at once; cancelling it withdraws the request.

        Raises `MailboxFull` when there is no room, and the errors that `ask` raises before it sends.
        """
        mailbox = self._state.mailbox
        if mailbox.asks_again and timeout is None and (again := mailbox.ask_again(message)) is not None:
            again.add_done_callback(mailbox.if_cancelled or mailbox.withdraw_if_cancelled())
            return again
        found = check_message(self._state, message, INSTEAD)
        discard = self._state.discard if type(message) in (Allocate, DeployModel) else None
        return submit(mailbox, message, timeout=timeout, discard=discard, found=found)

    def tell(self, message: Message) -> None:
        """Send a request without waiting for its answer; a failure is logged. Raises as `submit` does."""
        found = check_message(self._state, message, INSTEAD)
        tell(self._state.mailbox, message, found=found)

    # Memory. Every `timeout` here means the same as that of `ask`.

    @check_spelling
    async def upload(
        self,
        array: Any,
        *,
        layout: LayoutLike = Layout.NCHW,
        dtype: DTypeLike | None = None,
        timeout: float | None = None,
    ) -> BufferRef:
        """Copy values into a new buffer.

        Parameters
        ----------
        array
            Anything that NumPy accepts, or an array of PyTorch, JAX, CuPy or another library that supports
            DLPack or the CUDA array interface; dims in N, C, spatial order. An array on the service's device
            is copied on the device, after the work that is already on its stream. It must not change until
            this returns.
        layout
            The buffer's memory layout.
        dtype
            The buffer's dtype; None for the array's own. Values on a device are not cast: pass their dtype or
            None.
        timeout
            Seconds, as in `ask`.

        Raises
        ------
        InvalidRequest
            The values are objects, strings or complex numbers, or do not fit the dtype; or the array is on
            another device than the service's.
        OutOfMemory
            There is no room; nothing was allocated.
        """
        if type(array) is np.ndarray and array.nbytes > _LARGE_BYTES:
            self._state.mailbox.expect_upload()
        values = self._service.values(array)
        try:
            spec = packed_like(values, dtype, layout)
            return await self.ask(Allocate(spec=spec, data=values), timeout=timeout)
        except InvalidRequest as error:
            raise about_array(error, own_dtype=dtype is None) from None

    @check_spelling
    async def empty(
        self,
        dims: Sequence[int],
        *,
        dtype: DTypeLike = DType.FLOAT32,
        layout: LayoutLike = Layout.NCHW,
        timeout: float | None = None,
    ) -> BufferRef:
        """A new buffer whose contents are undefined. Raises `InvalidRequest`, `OutOfMemory`."""
        return await self.ask(Allocate(spec=TensorSpec.packed(dims, dtype, layout)), timeout=timeout)

    @check_spelling
    async def write(self, dst: BufferRef, array: Any, *, timeout: float | None = None) -> Receipt:
        """Overwrite a buffer with values of the same dims, on the host or the device as for `upload`.

        Values on the host are cast to the buffer's dtype within their kind; values on the device must have
        that dtype already. Raises as `upload` does, and `StaleBufferError`.
        """
        if type(array) is np.ndarray and array.nbytes > _LARGE_BYTES:
            self._state.mailbox.expect_upload()
        values = self._service.values(array)
        try:
            return await self.ask(Upload(dst=dst, data=values), timeout=timeout)
        except InvalidRequest as error:
            raise about_array(error, own_dtype=True) from None

    async def _upload_weight(self, values: np.ndarray, spec: TensorSpec, *, shared: bool) -> BufferRef:
        """Upload a weight of a model into a buffer. `shared`: whether the buffer is only read, so that models
        of other processes may use it."""
        share = self._service.share_weight
        if shared and share is not None:
            return await share(values, spec)
        return await self.upload(values, layout=spec.layout)

    async def download(self, src: BufferRef, *, timeout: float | None = None) -> np.ndarray:
        """A buffer's values as a new C-contiguous array, dims in N, C, spatial order whatever the layout."""
        return await self.ask(Download(src=src), timeout=timeout)

    async def view(self, buffer: BufferRef, *, timeout: float | None = None) -> Any:
        """A buffer's memory, not copied, as an array of the device's array library; thread isolation only.

        A NumPy array on the CPU, a CuPy array on CUDA (convert it with `torch.from_dlpack(array)` and the
        like), dims in N, C, spatial order with the buffer's strides. It is returned once earlier work on the
        buffer is done, so any stream may read it. From then on it is the live memory: later requests write
        into it. Code that writes through the array must wait for its own stream before it sends a request on
        the buffer.

        As long as the array lives, or a slice or a DLPack capsule of it, no other buffer gets its bytes: not
        after `free` (which still makes the reference stale at once), not after a restart of the actor, and
        not after the service's end. They count towards `memory_limit` for as long.

        Raises
        ------
        StaleBufferError
            The buffer no longer exists.
        """
        return await self.ask(View(buffer=buffer), timeout=timeout)

    async def copy(self, src: BufferRef, dst: BufferRef, *, timeout: float | None = None) -> Receipt:
        """Copy a buffer to another of the same dims and dtype, in any layouts."""
        return await self.ask(Copy(src=src, dst=dst), timeout=timeout)

    async def fill(self, dst: BufferRef, value: float, *, timeout: float | None = None) -> Receipt:
        """Set every element to `value`; see `Fill`. Raises `InvalidRequest` if the dtype cannot hold it."""
        return await self.ask(Fill(dst=dst, value=value), timeout=timeout)

    async def free(self, buffer: BufferRef, *, timeout: float | None = None) -> None:
        """Free a buffer, once earlier work is done. Using it again raises `StaleBufferError`."""
        await self.ask(Free(buffer=buffer), timeout=timeout)

    # Operations that allocate their results.

    async def apply(
        self,
        operation: Operation[BufferRef] | Graph,
        buffers: Mapping[str, BufferRef] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: BufferRef,
    ) -> Any:
        """Run an operation or a graph, and allocate the outputs that are left out.

        Parameters
        ----------
        operation
            An operation with its inputs, and perhaps its outputs; or a graph, as `GraphBuilder.build` gives
            it.
        buffers, named
            A graph's buffers by name: all inputs, and the outputs that need no allocation.
        also
            The operation's optional outputs that are wanted, too, as in `also=("index",)`.
        timeout
            Seconds for everything together, with the allocations, as in `ask`.

        Returns
        -------
        BufferRef or tuple of them
            The output; a named tuple of all written outputs if there are several. Allocated outputs are
            packed, and have the dims and dtype that follow from the inputs.

        Raises
        ------
        InvalidRequest
            See `ask`; or an output is left out whose dims do not follow from the inputs. Nothing stays
            allocated.
        CudnnActorError
            See `ask` and `empty`. The allocated outputs are freed.
        """
        if isinstance(operation, Graph):
            self._state.check_graph(operation)
            if also:
                raise InvalidRequest(
                    field="also",
                    value=also,
                    problem="is for operations: a graph gives all of its outputs",
                    fix="leave it out",
                )
            given = bound_names(operation, buffers, named)
            specs = missing_ports(operation, given)
        else:
            given = {}
            specs = missing_outputs(operation, also, {**named, **({"buffers": buffers} if buffers else {})})

        def message(made: Mapping[str, BufferRef]) -> Operation[BufferRef] | RunGraph:
            if isinstance(operation, Graph):
                return RunGraph.bind(operation, {**given, **made})
            return msgspec.structs.replace(operation, **made)

        with within(timeout) as deadline:
            return outputs_of(await self._ask_with(specs, message, deadline))

    async def _ask_with(
        self,
        specs: Mapping[str, TensorSpec],
        of: Callable[[Mapping[str, BufferRef]], MessageT],
        deadline: Deadline,
    ) -> MessageT:
        """Allocate buffers, and ask the message that `of` makes of them. If that fails, free the buffers."""
        made: dict[str, BufferRef] = {}
        try:
            for name, spec in specs.items():
                made[name] = await self.ask(Allocate(spec=spec), timeout=deadline.left_s)
            message = of(made)
            await self.ask(message, timeout=deadline.left_s)
        except BaseException:
            for ref in made.values():
                self._discard(ref)
            raise
        return message

    async def loop(
        self,
        loop: Loop,
        buffers: Mapping[str, BufferRef] | None = None,
        /,
        *,
        turns: int,
        timeout: float | None = None,
        **named: BufferRef,
    ) -> Any:
        """Run a loop as one request, and allocate the outputs that are left out.

        Parameters
        ----------
        loop
            The loop: a graph as its body, and the outputs that each turn hands to the next one.
        buffers, named
            Buffers by the names of the body's inputs and outputs: all inputs, and the outputs that need no
            allocation. The inputs in `loop.scanned`, and the outputs that are not carried, have dims (turns,
            ...), one row for each turn; all other buffers have the dims of their ports.
        turns
            The number of turns, 0 to 2**20; if the loop has a condition, the most turns. With 0 turns,
            carried outputs are the initial values.
        timeout
            Seconds for everything together, with the allocations, as in `ask`.

        Returns
        -------
        BufferRef or tuple of them
            The output; a named tuple in the order of the body's outputs if there are several. In an output
            that was allocated here and has a row for each turn, the rows of turns that a condition has
            prevented are undefined.

        Raises
        ------
        InvalidRequest
            See `ask`; or `turns` is not a whole number from 0 to 2**20. Nothing stays allocated.
        CudnnActorError
            See `ask` and `empty`. The allocated outputs are freed.
        """
        require_type("loop", loop, Loop, f"make one: {Loop.example}")
        self._state.check_graph(loop.body)
        given = bound_names(loop.body, buffers, named)
        specs = missing_ports(loop.body, given, loop.specs(turns))

        def message(made: Mapping[str, BufferRef]) -> RunLoop:
            outputs = {name: made[name] for name in specs}
            return RunLoop.bind(loop, {**given, **outputs}, turns=turns, scratch=made[SCRATCH])

        with within(timeout) as deadline:
            asked = await self._ask_with({**specs, SCRATCH: loop.scratch}, message, deadline)
        self._discard(asked.scratch)
        return outputs_of(asked)

    @check_spelling
    async def conv_fwd(
        self,
        x: BufferRef,
        w: BufferRef,
        *,
        conv: ConvSpec | None = None,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: BufferRef | None = None,
        epilogue: Epilogue | None = None,
        alpha: float = 1.0,
        numerics: Numerics | None = None,
        dtype: DTypeLike | None = None,
        timeout: float | None = None,
    ) -> BufferRef:
        """Convolution forward into a new buffer; see `ConvFwd`.

        The buffer has x's layout (NCHW if x is strided) and `dtype`. None stands for x's own dtype, except
        that int8 and uint8 give int32, which holds every result.

        Parameters
        ----------
        x, w
            Dims (N, C, spatial) and (K, C / groups, filter).
        conv
            The parameters as a `ConvSpec`, in place of the next four arguments.
        pad, stride, dilation
            One number for every spatial dim, or one for each. Each padding may be a pair: before and after.
        groups
            How many independent groups the channels form.
        timeout
            Seconds for everything together, as in `ask`.
        """
        require_operands(x=x, w=w)
        conv = convolution_of("x", x.dims, conv, pad=pad, stride=stride, dilation=dilation, groups=groups)

        def message(y: BufferRef) -> ConvFwd:
            return ConvFwd(
                x=x,
                w=w,
                y=y,
                conv=conv,
                bias=bias,
                epilogue=epilogue or Epilogue(),
                alpha=alpha,
                numerics=numerics or Numerics(),
            )

        dims = conv.output_dims(x.spec.dims, w.spec.dims)
        return await self._fill_new(message, dims, like=x, dtype=dtype, timeout=timeout)

    @check_spelling
    async def conv_bwd_data(
        self,
        dy: BufferRef,
        w: BufferRef,
        *,
        conv: ConvSpec | None = None,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        dims: Sequence[int] | None = None,
        alpha: float = 1.0,
        numerics: Numerics | None = None,
        timeout: float | None = None,
    ) -> BufferRef:
        """Gradient with respect to the input, in a new buffer of dy's dtype and layout; see `ConvBwdData`.

        `dims` are the dims of the result. None stands for the smallest input that gives an output of dy's
        dims; with a stride over 1, larger inputs give it, too. The other arguments are as for `conv_fwd`.
        """
        require_operands(dy=dy, w=w)
        conv = convolution_of("dy", dy.dims, conv, pad=pad, stride=stride, dilation=dilation, groups=groups)

        def message(dx: BufferRef) -> ConvBwdData:
            return ConvBwdData(dy=dy, w=w, dx=dx, conv=conv, alpha=alpha, numerics=numerics or Numerics())

        wanted = conv.input_dims(dy.spec.dims, w.spec.dims) if dims is None else dims
        return await self._fill_new(message, wanted, like=dy, timeout=timeout)

    @check_spelling
    async def conv_bwd_filter(
        self,
        x: BufferRef,
        dy: BufferRef,
        *,
        dims: Sequence[int],
        conv: ConvSpec | None = None,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        alpha: float = 1.0,
        numerics: Numerics | None = None,
        timeout: float | None = None,
    ) -> BufferRef:
        """Gradient with respect to the filter, in a new buffer; see `ConvBwdFilter`.

        `dims` are (K, C / groups, filter). The other arguments are as for `conv_fwd`.
        """
        require_operands(x=x, dy=dy)
        conv = convolution_of("x", x.dims, conv, pad=pad, stride=stride, dilation=dilation, groups=groups)

        def message(dw: BufferRef) -> ConvBwdFilter:
            return ConvBwdFilter(x=x, dy=dy, dw=dw, conv=conv, alpha=alpha, numerics=numerics or Numerics())

        return await self._fill_new(message, dims, like=x, timeout=timeout)

    async def _fill_new(
        self,
        message: Callable[[BufferRef], Compute],
        dims: Sequence[int],
        *,
        like: BufferRef,
        dtype: DTypeLike | None = None,
        timeout: float | None = None,
    ) -> BufferRef:
        """Allocate a buffer in the layout of `like`, and ask a message that fills it. If that fails, free the
        buffer."""
        layout = Layout.NHWC if like.spec.layout is Layout.NHWC else Layout.NCHW
        if dtype is None:
            dtype = like.spec.dtype if like.spec.dtype.is_floating else DType.INT32
        with within(timeout) as deadline:
            result = await self.empty(dims, dtype=dtype, layout=layout, timeout=deadline.left_s)
            try:
                await self.ask(message(result), timeout=deadline.left_s)
            except BaseException:
                self._discard(result)
                raise
        return result

    async def staging(
        self,
        feature: Feature,
        sizes: Mapping[str, int] | None = None,
        /,
        *,
        timeout: float | None = None,
        **named: int,
    ) -> np.ndarray:
        """An array for an input of a model, in memory that the device reads without another copy.

        Fill it and pass it to `run`, as often as you like; it must not change until the run is answered. This
        staging memory is given back when the array has been collected. Until then it counts, on the CPU,
        towards `memory_limit`; on a GPU it is pinned memory of the host. In process isolation, outputs of
        `run` of more than 64 KiB lie in staging memory, too, and may be passed on as inputs.

        Parameters
        ----------
        feature
            An input of a model, as in `model.inputs[0]`.
        sizes, named
            The sizes of the input's named dims: `staging(model.inputs[0], N=8)`.
        timeout
            Seconds, as in `ask`.

        Raises
        ------
        InvalidRequest
            A size is missing, unknown or no whole number, or the input has dims without a name.
        OutOfMemory
            The array does not fit into `memory_limit` (on the CPU), or into the memory of the host or of its
            container.
        """
        require_type("feature", feature, Feature, "pass an input of a model: model.inputs[0]")
        specs = one_set_of_specs((feature,), named_once(sizes, named))
        return await self.ask(LendStaging(spec=specs[feature.name]), timeout=timeout)

    # Models.

    async def load(
        self,
        model: Any,
        *,
        dims: Mapping[str, Sizes] | None = None,
        dtype: DTypeLike | None = None,
        random: int | None = None,
        swappable: bool | None = None,
        replace: Model | None = None,
        tune: Tune | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Model:
        """Load a model: read it and check it. See `cudnn-actor docs models`.

        The weights are uploaded now if `dims` is given or the dims of all inputs are numbers, else at the
        first run. `async with await gpu.load(path) as model` closes it at the end.

        Parameters
        ----------
        model
            The path of an ONNX file, its bytes, an `onnx.ModelProto`, or an `OnnxModel`: a model that was
            read before, with limits of your own. In an attached process, also a name that was given to
            `serve_socket`. Data outside of the file must lie in the file's folder.
        dims
            Sizes of the inputs' named dims for which plans are built now: `{"N": (1, 8)}`; see `Model.warm`.
        dtype
            The dtype of weights and activations: "bfloat16", "float16" or "float32"; None for the dtypes of
            the file. The model's inputs and outputs keep their dtypes. Norms, softmax and sums compute in
            float32 all the same, and conversions between floats and integers stay as in the file.
        random
            The seed, a whole number, of nodes that draw random numbers and have no seed of their own; without
            it they are refused. Each run draws other numbers, and a model that is loaded again the same ones.
        swappable
            Whether the weights may be overwritten later, while the model runs: see `Model.write`. None for
            no.
        replace
            A model that this service loaded, with the same inputs and outputs. The new model is warmed for
            all dims for which `replace` has graphs. From then on, the object `replace` runs the new model;
            this method returns it. Runs that have begun finish on the old model, which is then unloaded. If
            anything fails, `replace` stays as it was. If `dtype`, `random`, `swappable` or `tune` is None,
            the value with which the old model was loaded holds; but an `OnnxModel` has the first three of its
            own.
        tune
            With True, when the model is warmed, here or later, the candidates for each different piece are
            measured on the device, within the captured graph of the whole model. The fastest are kept, also
            in the service's `plan_store`, where the next load finds them. That takes up to minutes for each
            set of dims: this call waits, and the service answers its other requests meanwhile, but they share
            the device. If tuning fails, the plans stay as they were. With "cached", tuned plans of the
            `plan_store` are used, and nothing is measured. None for False. A run never waits for tuning. No
            effect on the CPU engine.
        name
            The name under which `metrics` counts the model's runs; models of one name are counted together.
            None for the file's name without its suffix, or the name of the graph.
        timeout
            Seconds for everything together. A file that is being read when they are over is read to its end,
            and dropped.

        Raises
        ------
        ModelNotFound
            There is no file at that path.
        InvalidModel
            The model cannot be read, or contradicts itself.
        UnsupportedModel
            Some nodes cannot be run; the text names all of them.
        InvalidRequest
            The model is over a limit of `ModelLimits`; the value of `dtype`, `tune`, `swappable`, `name` or
            `random` is not valid; or `random`, `dtype` or `swappable` was given with an `OnnxModel`.
        ImportError
            The package onnx is missing. The text says how to install it.
        CudnnActorError
            See `upload`. Everything that was allocated is freed.

        Notes
        -----
        The model is read and imported on a thread of its own. If the call is cancelled, as by
        `asyncio.wait_for`, it returns at once, and the thread ends at the next node; neither the event loop
        nor the program waits for it.
        """
        self._require_open()
        if tune is not None:
            require_tune("tune", tune)
        if swappable is not None:
            require_flag("swappable", swappable)
        require_mapping("dims", dims, "names of dims to sizes", 'name each: {"N": 8}')
        state, service = self._state, self._service
        if isinstance(model, str):
            model = service.models.get(model, model)
        options = {"random": random, "dtype": dtype, "swappable": swappable}
        if replace is not None:
            self._require_own(replace, "replace")
            tune = replace.tune if tune is None else tune
        with within(timeout) as deadline:
            async with deadline.limiting():
                source = await source_of(model, options, None if replace is None else replace.options)
            loaded = Model(
                self._without_scope,  # the model owns its buffers and its name; a scope owns the model
                await self._without_scope.ask(
                    DeployModel(name=name_of(model, name)), timeout=deadline.left_s
                ),
                source,
                service.values,
                discard=state.discard,
                unload=state.unload,
                most_operations=state.most_operations,
                graphs=service.kept_graphs,
                tune=tune or False,
            )
            try:
                if replace is not None:
                    await replace.replaceable_by(loaded, deadline)
                if dims is not None:
                    await loaded.warm_for(dims, deadline, field="dims")
                elif replace is None:
                    await loaded.prepare(deadline)
                if replace is not None:
                    replace.replace_by(loaded)
            except BaseException:
                loaded.end()
                raise
        if replace is not None:
            return replace
        self._own(loaded)
        return loaded

    async def run(
        self,
        model: Model,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        keep: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """Run a model that this service loaded.

        The first run with a set of dims makes a graph for these dims, which is kept.

        Parameters
        ----------
        inputs, named
            Arrays or references, by the names of the model's inputs: `run(model, image=x)`. An input that is
            named `keep` or `timeout` can only be given in `inputs`.
        keep
            The names of outputs that stay on the device: their references are returned, and are yours to
            free.
        timeout
            Seconds for everything together, as in `ask`: uploads, the import at a first run, the graph,
            downloads.

        Returns
        -------
        dict
            The outputs by name: arrays, or references to those in `keep`.

        Raises
        ------
        InvalidRequest
            An input is missing, or does not have the dtype or dims that the model says.
        UnsupportedModel
            Nodes cannot be run with these dims or values; the text names all of them.
        CudnnActorError
            See `apply`. Everything that was allocated is freed.
        """
        self._require_open()
        self._require_own(model)
        results = await model.run(inputs, keep=keep, timeout=timeout, **named)
        for name in keep:
            self._own(results[name])
        return results

    def _require_own(self, model: object, field: str = "model") -> None:
        """Raise `InvalidRequest` unless this service has loaded a model."""
        if not (isinstance(model, Model) and model.belongs_to(self._service)):
            require_awaited(field, model)
            raise InvalidRequest(
                field=field,
                value=model,
                problem="is not a model that this service loaded",
                fix="load it: model = await gpu.load(path)",
            )

    def batched(
        self,
        model: Model,
        *,
        max_batch: int | None = None,
        max_delay_us: float = 2000,
        sizes: Sequence[int] | None = None,
        dims: Mapping[str, Sizes] | None = None,
        max_waiting: int = 1024,
        in_flight: int = 2,
        timeout: float | None = None,
    ) -> BatchedModel:
        """Run requests of many tasks together: `async with gpu.batched(model) as endpoint`.

        Then `await endpoint(image=x)` runs one sample, or a few, in a batch with samples of other requests. A
        batch starts when it is full, or when its first request has waited for `max_delay_us`. If no batch
        runs, it starts as soon as no more requests are expected; a request that is alone starts at once. A
        batch is filled up to the next of `sizes`. Entering warms all sizes, and runs each once on zeros.

        Parameters
        ----------
        model
            A model whose inputs have one named dim in common, the first of each. It must be the first dim of
            each output, too, and no sample's results may depend on another sample.
        max_batch
            The most samples in a batch: the largest of `sizes`; 32 if neither is given.
        max_delay_us
            The most microseconds that a request waits for other requests, unless `in_flight` batches run.
        sizes
            The numbers of samples that a batch may have. None for the powers of two up to `max_batch`, and
            `max_batch`.
        dims
            Sizes of all other named dims of the inputs: `{"L": (128, 512)}`. Requests share a batch if all
            their dims but the first are equal.
        max_waiting
            How many requests may wait before `endpoint.submit` raises `MailboxFull`. `await endpoint(...)`
            always waits.
        in_flight
            How many batches may be sent at a time. Meanwhile the next batch is put together, if it is full.
        timeout
            Seconds that entering may take.

        Raises
        ------
        InvalidRequest
            An input has no named leading dim, or another one than the first input; an output does not have
            that dim first; the size of a dim is missing; or an option is out of its range.
        """
        self._require_own(model)
        rules = BatchRules.of(
            model.inputs,
            model.outputs,
            max_batch=max_batch,
            sizes=sizes,
            dims=dims,
            max_delay_us=max_delay_us,
            max_waiting=max_waiting,
            in_flight=in_flight,
        )
        state = self._state
        return BatchedModel(
            model,
            rules,
            quarantined=lambda digest: digest in state.quarantined,
            note_batch=lambda samples: state.counters.note_batch(model.ref.number, samples),
            name=state.name,
            timeout=timeout,
        )

    # Control.

    async def ping(self, *, timeout: float | None = None) -> int:
        """Ask the actor for its incarnation's number. A health check: it overtakes waiting requests."""
        return await self.ask(Ping(), timeout=timeout)

    async def statistics(self, *, timeout: float | None = None) -> Statistics:
        """The service's counters, and the version of its cuDNN."""
        return await self.ask(GetStatistics(), timeout=timeout)

    async def warm(
        self, messages: Compute | Graph | Sequence[Compute | Graph], *, timeout: float | None = None
    ) -> int:
        """Build the plans of messages and graphs without running them; returns how many were newly built.

        Many long graphs are sent as several `Warm`s. `timeout` is for all of them.
        """
        one = type(messages) in (*COMPUTE, Graph) or not isinstance(messages, Iterable)
        given: tuple[Any, ...] = (messages,) if one else tuple(messages)  # type: ignore[arg-type]
        parts = tuple(cut(given)) or ((),)  # `check_warm` refuses anything else
        with within(timeout) as deadline:
            return sum([await self.ask(_warm(part), timeout=deadline.left_s) for part in parts])

    async def clear_plans(self, *, timeout: float | None = None) -> int:
        """Drop all plans that are ready, also the standby's; returns how many there were.

        See `ClearPlans`. `statistics` says how many plans there are, and how many are kept at most.
        """
        return await self.ask(ClearPlans(), timeout=timeout)

    @check_spelling
    async def explain(
        self, what: Graph | Compute, *, measure: bool = False, timeout: float | None = None
    ) -> Explanation:
        """How the service runs a graph, or the graph of a message: pieces, engines, reasons, memory.

        Builds the plan if it is missing, as `warm` does, and uses none of your buffers. `print` shows the
        answer as a table.

        Parameters
        ----------
        what
            A graph, as `GraphBuilder.build` gives it; or a message that runs a plan, with all of its buffers.
        measure
            Whether to time each piece, too, on inputs and outputs that are allocated for this and freed
            again: floats are normally distributed, integers are 0. Requests that were sent later wait
            meanwhile: about a quarter of a second, or four runs if these take longer.
        timeout
            Seconds, as in `ask`.

        Raises
        ------
        InvalidRequest
            The message is invalid, or runs no plan.
        UnsupportedGraph
            The engine cannot run the graph. The text names the operation.
        OutOfMemory
            With `measure`, there is no room for a second set of inputs and outputs.
        CudnnActorError
            As `ask`.
        """
        graph = self._graph_to_explain(what)
        return await self.ask(Explain(graph=graph, measure=measure), timeout=timeout)

    @check_spelling
    async def plans(
        self, what: Graph | Compute, *, measure: bool = False, timeout: float | None = None
    ) -> Explanation:
        """The explanation that `explain` gives, in which each piece also has `candidates`: the plans that may
        run it.

        The names of cuDNN's plans can be given to `Numerics`, to prefer or to exclude these plans. On the
        CPU, each piece has one candidate, which runs it.

        Parameters
        ----------
        what
            See `explain`.
        measure
            Whether to tune the plan first, as `Warm(tune=True)` does, which takes seconds to minutes. The
            candidates that tuning has tried then have times and workspaces, and the service uses the fastest
            if it is clearly faster. If False, candidates have the times of an earlier tuning, if there was
            one.
        timeout
            Seconds for everything together, as in `ask`.

        Raises as `explain`.
        """
        graph = self._graph_to_explain(what)
        require_flag("measure", measure)
        with within(timeout) as deadline:
            if measure:
                tuned = msgspec.structs.replace(_warm((what,)), tune=True)
                await self.ask(tuned, timeout=deadline.left_s)
            return await self.ask(Explain(graph=graph, candidates=True), timeout=deadline.left_s)

    @check_spelling
    async def reserve_nbytes(self, layer: Recurrent[BufferRef], *, timeout: float | None = None) -> int:
        """How many bytes a recurrent layer keeps for its gradients, on this engine.

        A buffer of this size, `await gpu.empty((nbytes,), dtype="uint8")`, may be the `reserve` of this layer
        and of its gradients by data, and another such buffer their `slopes`. The number is the same for all
        layers with operands of the same dims and dtypes, and the same mode, lengths and numerics. Builds a
        plan of the layer if it is missing, and uses none of your buffers.

        Parameters
        ----------
        layer
            A `Recurrent` with its inputs. Its outputs do not matter.
        timeout
            Seconds, as in `ask`.

        Raises
        ------
        InvalidRequest
            `layer` is no such layer, or its inputs do not fit together.
        UnsupportedGraph
            The engine cannot run the layer.
        OutOfMemory
            There is no room for the plan's workspace, which contains the reserve. On CUDA, also if it is over
            `workspace_limit`.
        CudnnActorError
            See `ask`.
        """
        explanation = await self.ask(Explain(graph=graph_with_own_reserve(layer)), timeout=timeout)
        return sum(piece.reserve for piece in explanation.pieces)

    def _graph_to_explain(self, what: Graph | Compute) -> OperationGraph:
        """The graph that `explain` is asked about. Raises `InvalidRequest`."""
        if isinstance(what, Graph):
            self._state.check_graph(what)
            return what.body
        if isinstance(what, Model):
            raise InvalidRequest(
                field="what",
                value=what,
                problem="is a model, which has a plan for each set of dims",
                fix="ask it: await model.explain(inputs)",
            )
        if type(what) not in COMPUTE:
            raise no_plan("what", what)
        return self._state.lower(what).graph

    async def drain(self, *, timeout: float | None = None) -> None:
        """Wait until all earlier requests have been answered."""
        await self.ask(Drain(), timeout=timeout)


def _warm(part: Sequence[Any]) -> Warm:
    graphs = tuple(each for each in part if isinstance(each, Graph))
    return Warm(messages=tuple(each for each in part if not isinstance(each, Graph)), graphs=graphs)
