"""The functions of a `GraphBuilder` for recurrent networks of several layers, with weights as in PyTorch.

Each layer is an operation. Dropout between them is that of `GraphBuilder.dropout`, the same on all engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.composed_functions import ComposedFunctions
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.graph_recorder import as_called
from cudnn_actor.protocol.graphs.named_outputs import named_outputs
from cudnn_actor.protocol.graphs.random_functions import RandomFunctions
from cudnn_actor.protocol.graphs.spatial_functions import SpatialFunctions
from cudnn_actor.protocol.operations import Recurrent, RecurrentMode
from cudnn_actor.protocol.operations.random import check_dropout
from cudnn_actor.protocol.types.checks import as_indices, require_choice, require_flag
from cudnn_actor.protocol.types.spatial import are_several

__all__ = ["RecurrentFunctions"]

Weights = Sequence[Sequence[Tensor]]
_OF_WEIGHTS = dict.fromkeys(("w_ih", "w_hh", "bias", "w_hr", "tensors"), "weights")
_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class _Options(NamedTuple):
    """The options of all three functions: see `RecurrentFunctions.lstm`."""

    bidirectional: bool
    batch_first: bool
    lengths: Sequence[int] | None
    dropout: float
    state: Tensor | None


class RecurrentFunctions(ComposedFunctions, SpatialFunctions, RandomFunctions):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    def lstm(
        self,
        x: Tensor,
        weights: Weights,
        h0: Tensor | None = None,
        c0: Tensor | None = None,
        *,
        bidirectional: bool = False,
        batch_first: bool = False,
        lengths: Sequence[int] | None = None,
        dropout: float = 0.0,
        state: Tensor | None = None,
    ) -> Any:
        """Layers of LSTMs, as PyTorch's `LSTM`: see `Recurrent`.

        Parameters
        ----------
        x
            Dims (T, B, I); with `batch_first`, (B, T, I).
        weights
            Those of each layer, and with `bidirectional` those of each direction: layer 0, its other
            direction, layer 1, and so on. Each is a sequence in PyTorch's order: weight_ih, weight_hh, then
            bias_ih and bias_hh if there are biases, and weight_hr if states are projections. PyTorch's
            `module.all_weights` has this form.
        h0, c0
            States before the first step, dims (layers * directions, B, P), and cells, dims
            (layers * directions, B, H). P is H unless states are projections. None for 0.
        lengths
            How many steps each sequence has, numbers from 0 to T and no tensor; None for all.
        dropout
            The probability with which a number between two layers becomes 0: see `dropout`.
        state
            What dropout draws from: T * B * directions * P numbers for each layer but the last.

        Returns
        -------
        tuple
            y, h_n and c_n, by name: the states of the last layer at each step, of dims (T, B, directions * P)
            or, with `batch_first`, (B, T, ...); and those behind the last step, of dims as h0 and c0.
        """
        options = _Options(bidirectional, batch_first, lengths, dropout, state)
        return self._layers(RecurrentMode.LSTM, x, weights, {"h0": h0, "c0": c0}, options)

    def gru(
        self,
        x: Tensor,
        weights: Weights,
        h0: Tensor | None = None,
        *,
        bidirectional: bool = False,
        batch_first: bool = False,
        lengths: Sequence[int] | None = None,
        dropout: float = 0.0,
        state: Tensor | None = None,
    ) -> Any:
        """Layers of GRUs, as PyTorch's `GRU`: y and h_n. The parameters are those of `lstm`."""
        options = _Options(bidirectional, batch_first, lengths, dropout, state)
        return self._layers(RecurrentMode.GRU, x, weights, {"h0": h0}, options)

    def rnn(
        self,
        x: Tensor,
        weights: Weights,
        h0: Tensor | None = None,
        *,
        activation: str = "tanh",
        bidirectional: bool = False,
        batch_first: bool = False,
        lengths: Sequence[int] | None = None,
        dropout: float = 0.0,
        state: Tensor | None = None,
    ) -> Any:
        """Layers of plain recurrent networks, as PyTorch's `RNN`: y and h_n.

        `activation`: "tanh" or "relu". The other parameters are those of `lstm`.
        """
        require_choice("activation", activation, ("tanh", "relu"))
        options = _Options(bidirectional, batch_first, lengths, dropout, state)
        return self._layers(RecurrentMode(activation), x, weights, {"h0": h0}, options)

    def pack_padded_sequence(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """The steps of sequences, without those behind their ends: as PyTorch's function of that name.

        Of x with dims (T, B, ...), the result has dims (sum of lengths, ...): step 0 of all sequences, then
        step 1 of those that have one, and so on. `lengths` must not increase, as with `enforce_sorted`.
        """
        self._own("x", x)
        found = _descending(lengths)
        if x.rank < 2 or x.dims[1] != len(found) or x.dims[0] < max(found):
            raise InvalidRequest(
                field="x",
                value=x.dims,
                problem=f"has not {len(found)} sequences of {max(found)} steps",
                fix=f"give it dims (steps, {len(found)}, ...)",
            )
        parts = [
            self.reshape(
                self.slice(x, (steps, slice(0, count))), ((steps.stop - steps.start) * count, *x.dims[2:])
            )
            for steps, count in _runs(found)
        ]
        return parts[0] if len(parts) == 1 else self.concatenate(parts)

    def pad_packed_sequence(self, data: Tensor, lengths: Sequence[int]) -> Tensor:
        """The reverse of `pack_padded_sequence`: dims (longest, B, ...), 0 behind the ends of sequences."""
        self._own("data", data)
        found = _descending(lengths)
        if not data.rank or data.dims[0] != sum(found):
            raise InvalidRequest(
                field="data",
                value=data.dims,
                problem=f"has not the {sum(found)} steps of all sequences",
                fix="give lengths as they were packed with",
            )
        parts, start = [], 0
        for steps, count in _runs(found):
            size = steps.stop - steps.start
            part = self.slice(data, slice(start, start + size * count))
            part = self.reshape(part, (size, count, *data.dims[1:]))
            widths = [(0, 0)] * part.rank
            widths[1] = (0, len(found) - count)
            parts.append(self.pad(part, tuple(widths)) if count < len(found) else part)
            start += size * count
        return parts[0] if len(parts) == 1 else self.concatenate(parts)

    def _layers(
        self,
        mode: RecurrentMode,
        x: Tensor,
        weights: Weights,
        states: dict[str, Tensor | None],
        options: _Options,
    ) -> Any:
        for name in ("bidirectional", "batch_first"):
            require_flag(name, getattr(options, name))
        for name, tensor in {"x": x, **states, "state": options.state}.items():
            if name == "x" or tensor is not None:
                self._own(name, tensor)
        if x.rank != 3:
            raise InvalidRequest(
                field="x",
                value=x.dims,
                problem="is not of rank 3",
                fix="give it dims (steps, batch, features)",
            )
        of_layers = self._of_layers(weights, 2 if options.bidirectional else 1)
        lengths, of_state = _lengths(options.lengths), self._of_states(states, weights)
        check_dropout(options.dropout, options.state, of="number")
        if options.state is not None:
            self._check_state(options.state)
        y = self.transpose(x, (1, 0, 2)) if options.batch_first else x
        ends: dict[str, list[Tensor]] = {}
        last, drawn = len(of_layers) - 1, options.state
        for number, own in enumerate(of_layers):
            count = len(own)
            _check_sizes(mode, own, number * count, y)
            given = {
                name: None if each is None else self.slice(each, slice(number * count, (number + 1) * count))
                for name, each in of_state.items()
            }
            made = self._layer(mode, y, own, given, lengths)
            y = made.y
            for name in states:
                end = name.replace("0", "_n")
                ends.setdefault(end, []).append(getattr(made, end))
            if options.dropout and drawn is not None and number < last:
                y = self.dropout(y, options.dropout, drawn)
                drawn = self.advance(drawn, y.dims[0] * y.dims[1] * y.dims[2])
        found = {"y": self.transpose(y, (1, 0, 2)) if options.batch_first else y}
        found |= {name: each[0] if len(each) == 1 else self.concatenate(each) for name, each in ends.items()}
        return named_outputs("RecurrentOutputs", found)

    def _layer(
        self,
        mode: RecurrentMode,
        x: Tensor,
        weights: Sequence[Sequence[Tensor]],
        states: Mapping[str, Any],
        lengths: tuple[int, ...] | None,
    ) -> Any:
        """One layer, with the weights of each direction."""
        count = len(weights[0])
        biases = [self.stack(own[2:4]) for own in weights] if count > 3 else []
        projections = [own[-1] for own in weights] if count in (3, 5) else []
        layer: Recurrent[Any] = Recurrent(
            x=x,
            w_ih=self._together([own[0] for own in weights]),
            w_hh=self._together([own[1] for own in weights]),
            bias=self._together(biases) if biases else None,
            w_hr=self._together(projections) if projections else None,
            **states,
            mode=mode,
            lengths=lengths,
        )
        ends = ("h_n", "c_n") if mode is RecurrentMode.LSTM else ("h_n",)
        try:
            return self.apply(layer, also=ends)
        except InvalidRequest as error:
            raise as_called(error, _OF_WEIGHTS) from None

    def _together(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors of the directions as one, whose first dim is the direction."""
        return self.expand_dims(tensors[0], 0) if len(tensors) == 1 else self.stack(tensors)

    def _of_layers(self, weights: object, directions: int) -> list[list[Sequence[Tensor]]]:
        """The weights of each layer and direction. Raises `InvalidRequest`."""
        fix = "give [weight_ih, weight_hh, bias_ih, bias_hh] of each layer and direction"
        if not are_several(weights) or not len(weights) or len(weights) % directions:
            raise InvalidRequest(
                field="weights",
                value=weights,
                problem=f"are not those of layers with {directions} direction{'s' * (directions > 1)}",
                fix=fix,
            )
        for number, own in enumerate(weights):
            name = f"weights[{number}]"
            if not are_several(own) or not 2 <= len(own) <= 5:
                problem = "is no sequence of 2 to 5 tensors"
                raise InvalidRequest(field=name, value=own, problem=problem, fix=fix)
            if len(own) != len(weights[0]):
                problem = f"has {len(own)} tensors, but weights[0] has {len(weights[0])}"
                raise InvalidRequest(field=name, value=own, problem=problem, fix=fix)
            for place, tensor in enumerate(own):
                self._own(f"{name}[{place}]", tensor)
                first = weights[number - number % directions][place]
                rank = 1 if len(own) > 3 and place in (2, 3) else 2
                if tensor.rank != rank or tensor.dims != first.dims or tensor.dtype is not first.dtype:
                    raise InvalidRequest(
                        field=f"{name}[{place}]",
                        value=tensor.dims,
                        problem=f"is no {_parts(own)[place]} of this layer",
                        fix=f"give it {rank} dims, the same ones in both directions",
                    )
            if len(own) > 3 and own[2].dims != own[3].dims:
                raise InvalidRequest(
                    field=f"{name}[3]",
                    value=own[3].dims,
                    problem=f"is not of the dims of bias_ih, {own[2].dims}",
                    fix=fix,
                )
        return [list(weights[at : at + directions]) for at in range(0, len(weights), directions)]

    def _of_states(
        self, states: dict[str, Tensor | None], weights: Sequence[Sequence[Tensor]]
    ) -> dict[str, Tensor | None]:
        """The states, each with as many parts as there are weights. Raises `InvalidRequest`."""
        for name, tensor in states.items():
            if tensor is None:
                continue
            if tensor.rank != 3 or tensor.dims[0] != len(weights):
                raise InvalidRequest(
                    field=name,
                    value=tensor.dims,
                    problem=f"has no state for each of {len(weights)} layers and directions",
                    fix=f"give it dims ({len(weights)}, batch, units)",
                )
        return states


def _parts(weights: Sequence[Tensor]) -> tuple[str, ...]:
    """PyTorch's names of the weights of a layer in one direction."""
    return _PARTS[: len(weights)] if len(weights) > 3 else (*_PARTS[:2], _PARTS[4])[: len(weights)]


def _check_sizes(mode: RecurrentMode, weights: Sequence[Sequence[Tensor]], first: int, x: Tensor) -> None:
    """Raise `InvalidRequest`, which names the tensor, unless the weights of a layer fit together, and to x.

    `first`: which of the caller's the layer's first ones are.
    """
    features = x.dims[2]
    for number, own in enumerate(weights, first):
        rows, gates = own[0].dims[0], mode.gates
        hidden, parts = rows // gates, _parts(own)
        state = own[1].dims[1] if "weight_hr" in parts else hidden
        wanted = {
            "weight_ih": (rows, features),
            "weight_hh": (rows, state),
            "bias_ih": (rows,),
            "bias_hh": (rows,),
            "weight_hr": (state, hidden),
        }
        for place, (part, tensor) in enumerate(zip(parts, own, strict=True)):
            field, given = f"weights[{number}][{place}]", Words(f"{tensor.dtype} {tensor.dims}")
            if rows % gates or not rows:
                problem, fix = f"has no rows for {gates} gates", f"give it dims ({gates} * units, {features})"
                raise InvalidRequest(field=field, value=given, problem=problem, fix=fix)
            if tensor.dims != wanted[part] or tensor.dtype is not x.dtype:
                problem = f"is no {part} of a layer of {hidden} units that reads {x.dtype} with {features} "
                fix = f"give it dims {wanted[part]}, of {x.dtype}"
                raise InvalidRequest(field=field, value=given, problem=f"{problem}features", fix=fix)


def _descending(lengths: object) -> tuple[int, ...]:
    """Lengths that do not increase, the first above 0. Raises `InvalidRequest`."""
    found = _lengths(lengths) or ()
    if not found or found[0] < 1 or min(found) < 0 or any(a < b for a, b in itertools.pairwise(found)):
        raise InvalidRequest(
            field="lengths",
            value=lengths,
            problem="must not increase, and begin with the longest",
            fix="sort the sequences by their lengths first",
        )
    return found


def _runs(lengths: tuple[int, ...]) -> Iterator[tuple[slice, int]]:
    """Steps that as many sequences have, and how many these are. `lengths` do not increase."""
    start = 0
    for count in range(len(lengths), 0, -1):
        if lengths[count - 1] > start:
            yield slice(start, lengths[count - 1]), count
            start = lengths[count - 1]


def _lengths(lengths: object) -> tuple[int, ...] | None:
    """Lengths as whole numbers. Raises `InvalidRequest`."""
    if lengths is None:
        return None
    try:
        return as_indices(lengths)
    except TypeError:
        raise InvalidRequest(
            field="lengths",
            value=lengths,
            problem="are no whole numbers",
            fix="give one for each sequence, as in lengths=(5, 3)",
        ) from None
