"""Kernels of recurrent layers on reserves that are bytes: they read and write the numbers in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cudnn_actor.engines.cpu.fast.kernels import Kernel, Operands, Step
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import Node, Recurrent, RecurrentBackwardData, RecurrentBackwardWeights
from cudnn_actor.protocol.operations.base import Specs
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["on_bytes"]


def on_bytes(make: Callable[[Node, Specs], Kernel | None]) -> Callable[[Node, Specs], Kernel | None]:
    """The maker of a recurrent operation's kernel, also for bytes in the place of tensors."""

    def make_on_bytes(node: Node, specs: Specs) -> Kernel | None:
        assert isinstance(node, Recurrent | RecurrentBackwardData | RecurrentBackwardWeights)
        kept = node.kept_specs(specs)
        kernel = make(node, {**specs, **kept})
        return kernel if kernel is None or not kept else _OnBytes(kernel, kept)

    return make_on_bytes


@dataclass(frozen=True)
class _OnBytes:
    """A kernel, and the specs of the tensors that the bytes among its operands stand for."""

    kernel: Kernel
    kept: Mapping[str, TensorSpec]

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch of a lane: the kernel's."""
        return self.kernel.footprint(lanes)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        return self.kernel.bind(self._with_views(operands), self._with_views(results), lanes)

    def _with_views(self, arrays: Operands) -> Operands:
        """The arrays, with views of the bytes as tensors. Bytes behind those stay as they are."""
        views = {
            name: arrays[name][: spec.nbytes].view(spec.dtype.numpy).reshape(spec.dims)
            for name, spec in self.kept.items()
            if name in arrays
        }
        return {**arrays, **views}
