"""Recurrent networks: one layer, in one direction or in both.

The definitions are PyTorch's, of `RNN`, `LSTM` and `GRU`, and so are those of cuDNN.
https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html

A layer is one operation. Layers one above the other are operations that follow each other, with what is
wanted between them: dropout, for one. An engine that has a faster way for several layers can see the chain.

The gradients take two operations, as in cuDNN: that by data walks back through the steps, and leaves the
gradients of what the gates are computed from. Those of the weights are products of these for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Specs,
    T,
    require,
    require_elements,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.operations.functions import sigmoid
from cudnn_actor.protocol.operations.recurrent_layer import (
    KEPT,
    LayerSizes,
    RecurrentLayer,
    RecurrentMode,
    walk,
)
from cudnn_actor.protocol.operations.reserves import as_bytes, from_bytes, is_bytes
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Recurrent", "RecurrentBackwardData", "RecurrentBackwardWeights"]


class Recurrent(RecurrentLayer[T], tag=True):
    """A layer of a recurrent network, in one direction or in both. Answered by a `Receipt`.

    T is the number of steps, B of sequences, I of features, H of units, and P of the elements of a state: H
    unless the state is a projection. D is 1, or 2 with the direction that begins at the end. All have x's
    dtype unless something else is said.

    Parameters
    ----------
    x
        Input, of a floating-point dtype, dims (T, B, I).
    w_ih, w_hh
        The weights of the input and of the state, dims (D, gates * H, I) and (D, gates * H, P), with the
        gates in the order of `RecurrentMode`: PyTorch's `weight_ih_l0` and `weight_hh_l0`, with those of the
        other direction behind them.
    bias
        Dims (D, 2, gates * H): PyTorch's `bias_ih_l0` and `bias_hh_l0`. None for 0.
    w_hr
        Of an LSTM whose state is a projection of its units, dims (D, P, H), with P < H.
    h0, c0
        The state before the first step, dims (D, B, P), and of an LSTM its cells, dims (D, B, H). None for 0.
    y
        Result, dims (T, B, D * P): the states of each step. 0 behind the end of a sequence.
    h_n, c_n
        The state behind the last step of each sequence, and of an LSTM its cells; dims as h0 and c0.
    reserve
        For the gradients, float32 (float64 where x is), dims (D, T, B, K, H): K numbers of each unit at each
        step. With `RELU` and `TANH` h, so that K is 1; of a GRU r, z, n and the state's part of n, K = 4; of
        an LSTM i, f, g, o and c, K = 5. Where the state is a projection, also h before it is projected: then
        K = 6. 0 behind the end of a sequence. Or bytes, uint8 of dims (N,), which only the engine that wrote
        them understands, with N at least `CudnnRef.reserve_nbytes` of this layer.
    mode
        What a step computes.
    lengths
        How many steps each sequence has, from 0 to T; None for T. The direction that begins at the end
        begins at a sequence's own end.
    """

    kind = "recurrent"
    inputs = ("x", "w_ih", "w_hh", "bias", "w_hr", "h0", "c0")
    outputs = ("y", "h_n", "c_n", "reserve")
    optional = frozenset({"bias", "w_hr", "h0", "c0", "h_n", "c_n", "reserve"})
    x: T
    w_ih: T
    w_hh: T
    bias: T | None = None
    w_hr: T | None = None
    h0: T | None = None
    c0: T | None = None
    y: T = ALLOCATED
    h_n: T | None = None
    c_n: T | None = None
    reserve: T | None = None

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "x")
        self._check_mode(specs, "w_hr", "c0")
        self._check_ranks(specs, x="T, B, I", bias="D, 2, gates * H")
        x = specs["x"]
        require_elements(specs, "x", (0, 2), "steps or features")
        require(specs, "w_ih", specs["w_ih"].dims, x.dtype)
        sizes = self._of_weights(specs, *x.dims[:2])
        require(specs, "w_ih", (*specs["w_ih"].dims[:2], x.dims[2]), x.dtype)
        if "bias" in specs:
            require(specs, "bias", (sizes.directions, 2, self.mode.gates * sizes.hidden), x.dtype)
        self._check_lengths(sizes.steps, sizes.batch)
        wide, of_state = sizes.directions * sizes.state, (sizes.directions, sizes.batch)
        found = {
            "y": TensorSpec.packed((*x.dims[:2], wide), x.dtype),
            "h_n": TensorSpec.packed((*of_state, sizes.state), x.dtype),
            "reserve": self._kept_spec(sizes, x.dtype),
        }
        if self.mode is RecurrentMode.LSTM:
            found["c_n"] = TensorSpec.packed((*of_state, sizes.hidden), x.dtype)
        return found

    def check(self, specs: Specs) -> None:
        self._check_mode(specs, "c_n")
        super().check(self._without_bytes(specs, "reserve"))

    def work(self, specs: Specs) -> int:
        (steps, batch, _), weights = specs["x"].dims, sum(specs[name].size for name in ("w_ih", "w_hh"))
        return steps * batch * weights + specs["y"].size

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        return self._draw_small(xp, specs, draw, *self.inputs)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x, w_hh, w_hr = values["x"], values["w_hh"], values.get("w_hr")
        (steps, batch, _), (directions, rows, state) = x.shape, w_hh.shape
        hidden = rows // self.mode.gates
        within = self.within(xp, steps, batch)
        zeros = xp.zeros((directions, 2, rows))
        bias = values.get("bias", zeros)
        y = xp.zeros((steps, batch, directions * state))
        h_n = xp.array(values.get("h0", xp.zeros((directions, batch, state))))
        c_n = xp.array(values.get("c0", xp.zeros((directions, batch, hidden))))
        kept = self.kept_numbers(projected=w_hr is not None)
        reserve = xp.zeros((directions, steps, batch, kept, hidden) if "reserve" in specs else (0,))
        for way in range(directions):
            of_input = x @ values["w_ih"][way].T + bias[way, 0]
            h, c = h_n[way], c_n[way]
            for time, _ in walk(steps, way):
                of_state = h @ w_hh[way].T + bias[way, 1]
                full, cells, noted = self._step(xp, of_input[time], of_state, h, c)
                new = full if w_hr is None else full @ w_hr[way].T
                if w_hr is not None:
                    noted = (*noted, full)
                one = within[time]
                h, c = xp.where(one, new, h), xp.where(one, cells, c)
                y[time, :, way * state : (way + 1) * state] = xp.where(one, new, 0.0)
                if "reserve" in specs:
                    reserve[way, time] = xp.where(one[..., None], xp.stack(noted, 1), 0.0)
            h_n[way], c_n[way] = h, c
        if "reserve" in specs and is_bytes(specs["reserve"]):
            wide = self.compute((specs["y"].dtype,))
            reserve = as_bytes(xp, reserve, wide, specs["reserve"].size)
        found = {"y": y, "h_n": h_n, "c_n": c_n, "reserve": reserve}
        return {name: found[name] for name in specs}

    def _step(
        self, xp: Any, a: Array, b: Array, h: Array, c: Array
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        """h before any projection, c, and what is kept for the gradients. `a`, `b`: parts of all gates."""
        if self.mode in (RecurrentMode.RELU, RecurrentMode.TANH):
            new = xp.maximum(a + b, 0) if self.mode is RecurrentMode.RELU else xp.tanh(a + b)
            return new, c, (new,)
        of_input, of_state = (part.reshape(len(part), self.mode.gates, -1) for part in (a, b))
        if self.mode is RecurrentMode.GRU:
            r, z = (sigmoid(xp, of_input[:, n] + of_state[:, n]) for n in range(2))
            n = xp.tanh(of_input[:, 2] + r * of_state[:, 2])
            return (1 - z) * n + z * h, c, (r, z, n, of_state[:, 2])
        i, f, o = (sigmoid(xp, of_input[:, n] + of_state[:, n]) for n in (0, 1, 3))
        g = xp.tanh(of_input[:, 2] + of_state[:, 2])
        cells = f * c + i * g
        return o * xp.tanh(cells), cells, (i, f, g, o, cells)

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients of all inputs. The reserve has none."""
        if "reserve" in d:
            raise InvalidRequest(
                field="reserve", value=None, problem="has no gradient", fix="compute with y alone"
            )
        own: dict[str, Any] = dict(self.named(self.inputs))
        layer: dict[str, Any] = {"mode": self.mode, "lengths": self.lengths, "y": self.y}
        given: dict[str, Any] = {name: own.get(name) for name in self.inputs}
        slopes: dict[str, Any] = {f"d{name}": d.get(name) for name in ("y", "h_n", "c_n")}
        reserve = g.output(self, "reserve")
        back: RecurrentBackwardData[Any] = RecurrentBackwardData(**given, **layer, **slopes, reserve=reserve)
        states = tuple(f"d{name}" for name in ("h0", "c0") if name in own)
        of_data = g.apply(back, also=(*states, "slopes"))
        some = [name for name in ("w_ih", "w_hh", "bias", "w_hr") if name in own]
        of_weights = g.apply(
            RecurrentBackwardWeights(**layer, x=self.x, h0=own.get("h0"), slopes=of_data.slopes),
            also=tuple(f"d{name}" for name in some[2:]),
            like={f"d{name}": own[name] for name in some if len(of_data.slopes.dims) == 1},
        )
        found = {"x": of_data.dx} | {name[1:]: getattr(of_data, name) for name in states}
        return found | {name: getattr(of_weights, f"d{name}") for name in some}


