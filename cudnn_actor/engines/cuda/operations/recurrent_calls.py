"""The calls of libcudnn that run recurrent layers, as operations of plans' steps. No graph has them."""

from __future__ import annotations

from cudnn_actor.protocol.operations import Operation, RecurrentMode
from cudnn_actor.protocol.operations.base import ALLOCATED, T

__all__ = ["LayerBackwardData", "LayerBackwardWeights", "LayerWeights", "Layers", "LayersBackward"]


class _OfLayers(Operation[T]):
    """The base of layers and of their gradients: `Recurrent` operations, the lowest first, each of which
    reads the one before it.

    Parameters
    ----------
    x
        The input of the first layer.
    w_ih, w_hh, bias, w_hr, h0, c0
        The operands of each layer; empty if they are left out.
    mode, lengths
        See `Recurrent`.
    """

    x: T
    w_ih: tuple[T, ...]
    w_hh: tuple[T, ...]
    bias: tuple[T, ...] = ()
    w_hr: tuple[T, ...] = ()
    h0: tuple[T, ...] = ()
    c0: tuple[T, ...] = ()
    mode: RecurrentMode
    lengths: tuple[int, ...] | None = None


class LayerWeights(Operation[T], tag="recurrent_layer_weights"):
    """Copies the weights of layers into the space that the library wants them in.

    Parameters
    ----------
    w_ih, w_hh, bias, w_hr
        The operands of each layer; empty if they are left out.
    space
        The space of the weights.
    mode
        See `Recurrent`.
    """

    kind = "recurrent_weights"
    inputs = ("w_ih", "w_hh", "bias", "w_hr")
    outputs = ("space",)
    w_ih: tuple[T, ...]
    w_hh: tuple[T, ...]
    bias: tuple[T, ...] = ()
    w_hr: tuple[T, ...] = ()
    space: T = ALLOCATED
    mode: RecurrentMode


class Layers(_OfLayers[T], tag="recurrent_layers"):
    """Layers of a recurrent network.

    Parameters
    ----------
    space
        The space of the weights; None if it lies behind the reserve.
    y
        The output of the last layer.
    h_n, c_n
        The last states of each layer; empty if they are left out.
    reserve
        The library's reserve for the gradients; None if there are none. Without `space`, the space of the
        weights lies behind it, and the run copies the weights there.
    """

    kind = "recurrent"
    inputs = ("x", "w_ih", "w_hh", "bias", "w_hr", "h0", "c0", "space")
    outputs = ("y", "h_n", "c_n", "reserve")
    space: T | None = None
    y: T = ALLOCATED
    h_n: tuple[T, ...] = ()
    c_n: tuple[T, ...] = ()
    reserve: T | None = None


class LayersBackward(_OfLayers[T], tag="recurrent_layers_backward"):
    """The gradients of `Layers`, by data and by weights.

    Parameters
    ----------
    y
        The output of the last layer, for the gradients of the weights; None for the one that is computed
        again.
    dy, dh_n, dc_n
        Gradients of the results; None, or empty, for 0.
    reserve
        The library's reserve of the forward pass, and the space of the weights; with `again`, memory for
        both.
    dx, dh0, dc0, dw_ih, dw_hh, dbias, dw_hr
        The gradients. Those of the weights are empty if they are not wanted.
    again
        Whether the forward pass is computed again.
    """

    kind = "recurrent_bwd"
    inputs = ("x", "w_ih", "w_hh", "bias", "w_hr", "h0", "c0", "y", "dy", "dh_n", "dc_n", "reserve")
    outputs = ("dx", "dh0", "dc0", "dw_ih", "dw_hh", "dbias", "dw_hr")
    y: T | None = None
    dy: T | None = None
    dh_n: tuple[T, ...] = ()
    dc_n: tuple[T, ...] = ()
    reserve: T
    dx: T = ALLOCATED
    dh0: tuple[T, ...] = ()
    dc0: tuple[T, ...] = ()
    dw_ih: tuple[T, ...] = ()
    dw_hh: tuple[T, ...] = ()
    dbias: tuple[T, ...] = ()
    dw_hr: tuple[T, ...] = ()
    again: bool = True


class LayerBackwardData(_OfLayers[T], tag="recurrent_layer_backward_data"):
    """The gradients of `Layers` by data, from a reserve that may lie in a buffer.

    Parameters
    ----------
    space
        The space of the weights.
    y
        The output of the last layer.
    reserve
        The library's reserve of the forward pass, which stays as it is.
    dy, dh_n, dc_n
        Gradients of the results; None, or empty, for 0.
    dx, dh0, dc0
        The gradients.
    slopes
        The reserve as the library changes it, for the gradients of the weights; None if they are not wanted.
    """

    kind = "recurrent_bwd_data"
    inputs = (
        *("x", "w_ih", "w_hh", "bias", "w_hr", "h0", "c0", "space"),
        *("y", "reserve", "dy", "dh_n", "dc_n"),
    )
    outputs = ("dx", "dh0", "dc0", "slopes")
    space: T
    y: T
    reserve: T
    dy: T | None = None
    dh_n: tuple[T, ...] = ()
    dc_n: tuple[T, ...] = ()
    dx: T = ALLOCATED
    dh0: tuple[T, ...] = ()
    dc0: tuple[T, ...] = ()
    slopes: T | None = None


class LayerBackwardWeights(Operation[T], tag="recurrent_layer_backward_weights"):
    """The gradients of `Layers` by weights, from slopes that may lie in a buffer.

    Parameters
    ----------
    x, y, h0
        Operands and the output of the layers.
    slopes
        The slopes that `LayerBackwardData` wrote.
    dw_ih, dw_hh, dbias, dw_hr
        The gradients; the last two are empty if they are not wanted.
    mode, lengths
        See `Recurrent`.
    """

    kind = "recurrent_bwd_weights"
    inputs = ("x", "y", "h0", "slopes")
    outputs = ("dw_ih", "dw_hh", "dbias", "dw_hr")
    x: T
    y: T
    h0: tuple[T, ...] = ()
    slopes: T
    dw_ih: tuple[T, ...]
    dw_hh: tuple[T, ...]
    dbias: tuple[T, ...] = ()
    dw_hr: tuple[T, ...] = ()
    mode: RecurrentMode
    lengths: tuple[int, ...] | None = None
