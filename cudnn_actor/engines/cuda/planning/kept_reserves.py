"""Hands libcudnn's reserve from the step of recurrent layers to the step of their gradients, in one plan.

Each of the two pieces has been checked by itself. In the check, the piece of the gradients computed the
layers again, by the same function with the same arguments. In a plan of both pieces, the step of the layers
writes its reserve to memory that is held until the gradients have read it. Then the gradients need not
compute the layers again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.operations.recurrent_calls import Layers, LayersBackward
from cudnn_actor.engines.cuda.planning.recurrent_layers import Kept
from cudnn_actor.engines.cuda.running.recipe import OperationStep, Scratch, Source, Step, align
from cudnn_actor.engines.scratch_places import Held

__all__ = ["Handing", "handings"]


class Handing(NamedTuple):
    """A reserve that is handed on.

    Parameters
    ----------
    kept
        The numbers of the two pieces.
    layers, gradients
        The numbers of the two steps in their pieces' plans.
    memory
        The memory that is held from the layers' piece to the gradients' piece, by the names of the layers'
        operands: the reserve, and y if the layers write it to their own scratch memory. The uids are
        negative: no graph has them.
    """

    kept: Kept
    layers: int
    gradients: int
    memory: Mapping[str, Held]

    def hand_on(self, steps: Sequence[list[Step]], offsets: Mapping[int, int]) -> None:
        """Change the steps of the two pieces.

        `steps`: the steps of each piece. `offsets`: where memory lies in the plan's scratch memory, by uid.
        """
        own, back = steps[self.kept.layers], steps[self.kept.gradients]
        moved = {
            _source(own[self.layers], name): Scratch(offsets[held.uid], held.size)
            for name, held in self.memory.items()
        }
        own[:] = [
            msgspec.structs.replace(step, sources=tuple(moved.get(each, each) for each in step.sources))
            for step in own
        ]
        back[self.gradients] = _reading_step(back[self.gradients], own[self.layers])


def handings(kept: Sequence[Kept], steps: Sequence[Sequence[Step]]) -> Iterator[Handing]:
    """Yields the reserves that can be handed on. `steps`: the steps of each piece's own plan."""
    for number, each in enumerate(kept):
        layers, gradients = _find(steps[each.layers], Layers), _find(steps[each.gradients], LayersBackward)
        if layers is None or gradients is None:
            continue  # a piece runs its layers in several steps
        if "y" in _names(steps[each.gradients][gradients]):
            continue  # the gradients by weights read another y than the layers write
        step = steps[each.layers][layers]
        names = ["reserve", *(["y"] if isinstance(_source(step, "y"), Scratch) else [])]
        memory = {
            name: Held(
                -1 - 2 * number - place, align(_form(step, name).spec.nbytes), each.layers, each.gradients
            )
            for place, name in enumerate(names)
        }
        yield Handing(each, layers, gradients, memory)


def _find(steps: Sequence[Step], kind: type[Any]) -> int | None:
    """The number of the step of this kind, which has a reserve; None if several steps run the layers."""
    found = None
    for number, step in enumerate(steps):
        if isinstance(step, OperationStep) and isinstance(step.operation, Layers | LayersBackward):
            if found is not None:
                return None
            found = number if isinstance(step.operation, kind) and "reserve" in _names(step) else None
    return found


def _names(step: Any) -> list[str]:
    """The names of a step's operands, in the order of its tensors."""
    return [name for name, _ in step.operation.named()]


def _source(step: Any, name: str) -> Source:
    """The source of an operand of a step."""
    source: Source = step.sources[_names(step).index(name)]
    return source


def _form(step: Any, name: str) -> Any:
    """An operand of a step as it is stored."""
    return step.tensors[_names(step).index(name)]


def _reading_step(step: Any, layers: Step) -> OperationStep:
    """The step of the gradients, changed to read what the step of the layers has written."""
    operands = dict(zip(_names(step), zip(step.tensors, step.sources, strict=False), strict=True))
    operands |= {name: (_form(layers, name), _source(layers, name)) for name in ("y", "reserve")}
    named = msgspec.structs.replace(step.operation, y=0, again=False)
    numbers = {name: number for number, (name, _) in enumerate(named.named())}
    operation = named.with_operands(numbers.__getitem__)
    found: OperationStep = msgspec.structs.replace(
        step,
        operation=msgspec.structs.replace(operation, numerics=step.operation.numerics),
        tensors=tuple(operands[name][0] for name in numbers),
        sources=(*(operands[name][1] for name in numbers), *step.sources[len(step.tensors) :]),
    )
    return found