class RecurrentBackwardData(RecurrentLayer[T], tag=True):
    """The gradients of `Recurrent` by x and by the state before the first step. Answered by a `Receipt`.

    Parameters
    ----------
    y, reserve
        As the forward pass wrote them. What they hold behind the end of a sequence counts as 0. Without a
        reserve, the forward pass is computed again, and y is not read.
    x, w_ih, w_hh, bias, w_hr, h0, c0, mode, lengths
        As in the forward pass.
    dy, dh_n, dc_n
        Gradients of y, h_n and c_n, of their dims and of y's dtype; None for 0. Of dy, what lies behind the
        end of a sequence counts as 0.
    dx
        Gradient of x, dims (T, B, I), of y's dtype. 0 behind the end of a sequence.
    dh0, dc0
        Gradients of the state before the first step, dims (D, B, P), and of an LSTM of its cells, dims
        (D, B, H). Both of y's dtype, also if h0 and c0 were left out.
    slopes
        For `RecurrentBackwardWeights`, of the dims and dtype of `reserve`: for each gate, the gradient of
        what its sigmoid, tanh or maximum is taken of; of a GRU, behind these, that of the state's part of n.
        Where the state is a projection, the last two are h before the projection and, in the first P of H
        places, the gradient of the state. All others are 0. Or as many bytes as the reserve has.
    """

    kind = "recurrent_bwd_data"
    inputs = ("x", "y", "reserve", "w_ih", "w_hh", "bias", "w_hr", "h0", "c0", "dy", "dh_n", "dc_n")
    outputs = ("dx", "dh0", "dc0", "slopes")
    optional = frozenset(
        {"reserve", "bias", "w_hr", "h0", "c0", "dy", "dh_n", "dc_n", "dh0", "dc0", "slopes"}
    )
    x: T
    y: T
    reserve: T | None = None
    w_ih: T
    w_hh: T
    bias: T | None = None
    w_hr: T | None = None
    h0: T | None = None
    c0: T | None = None
    dy: T | None = None
    dh_n: T | None = None
    dc_n: T | None = None
    dx: T = ALLOCATED
    dh0: T | None = None
    dc0: T | None = None
    slopes: T | None = None

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "y")
        self._check_mode(specs, "w_hr", "c0", "dc_n")
        self._check_ranks(specs, y="T, B, D * P", reserve="D, T, B, K, H", dh_n="D, B, P", dc_n="D, B, H")
        self._check_ranks(specs, x="T, B, I", bias="D, 2, gates * H")
        y = specs["y"]
        steps, batch, _ = y.dims
        require_elements(specs, "y", (0, 2), "steps or states")
        require(specs, "w_ih", specs["w_ih"].dims, y.dtype)
        sizes = self._of_weights(specs, steps, batch)
        require(specs, "y", (steps, batch, sizes.directions * sizes.state))
        kept = self._kept_spec(sizes, y.dtype)
        if "reserve" in specs:
            if is_bytes(specs["reserve"]):
                kept = TensorSpec.packed(specs["reserve"].dims, DType.UINT8)
            require(specs, "reserve", kept.dims, kept.dtype)
        self._check_lengths(steps, batch)
        h = TensorSpec.packed((sizes.directions, batch, sizes.state), y.dtype)
        c = TensorSpec.packed((sizes.directions, batch, sizes.hidden), y.dtype)
        dx = TensorSpec.packed((steps, batch, sizes.features), y.dtype)
        require(specs, "x", dx.dims, y.dtype)
        bias = TensorSpec.packed((sizes.directions, 2, self.mode.gates * sizes.hidden), y.dtype)
        for name, spec in {"dy": y, "dh_n": h, "dc_n": c, "bias": bias}.items():
            if name in specs:
                require(specs, name, spec.dims, y.dtype)
        found = {"dx": dx, "dh0": h, "slopes": kept}
        return found | {"dc0": c} if self.mode is RecurrentMode.LSTM else found

    def check(self, specs: Specs) -> None:
        self._check_mode(specs, "dc0")
        if all(name in specs for name in KEPT) and is_bytes(specs["reserve"]) != is_bytes(specs["slopes"]):
            raise InvalidRequest(
                field="slopes",
                value=specs["slopes"].dims,
                problem="are not of the reserve's kind",
                fix="give both as bytes, or both as tensors of numbers",
            )
        super().check(self._without_bytes(specs, "slopes"))

    def work(self, specs: Specs) -> int:
        (steps, batch, _), weights = specs["y"].dims, sum(specs[name].size for name in ("w_ih", "w_hh"))
        return steps * batch * (2 * weights + specs["y"].dims[2])

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """y and the reserve are what follows from the others."""
        values = self._draw_small(
            xp, specs, draw, *(name for name in self.inputs if name not in ("y", "reserve"))
        )
        found = self.forward(xp, values)
        if "reserve" in specs and is_bytes(specs["reserve"]):
            found["reserve"] = self._bytes_of(xp, found["reserve"], specs)
        return values | {name: found[name] for name in ("y", "reserve") if name in specs}

    def _bytes_of(self, xp: Any, reserve: Array, specs: Specs) -> Array:
        """A reserve's bytes, as many as its spec has: another engine may keep fewer than its numbers take."""
        wide, nbytes = self.compute((specs["y"].dtype,)), specs["reserve"].size
        return as_bytes(xp, reserve, wide, max(nbytes, reserve.size * wide.itemsize))[:nbytes]

    def layer(self) -> Recurrent[Any]:
        """The forward pass, with operands that stand for nothing: for its mode and lengths alone."""
        return Recurrent(x=0, w_ih=0, w_hh=0, mode=self.mode, lengths=self.lengths)

    def forward(self, xp: Any, values: Mapping[str, Array]) -> dict[str, Array]:
        """y and the reserve, as they follow from the other inputs: see `evaluate`."""
        given = {name: values[name] for name in Recurrent.inputs if name in values}
        found = TensorSpec.packed(())  # of an output that is wanted, which is all that is looked at
        return self.layer().evaluate(xp, given, {"y": found, "reserve": found})

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        if "reserve" not in values:
            values = {**values, **self.forward(xp, values)}
        y, reserve, w_hh, w_hr = values["y"], values["reserve"], values["w_hh"], values.get("w_hr")
        steps, batch, _ = y.shape
        directions, rows, state = w_hh.shape
        within, gates = self.within(xp, steps, batch), self.mode.gates
        hidden = rows // gates
        if reserve.ndim == 1:
            dims = (directions, steps, batch, self.kept_numbers(projected=w_hr is not None), hidden)
            reserve = from_bytes(xp, reserve, dims, self.compute((specs["dx"].dtype,)))
        dx = xp.zeros((steps, batch, values["w_ih"].shape[2]))
        dh0 = xp.array(values.get("dh_n", xp.zeros((directions, batch, state))))
        dc0 = xp.array(values.get("dc_n", xp.zeros((directions, batch, hidden))))
        slopes = xp.zeros(reserve.shape)
        h0 = values.get("h0", xp.zeros((directions, batch, state)))
        c0 = values.get("c0", xp.zeros((directions, batch, hidden)))
        for way in range(directions):
            own = slice(way * state, (way + 1) * state)
            dh, dc = dh0[way], dc0[way]
            for time, before in reversed(walk(steps, way)):
                one, kept, h, c = within[time], reserve[way, time], h0[way], c0[way]
                if before is not None:
                    h = xp.where(within[before], y[before, :, own], h)
                    if self.mode is RecurrentMode.LSTM:
                        c = xp.where(within[before], reserve[way, before, :, 4], c)
                total = dh + values["dy"][time, :, own] if "dy" in values else dh
                full = total if w_hr is None else total @ w_hr[way]
                of_input, of_state, direct, dcells = self._stepped_back(xp, kept, (full, dc), (h, c))
                found = [*of_input]
                if self.mode is RecurrentMode.GRU:
                    found.append(of_state[2])
                elif self.mode is RecurrentMode.LSTM:
                    found += [xp.zeros((batch, hidden))] * (kept.shape[1] - 4)
                slope = xp.stack(found, 1)
                if w_hr is not None:
                    slope[:, 4], slope[:, 5, :state] = kept[:, 5], total
                slopes[way, time] = xp.where(one[..., None], slope, 0.0)
                dh = xp.where(one, xp.stack(of_state, 1).reshape(batch, rows) @ w_hh[way] + direct, dh)
                dc = xp.where(one, dcells, dc)
            dh0[way], dc0[way] = dh, dc
            dx += slopes[way, :, :, :gates].reshape(steps, batch, rows) @ values["w_ih"][way]
        if "slopes" in specs and is_bytes(specs["slopes"]):
            wide = self.compute((specs["dx"].dtype,))
            slopes = as_bytes(xp, slopes, wide, specs["slopes"].size)
        result = {"dx": dx, "dh0": dh0, "dc0": dc0, "slopes": slopes}
        return {name: result[name] for name in specs}

    def _stepped_back(
        self, xp: Any, kept: Array, slopes: tuple[Array, Array], before: tuple[Array, Array]
    ) -> tuple[list[Array], list[Array], Any, Array]:
        """Gradients of the gates' two parts, what comes to the state before by itself, and of its cells.

        `slopes`: the gradients of the state, without a projection, and of its cells. `before`: the state
        before the step, and its cells.
        """
        (dh, dc), (h, c) = slopes, before
        if self.mode in (RecurrentMode.RELU, RecurrentMode.TANH):
            new = kept[:, 0]
            da = dh * (new > 0) if self.mode is RecurrentMode.RELU else dh * (1 - new * new)
            return [da], [da], 0.0, dc
        if self.mode is RecurrentMode.GRU:
            r, z, n, q = (kept[:, number] for number in range(4))
            dn = dh * (1 - z) * (1 - n * n)
            dr, dz = dn * q * r * (1 - r), dh * (h - n) * z * (1 - z)
            return [dr, dz, dn], [dr, dz, dn * r], dh * z, dc
        i, f, g, o, new = (kept[:, number] for number in range(5))
        seen = xp.tanh(new)
        cells = dc + dh * o * (1 - seen * seen)
        di, df = cells * g * i * (1 - i), cells * c * f * (1 - f)
        dg, do = cells * i * (1 - g * g), dh * seen * o * (1 - o)
        return [di, df, dg, do], [di, df, dg, do], 0.0, cells * f


