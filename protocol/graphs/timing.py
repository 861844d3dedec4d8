"""How long a plan takes, what each of its pieces moves and computes, and what the device could do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GroupedMatMul,
    GroupedMatMulBackwardWeights,
    MatMul,
    Node,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.short_repr import short_repr

__all__ = ["DeviceSpeed", "PieceTime", "PlanTimes", "piece_times", "share_of_device"]

_MORE = 1.005
"""The least share of the device's speed that is shown as more than 100%."""


class DeviceSpeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The greatest speeds of a device.

    Parameters
    ----------
    copy_bytes_per_s
        Bytes that a copy of a large buffer reads and writes in a second: measured.
    flops_per_s
        Floating-point operations of products in a second, by the dtype of their operands, "tf32" for float32
        where that is allowed: from the number of multiprocessors and the highest clock. Empty if the kind of
        device is not known.
    """

    copy_bytes_per_s: float
    flops_per_s: dict[str, float] = {}

    __repr__ = short_repr


class PlanTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times of a plan that an engine has measured.

    Parameters
    ----------
    run_us
        Microseconds of a run: the median.
    pieces_us
        Microseconds of each piece in a run of the whole: the median of each, whichever runs they come from.
    device
        What the device can do.
    """

    run_us: float
    pieces_us: tuple[float, ...]
    device: DeviceSpeed

    __repr__ = short_repr


class PieceTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece's time, and how near it comes to what the device can do.

    Parameters
    ----------
    us
        Microseconds, in a run of the whole: the median of several runs.
    nbytes
        Bytes that it must read and write: each tensor that it shares with other pieces once, without gaps.
    flops
        Floating-point operations of its products, convolutions and attention, where a multiplication and the
        addition behind it are two; 0 if it has none. What masks and paddings leave out is counted.
    of_device
        The time that the device needs for these bytes, or for these products if that is longer, divided by
        the time that the piece takes. 1 is all that the device can do, and more is possible where tensors are
        in a cache. None if it has products, and it is not known how fast the device can compute them.
    """

    us: float
    nbytes: int
    flops: int
    of_device: float | None

    __repr__ = short_repr


def piece_times(
    graph: OperationGraph, pieces: Sequence[Sequence[int]], times: PlanTimes
) -> Iterator[PieceTime]:
    """Yields what each piece does in its time. A piece is the numbers of its operations."""
    readers = Counter(uid for node in graph.operations for uid in node.reads)
    for numbers, us in zip(pieces, times.pieces_us, strict=True):
        nodes = [graph.operations[number] for number in numbers]
        nbytes, flops = _nbytes(graph, nodes, readers), _flops(graph, nodes)
        needed_s = _needed_s(times.device, nbytes, flops)
        of_device = None if needed_s is None else needed_s * 1e6 / max(us, 1e-3)
        yield PieceTime(us=us, nbytes=nbytes, flops=sum(flops.values()), of_device=of_device)


def share_of_device(time: PieceTime) -> str:
    """`of_device` in percent; ">100%" if it is more, and empty if it is not known.

    How much more says nothing of the device: it depends on how much lay in its caches.
    """
    if time.of_device is None:
        return ""
    return f"{time.of_device:.0%}" if time.of_device < _MORE else ">100%"


def _needed_s(device: DeviceSpeed, nbytes: int, flops: Mapping[str, int]) -> float | None:
    """Seconds that a device needs at least; None if it is not known how fast it computes products."""
    if not flops.keys() <= device.flops_per_s.keys():
        return None
    computing_s = sum(count / device.flops_per_s[kind] for kind, count in flops.items())
    return max(nbytes / device.copy_bytes_per_s, computing_s)


def _nbytes(graph: OperationGraph, nodes: Sequence[Node], readers: Mapping[int, int]) -> int:
    inside = Counter(uid for node in nodes for uid in node.reads)
    written = {uid for node in nodes for uid in node.writes}
    moved = {
        uid for uid in written if readers[uid] > inside[uid] or graph.tensor(uid).role is TensorRole.BOUND
    }
    moved |= {uid for uid in inside if uid not in written}
    return sum(_size(graph, uid) * graph.tensor(uid).dtype.itemsize for uid in moved)


def _size(graph: OperationGraph, uid: int) -> int:
    """Elements of a tensor in memory; 0 of a number."""
    tensor = graph.tensor(uid)
    return math.prod(tensor.dims) if tensor.role in (TensorRole.BOUND, TensorRole.VIRTUAL) else 0


def _flops(graph: OperationGraph, nodes: Sequence[Node]) -> Counter[str]:
    """Operations of products, by the kind of their operands, as in `DeviceSpeed.flops_per_s`."""
    found: Counter[str] = Counter()
    for node in nodes:
        if count := multiplications(graph, node):
            dtype = graph.tensor(node.reads[0]).dtype
            kind = "tf32" if dtype is DType.FLOAT32 and graph.numerics.tf32 else dtype.value
            found[kind] += 2 * count
    return found


def multiplications(graph: OperationGraph, node: Node) -> int:
    """The multiplications of a convolution, a product, attention or a recurrent layer; else 0."""

    def dims(uid: int) -> tuple[int, ...]:
        return graph.tensor(uid).dims

    match node:
        case (
            ConvolutionForward(w=w, y=y)
            | ConvolutionBackwardData(w=w, dy=y)
            | ConvolutionBackwardFilter(dw=w, dy=y)
        ):
            return math.prod(dims(y)) * math.prod(dims(w)[1:])
        case MatMul(a=a, y=y) | GroupedMatMul(tokens=a, y=y) | GroupedMatMulBackwardWeights(tokens=a, dy=y):
            return math.prod(dims(y)) * dims(a)[-1]
        case (
            Recurrent(w_ih=w, w_hh=r, y=y, w_hr=p)
            | RecurrentBackwardData(w_ih=w, w_hh=r, y=y, w_hr=p)
            | RecurrentBackwardWeights(dw_ih=w, dw_hh=r, y=y, dw_hr=p)
        ):
            weights = sum(math.prod(dims(each)) for each in (w, r, p) if each is not None)
            return math.prod(dims(y)[:2]) * weights
        case Attention(q=q, k=k, v=v):
            return math.prod(dims(q)[:-1]) * dims(k)[-2] * (dims(q)[-1] + dims(v)[-1])
        case AttentionBackward(q=q, k=k, v=v):
            return math.prod(dims(q)[:-1]) * dims(k)[-2] * (3 * dims(q)[-1] + 2 * dims(v)[-1])
    return 0
