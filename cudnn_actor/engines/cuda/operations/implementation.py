"""How CUDA can run an operation: each family's file says so with `implement`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph
from cudnn_actor.engines.cuda.kernels.expressions import Value
from cudnn_actor.engines.cuda.kernels.kernel import Launch, Run, compile_run
from cudnn_actor.protocol.operations import GraphTensor, Operation
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["IMPLEMENTATIONS", "Asked", "Computed", "Implementation", "Launcher", "implement", "kernels"]


class Computed(NamedTuple):
    """A packed tensor that a kernel computes from an operation's operands before the operation runs.

    `value`: an elementwise expression, or an operation whose operands are names and that has the launcher
    "kernel". `operands`: the names of the operands that the expression's leaves read, in the order of the
    leaves' numbers, or of the operation's inputs.
    """

    value: Value | Operation[str]
    operands: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: DType


class Asked(NamedTuple):
    """The memory that a run needs, by a library's own answer.

    Parameters
    ----------
    workspace
        Bytes of the workspace.
    held
        Bytes of the operands whose contents only the library understands, by name. They are in no graph.
    """

    workspace: int
    held: Mapping[str, int]


class Launcher(NamedTuple):
    """A way to run an operation as a step of its own.

    Parameters
    ----------
    make
        Makes the run of an operation, which has its graph's numerics, on tensors of these specs, in this
        order, for a handle of cuDNN's. The run takes the tensors' addresses, and the workspace's if there is
        one; there are no scalars. Raises `Refused` and `EngineFailure` if it cannot.
    packed
        Whether the tensors must be packed in the order of their dims.
    workspace
        Returns the bytes of the run's workspace, from an operation and tensors; None if it has none, or if
        `asked` says it.
    asked
        Returns what the library says of the memory that the run needs, from the arguments of `make`; None if
        the library is not asked.
    launches
        Returns the run's launches, if they are of kernels of our own.
    first
        Whether this launcher is expected to be the fastest for an operation on these tensors, though it is
        not the first in the list.
    """

    make: Callable[[Any, Sequence[GraphTensor], Any], Run]
    packed: bool = False
    workspace: Callable[[Any, Sequence[GraphTensor]], int] | None = None
    asked: Callable[[Any, Sequence[GraphTensor], Any], Asked] | None = None
    launches: Callable[[Any, Sequence[GraphTensor]], Sequence[Launch]] | None = None
    first: Callable[[Any, Sequence[GraphTensor]], bool] | None = None


def kernels(
    launches: Callable[[Any, Sequence[GraphTensor]], Sequence[Launch]],
    workspace: Callable[[Any, Sequence[GraphTensor]], int] | None = None,
) -> Mapping[str, Launcher]:
    """The launcher "kernel", which launches kernels of our own.

    `launches`: returns the launches of an operation on tensors of these specs. The kernels' tensors are
    numbered in this order, and the workspace comes last. There are no launches if there are no elements.
    """

    def make(operation: Any, tensors: Sequence[GraphTensor], handle: Any) -> Run:
        del handle
        return compile_run(launches(operation, tensors))

    return {"kernel": Launcher(make, workspace=workspace, launches=launches)}


class Implementation(NamedTuple):
    """The ways in which CUDA can run an operation: a graph of cuDNN's first, then the launchers in order.

    Parameters
    ----------
    lower
        Adds the operation to a graph of cuDNN's frontend. Raises `Refused`.
    computed
        Returns the operands that cuDNN's graph must get instead of the given ones, by name, from the
        operation and its tensors. If there are any, the operation runs in a graph of its own.
    launchers
        The launchers by their names, as in plan tags.
    exact
        Whether the operation rounds nothing.
    refused
        Why CUDA does not run the operation; empty if it does.
    partly
        The part of it that CUDA does not run as an operation by itself; empty if it runs all.
    """

    lower: Callable[[FrontendGraph, Any], None] | None = None
    computed: Callable[[Any, Mapping[str, GraphTensor]], Mapping[str, Computed]] | None = None
    launchers: Mapping[str, Launcher] = MappingProxyType({})
    exact: bool = False
    refused: str = ""
    partly: str = ""

    @property
    def ways(self) -> int:
        """The number of ways: a graph of cuDNN's on the given tensors or packed ones, and each launcher."""
        return (self.lower is not None) * 2 + len(self.launchers)

    def launchers_in_order(self, operation: Operation[Any], tensors: Sequence[GraphTensor]) -> list[str]:
        """The names of the launchers, in the order in which they are to be tried for an operation."""

        def is_later(name: str) -> bool:
            first = self.launchers[name].first
            return first is None or not first(operation, tensors)

        return sorted(self.launchers, key=is_later)


IMPLEMENTATIONS: dict[type[Operation[Any]], Implementation] = {}
"""The implementation of each operation. Launchers stand in the order of their speed on most shapes (H200)."""


def implement(
    *operations: type[Operation[Any]],
    lower: Callable[[FrontendGraph, Any], None] | None = None,
    computed: Callable[[Any, Mapping[str, GraphTensor]], Mapping[str, Computed]] | None = None,
    launchers: Mapping[str, Launcher] = MappingProxyType({}),
    exact: bool = False,
    refused: str = "",
    partly: str = "",
) -> None:
    """Say how CUDA can run some operations, with the parameters of `Implementation`."""
    row = Implementation(lower, computed, launchers, exact, refused, partly)
    IMPLEMENTATIONS.update(dict.fromkeys(operations, row))
