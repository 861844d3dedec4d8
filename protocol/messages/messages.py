"""The typed messages: one class per operation, never one per dtype.

All are frozen and keyword-only. `y = alpha * conv(x, w) + beta * y`, where
conv is cross-correlation (cuDNN's convention), N is the batch, C the input
channels, K the filters and G the groups:

=============  =====================  ==========================  =====================
message        reads                  writes                      dims of the result
=============  =====================  ==========================  =====================
ConvFwd        x, w, bias, (y)        y                           (N, K, out spatial)
ConvBwdData    dy, w, (dx)            dx                          (N, C, in spatial)
ConvBwdFilter  x, dy, (dw)            dw                          (K, C / G, filter)
=============  =====================  ==========================  =====================

Buffers in brackets are read only if beta is not 0. Such a request is not pure:
it cannot be run again after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Union

import numpy as np

from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import OPERATIONS, Operation
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import did_you_mean
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.epilogue import Epilogue
from cudnn_actor.protocol.types.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.records import Record
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = [
    "COMPUTE",
    "Allocate",
    "Compute",
    "ConvBwdData",
    "ConvBwdFilter",
    "ConvFwd",
    "Copy",
    "Download",
    "Drain",
    "Explain",
    "Fill",
    "Free",
    "GetStatistics",
    "Message",
    "Ping",
    "RunGraph",
    "Travelling",
    "Upload",
    "Values",
    "View",
    "Warm",
]

if TYPE_CHECKING:
    Values = np.ndarray | DeviceArray
    """Values on the host, or on the target device."""
else:
    Values = np.ndarray  # for the codec: a device array is meaningless in another process

_NO_EPILOGUE = Epilogue()
_DEFAULT_NUMERICS = Numerics()


class _Base(Record, tag=True):
    control: ClassVar[bool] = False
    """Whether the message is accepted even when the mailbox is full."""


class ConvFwd(_Base, tag=True):
    """Convolution forward: y = epilogue(alpha * conv(x, w) + beta * y + bias). Answered by a `Receipt`.

    Parameters
    ----------
    x
        Input, dims (N, C, spatial).
    w
        Filter, dims (K, C / groups, filter spatial), of x's dtype.
    y
        Output, dims `conv.output_dims(x, w)`. Must not be x, w or bias.
    conv
        Padding, stride, dilation, groups.
    bias
        One value per filter: dims (K,) or (1, K, 1, ...).
    epilogue
        The activation, applied last.
    alpha, beta
        Finite scalars. If beta is 0, y's old values are never read, so they may be NaN.
    numerics
        TF32 and determinism.
    """

    x: BufferRef
    w: BufferRef
    y: BufferRef
    conv: ConvSpec
    bias: BufferRef | None = None
    epilogue: Epilogue = _NO_EPILOGUE
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS


class ConvBwdData(_Base, tag=True):
    """Gradient of a convolution with respect to its input: dx = alpha * conv_transposed(dy, w) + beta * dx.

    Answered by a `Receipt`. `conv.output_dims(dx, w)` must be dy's dims.
    """

    dy: BufferRef
    w: BufferRef
    dx: BufferRef
    conv: ConvSpec
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS


class ConvBwdFilter(_Base, tag=True):
    """Gradient of a convolution with respect to its filter: dw = alpha * (x correlated with dy) + beta * dw.

    Answered by a `Receipt`. `conv.output_dims(x, dw)` must be dy's dims.
    """

    x: BufferRef
    dy: BufferRef
    dw: BufferRef
    conv: ConvSpec
    alpha: float = 1.0
    beta: float = 0.0
    numerics: Numerics = _DEFAULT_NUMERICS


class RunGraph(_Base, tag=True):
    """Run a graph. Answered by a `Receipt`.

    Parameters
    ----------
    graph
        What `GraphBuilder.build` gave.
    buffers
        One for each of the graph's ports, the inputs first: see `bind`.
    """

    graph: Graph
    buffers: tuple[BufferRef, ...]

    @classmethod
    def bind(
        cls, graph: Graph, buffers: Mapping[str, BufferRef] | None = None, /, **named: BufferRef
    ) -> RunGraph:
        """A message that runs a graph on these buffers, by the names of its inputs and outputs.

        Raises `InvalidRequest` for a name that the graph does not have, is given twice, or is missing.
        """
        if not isinstance(graph, Graph):
            raise InvalidRequest(
                field="graph",
                value=Words(type(graph).__name__),
                problem="is not a Graph",
                fix="pass what GraphBuilder.build gave",
            )
        given = bound_names(graph, buffers, named)
        for name in graph.places:
            if name not in given:
                raise InvalidRequest(
                    field=name,
                    value=None,
                    problem="is a port of the graph and has no buffer",
                    fix=f"give it one, as in {name}=buffer",
                )
        return cls(graph=graph, buffers=tuple(given[name] for name in graph.places))


def bound_names(
    graph: Graph, buffers: Mapping[str, BufferRef] | None, named: Mapping[str, BufferRef]
) -> dict[str, BufferRef]:
    """The buffers that were given by name, in a mapping or as keywords. Raises as `RunGraph.bind`."""
    if not (buffers is None or isinstance(buffers, Mapping)):
        raise InvalidRequest(
            field="buffers",
            value=buffers,
            problem="is not a mapping of names to buffers",
            fix=f"name each buffer, as in {next(iter(graph.places))}=buffer",
        )
    given = dict(buffers or {})
    for name, ref in named.items():
        if name in given:
            raise InvalidRequest(field=name, value=ref, problem="is given twice", fix="give it once")
        given[name] = ref
    for name, ref in given.items():
        if name not in graph.places:
            raise InvalidRequest(
                field=name,
                value=ref,
                problem="is no input or output of the graph",
                fix=f"{did_you_mean(name, graph.places)}use {', '.join(graph.places)}",
            )
    return given


if TYPE_CHECKING:
    _Operations = Operation[BufferRef]
else:
    _Operations = Union[tuple(operation[BufferRef] for operation in OPERATIONS)]  # noqa: UP007 - for the codec

Compute = ConvFwd | ConvBwdData | ConvBwdFilter | RunGraph | _Operations
"""Messages that run a plan."""

COMPUTE: frozenset[type] = frozenset({ConvFwd, ConvBwdData, ConvBwdFilter, RunGraph, *OPERATIONS})
"""The classes of `Compute`, for membership tests."""


class Allocate(_Base, tag=True, eq=False):
    """Allocate a buffer; answered by its `BufferRef`. Contents are undefined unless `data` is given.

    Parameters
    ----------
    spec
        The buffer's shape in memory.
    data
        Values of dims `spec.dims`, with any strides. Host values are cast to the spec's dtype within the
        same kind; device values must already have it.
    """

    spec: TensorSpec
    data: Values | None = None


class Upload(_Base, tag=True, eq=False):
    """Overwrite `dst` with values of the same dims, as in `Allocate`. Answered by a `Receipt`.

    The array must not change until the reply: the actor reads it, and the sender does not copy it.
    """

    dst: BufferRef
    data: Values


class Download(_Base, tag=True):
    """Copy a buffer to the host: answered by a new C-contiguous array of dims `src.spec.dims`."""

    src: BufferRef


class View(_Base, tag=True):
    """Ask for the buffer itself, as an array of the device's own array library; thread isolation only.

    Answered once all earlier work that uses the buffer is done. The answer is an array on the buffer's
    memory, with its dims and strides: NumPy's on the CPU, CuPy's on CUDA. While the array, or anything that
    shares its memory, exists, the memory is not given to another buffer, not even after a `Free`.
    """

    buffer: BufferRef


class Copy(_Base, tag=True):
    """Copy `src` to `dst`: same dims and dtype, any layouts, different buffers. Answered by a `Receipt`."""

    src: BufferRef
    dst: BufferRef


class Fill(_Base, tag=True):
    """Set every element of `dst` to `value`. Answered by a `Receipt`.

    Floating-point dtypes round to nearest; integers take whole numbers in their range, exactly; bool takes
    False, True, 0 and 1.
    """

    dst: BufferRef
    value: bool | int | float


class Free(_Base, tag=True):
    """Free a buffer once work sent before is done. Answered by None; later uses get `StaleBufferError`."""

    buffer: BufferRef


class Ping(_Base, tag=True):
    """Check that the service responds; answered by its generation."""

    control = True


class GetStatistics(_Base, tag=True):
    """Ask for counters; answered by `Statistics`."""

    control = True


class Warm(_Base, tag=True):
    """Build the plans of `messages` and `graphs` without running them; answered by the number of plans built.

    A failure to build is cached, but not reported here.
    """

    messages: tuple[Compute, ...] = ()
    graphs: tuple[Graph, ...] = ()


class Explain(_Base, tag=True):
    """Ask how the engine runs a graph; answered by an `Explanation`. Builds the plan if it is missing.

    Raises as a request that runs the graph, if the engine has no plan for it. `CudnnRef.explain` makes the
    message, also from other messages.
    """

    graph: OperationGraph


class Drain(_Base, tag=True):
    """Wait for everything sent before: answered by None once all of it has been answered."""


Travelling = (
    Compute
    | Allocate
    | Upload
    | Download
    | Copy
    | Fill
    | Free
    | Ping
    | GetStatistics
    | Warm
    | Explain
    | Drain
)
"""Messages that can be encoded as bytes, and so could be answered in another process."""

Message = Travelling | View
"""Every message that a service answers."""