class RecurrentBackwardWeights(RecurrentLayer[T], tag=True):
    """The gradients of `Recurrent` by its weights. Answered by a `Receipt`.

    Parameters
    ----------
    x, y, h0, mode, lengths
        As in the forward pass. Behind the end of a sequence, x and y must be finite.
    slopes
        As `RecurrentBackwardData` wrote them: 0 behind the end of a sequence. Of bytes, the sizes of the
        layer do not follow, so that all gradients that are wanted are given.
    dw_ih, dw_hh, dbias, dw_hr
        Gradients of the weights, of their dims and of x's dtype; `dw_hr` only where the state is a
        projection.
    """

    kind = "recurrent_bwd_weights"
    inputs = ("x", "y", "slopes", "h0")
    outputs = ("dw_ih", "dw_hh", "dbias", "dw_hr")
    optional = frozenset({"h0", "dbias", "dw_hr"})
    x: T
    y: T
    slopes: T
    h0: T | None = None
    dw_ih: T = ALLOCATED
    dw_hh: T = ALLOCATED
    dbias: T | None = None
    dw_hr: T | None = None

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "x")
        self._check_mode(specs, "dw_hr")
        self._check_ranks(specs, x="T, B, I", y="T, B, D * P", slopes="D, T, B, K, H", h0="D, B, P")
        require_elements(specs, "x", (0, 2), "steps or features")
        require_elements(specs, "y", (2,), "states")
        x = specs["x"]
        if is_bytes(specs["slopes"]):
            require(specs, "y", (*x.dims[:2], specs["y"].dims[2]), x.dtype)
            self._check_lengths(*x.dims[:2])
            return {}
        directions, *_, hidden = specs["slopes"].dims
        require_elements(specs, "slopes", (0, 4), "directions or units")
        steps, batch, features = x.dims
        state = specs["y"].dims[2] // directions
        require(specs, "y", (steps, batch, directions * state), x.dtype)
        sizes = LayerSizes(steps, batch, features, directions, hidden, state)
        fits = 0 < state < hidden if sizes.has_projection else state == hidden
        if directions > 2 or not fits or (sizes.has_projection and self.mode is not RecurrentMode.LSTM):
            raise InvalidRequest(
                field="slopes",
                value=specs["slopes"].dims,
                problem=f"do not belong to y, of dims {specs['y'].dims}",
                fix="give them as the gradient by data wrote them",
            )
        wanted = self._kept_spec(sizes, x.dtype)
        require(specs, "slopes", wanted.dims, wanted.dtype)
        if "h0" in specs:
            require(specs, "h0", (directions, batch, state), x.dtype)
        self._check_lengths(steps, batch)
        return self._gradients(sizes, x.dtype)

    def _gradients(self, sizes: LayerSizes, dtype: DType) -> dict[str, TensorSpec]:
        """The specs of the results."""
        rows = self.mode.gates * sizes.hidden
        dims = {
            "dw_ih": (sizes.directions, rows, sizes.features),
            "dw_hh": (sizes.directions, rows, sizes.state),
            "dbias": (sizes.directions, 2, rows),
        }
        if sizes.has_projection:
            dims["dw_hr"] = (sizes.directions, sizes.state, sizes.hidden)
        return {name: TensorSpec.packed(each, dtype) for name, each in dims.items()}

    def _of_gradients(self, specs: Specs) -> LayerSizes:
        """The sizes that follow from the gradients, which are checked, where the slopes are bytes."""
        x = specs["x"]
        self._check_ranks(specs, dw_ih="D, gates * H, I", dw_hh="D, gates * H, P")
        (directions, rows, _), state = specs["dw_ih"].dims, specs["dw_hh"].dims[2]
        hidden = rows // self.mode.gates
        if directions not in (1, 2) or not hidden > 0 or not 0 < state <= hidden:
            raise InvalidRequest(
                field="dw_ih",
                value=specs["dw_ih"].dims,
                problem=f"does not belong to dw_hh, of dims {specs['dw_hh'].dims}",
                fix=f"give them dims (D, {self.mode.gates} * H, I) and (D, {self.mode.gates} * H, P)",
            )
        if state < hidden and self.mode is not RecurrentMode.LSTM:
            require(specs, "dw_hh", (directions, rows, hidden), x.dtype)
        steps, batch, features = x.dims
        sizes = LayerSizes(steps, batch, features, directions, hidden, state)
        for name, wanted in self._gradients(sizes, x.dtype).items():
            if name in specs:
                require(specs, name, wanted.dims, wanted.dtype)
        require(specs, "y", (*x.dims[:2], directions * state), x.dtype)
        if "h0" in specs:
            require(specs, "h0", (directions, x.dims[1], state), x.dtype)
        return sizes

    def _kept_of(self, specs: Specs) -> TensorSpec:
        return self._kept_spec(self._of_gradients(specs), specs["x"].dtype)

    def check(self, specs: Specs) -> None:
        super().check(specs)
        found = self.infer(specs)
        if is_bytes(specs["slopes"]):
            found = self._gradients(self._of_gradients(specs), specs["x"].dtype)
        if "dw_hr" in specs and "dw_hr" not in found:
            raise InvalidRequest(
                field="dw_hr",
                value=specs["dw_hr"].dims,
                problem="is of a projection, which there is not",
                fix="leave it out",
            )

    def work(self, specs: Specs) -> int:
        (steps, batch, features), states = specs["x"].dims, specs["y"].dims[2]
        size = steps * batch * states if is_bytes(specs["slopes"]) else specs["slopes"].size
        return size * (features + states)

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        x, y, slopes, gates = values["x"], values["y"], values["slopes"], self.mode.gates
        (steps, batch, features) = x.shape
        if slopes.ndim == 1:
            directions, rows, _ = specs["dw_ih"].dims
            kept = self.kept_numbers(projected=y.shape[2] < directions * (rows // gates))
            dims = (directions, steps, batch, kept, rows // gates)
            slopes = from_bytes(xp, slopes, dims, self.compute((specs["dw_ih"].dtype,)))
        directions, *_, hidden = slopes.shape
        state, rows = y.shape[2] // directions, gates * hidden
        within = self.within(xp, steps, batch)
        h0 = values.get("h0", xp.zeros((directions, batch, state)))
        dw_ih, dw_hh = xp.zeros((directions, rows, features)), xp.zeros((directions, rows, state))
        dbias, dw_hr = xp.zeros((directions, 2, rows)), xp.zeros((directions, state, hidden))
        inputs = x.reshape(-1, features)
        for way in range(directions):
            own = y[:, :, way * state : (way + 1) * state]
            states = xp.zeros((steps, batch, state))
            for time, before in walk(steps, way):
                if before is None:
                    states[time] = h0[way]
                else:
                    states[time] = xp.where(within[before], own[before], h0[way])
            states = states.reshape(-1, state)
            of_input = slopes[way, :, :, :gates]
            of_state = of_input
            if self.mode is RecurrentMode.GRU:
                of_state = slopes[way][:, :, [0, 1, 3]]
            of_input, of_state = (each.reshape(-1, rows) for each in (of_input, of_state))
            dw_ih[way], dw_hh[way] = of_input.T @ inputs, of_state.T @ states
            dbias[way, 0], dbias[way, 1] = of_input.sum(axis=0), of_state.sum(axis=0)
            if "dw_hr" in specs:
                full, own_slope = (slopes[way, :, :, n].reshape(-1, hidden) for n in (4, 5))
                dw_hr[way] = own_slope[:, :state].T @ full
        found = {"dw_ih": dw_ih, "dw_hh": dw_hh, "dbias": dbias, "dw_hr": dw_hr}
        return {name: found[name] for name in specs}


def _layer(mode: RecurrentMode, directions: int, lengths: tuple[int, ...] | None) -> Example:
    hidden, rows = 6, 6 * mode.gates
    dims = {
        "x": (5, 3, 4),
        "w_ih": (directions, rows, 4),
        "w_hh": (directions, rows, hidden),
        "bias": (directions, 2, rows),
    }
    states = ("h0", "c0") if mode is RecurrentMode.LSTM else ("h0",)
    dims |= dict.fromkeys(states, (directions, 3, hidden))
    ends = [name.replace("0", "_n") for name in states]
    of: dict[str, Any] = {"mode": mode, "lengths": lengths}
    given: dict[str, Any] = {name: name for name in ("w_ih", "w_hh", *states)}
    last: dict[str, Any] = {name: name for name in ends}
    back: dict[str, Any] = {
        name: name for name in ("dx", "slopes", *(f"d{each}" for each in (*states, *ends)))
    }
    operations = (
        Recurrent(x="x", **given, bias="bias", y="y", **last, reserve="reserve", **of),
        RecurrentBackwardData(x="x", y="y", reserve="reserve", **given, bias="bias", dy="dy", **back, **of),
        RecurrentBackwardWeights(
            x="x", y="y", slopes="slopes", h0="h0", dw_ih="dw_ih", dw_hh="dw_hh", dbias="dbias", **of
        ),
    )
    return Example(dims=dims, operations=operations, tolerance=ROUNDED)


def examples() -> tuple[Example, ...]:
    """An LSTM and a GRU in both directions, and one of tanh with sequences of several lengths."""
    return (
        _layer(RecurrentMode.LSTM, 2, (5, 0, 3)),
        _layer(RecurrentMode.GRU, 2, None),
        _layer(RecurrentMode.TANH, 1, (2, 5, 1)),
    )
