"""Recurrent layers as ONNX nodes."""

from __future__ import annotations

import numpy as np

from cudnn_actor.engines.cpu.sessions.draft import Draft, refuse
from cudnn_actor.engines.cpu.sessions.onnx_format import Value
from cudnn_actor.protocol.operations import Recurrent, RecurrentMode

__all__ = ["emit_recurrent"]

_ORDER = {RecurrentMode.LSTM: (0, 3, 1, 2), RecurrentMode.GRU: (1, 0, 2)}
"""The numbers of our gates, in the order of ONNX's gates."""
_OPERATORS = {RecurrentMode.LSTM: "LSTM", RecurrentMode.GRU: "GRU"}


def emit_recurrent(draft: Draft, operation: Recurrent[int]) -> None:
    """Write a layer without a projection."""
    mode, lengths = operation.mode, operation.lengths
    if operation.w_hr is not None or operation.reserve is not None:
        refuse("a layer with a projection, or with what its gradients read")
    if lengths is not None and min(lengths) == 0:
        refuse("a sequence without steps")
    steps, batch, _ = draft.dims(operation.x)
    directions, rows, hidden = draft.dims(operation.w_hh)
    gates = np.array(_ORDER.get(mode, (0,)))
    order = (gates[:, None] * hidden + np.arange(hidden)).reshape(-1)
    x, w, r = (draft.read_float(uid) for uid in (operation.x, operation.w_ih, operation.w_hh))
    if mode.gates > 1:
        w, r = (draft.emit("Gather", each, draft.list_of(order), axis=1) for each in (w, r))
    bias = ""
    if operation.bias is not None:
        bias = draft.emit("Reshape", draft.read_float(operation.bias), draft.list_of((directions, 2 * rows)))
        if mode.gates > 1:
            bias = draft.emit("Gather", bias, draft.list_of([*order, *(rows + order)]), axis=1)
    listed = "" if lengths is None else draft.constant(np.array(lengths, np.int32))
    states = ["" if uid is None else draft.read_float(uid) for uid in (operation.h0, operation.c0)]
    count = 2 if mode is RecurrentMode.LSTM else 1
    attributes: dict[str, Value] = {"hidden_size": hidden}
    if directions == 2:
        attributes["direction"] = "bidirectional"
    if mode is RecurrentMode.RELU:
        attributes["activations"] = ("Relu",) * directions
    if mode is RecurrentMode.GRU:
        attributes["linear_before_reset"] = 1
    given = (x, w, r, bias, listed, *states[:count])
    y, *ends = draft.emit_several(1 + count, _OPERATORS.get(mode, "RNN"), *given, **attributes)
    beside = draft.emit("Transpose", y, perm=(0, 2, 1, 3))
    dims = draft.list_of((steps, batch, directions * hidden))
    draft.write_float(operation.y, draft.emit("Reshape", beside, dims))
    for uid, end in zip((operation.h_n, operation.c_n), ends, strict=False):
        if uid is not None:
            draft.write_float(uid, end)
