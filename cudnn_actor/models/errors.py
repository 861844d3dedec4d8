"""The errors of loading and importing a model. They never travel between processes."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest

__all__ = ["InvalidModel", "ModelNotFound", "UnsupportedModel"]

_SHOWN = 20


class InvalidModel(CudnnActorError, ValueError):
    """Raised when a model cannot be read, or contradicts itself. Nothing was allocated.

    Carries `where` (the node, the initialiser or the part of the file), `problem` and `fix`.
    """

    where: str
    problem: str
    fix: str

    def __init__(
        self, *, where: str, problem: str, fix: str = "export it again, or check it with onnx.checker"
    ) -> None:
        text = f"the model cannot be loaded: {where}: {problem}; {fix}"
        super().__init__(text, where=where, problem=problem, fix=fix)


class ModelNotFound(InvalidRequest, FileNotFoundError):
    """Raised when there is no file at the path of a model. Carries what `InvalidRequest` carries."""


class UnsupportedModel(CudnnActorError):
    """Raised when a valid model has nodes or inputs that cannot be run. Nothing was allocated.

    Carries `nodes`: a text for each such node (name, operator and reason) and for each such input (name and
    type).
    """

    nodes: tuple[str, ...]

    def __init__(self, *, nodes: Sequence[str]) -> None:
        nodes = tuple(nodes)
        more = f"; and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
        part = "node" if all(node.startswith("node ") for node in nodes) else "part"
        count = f"1 {part}" if len(nodes) == 1 else f"{len(nodes)} {part}s"
        super().__init__(
            f"the model has {count} that cannot be run: {'; '.join(nodes[:_SHOWN])}{more}. "
            "`cudnn-actor docs onnx` lists what is supported",
            nodes=nodes,
        )
