"""One supervised actor per GPU that owns cuDNN and answers asyncio.

    async with spawn(device="auto") as gpu:
        x = await gpu.upload(image)
        ...

Use `spawn` in async code, `start` with threads and pykka actors, `child_spec` with your own supervisor, and
`FaultPlan` to test what your service does when the GPU side fails. These are the names that most programs
need. Operations are imported from `cudnn_actor.operations`, messages from `cudnn_actor.messages`, and all
errors from `cudnn_actor.errors`.
"""

from __future__ import annotations

from cudnn_actor import _linux  # noqa: F401 - first: on other systems it raises a clear error
import typing as _typing
from cudnn_actor import moved_names as _names
from cudnn_actor import errors as errors, logging as logging, messages as messages, operations as operations
from cudnn_actor.models import BatchedModel as BatchedModel, Model as Model
from cudnn_actor.options import Options as Options
from cudnn_actor.protocol import (
    Activation as Activation,
    BufferRef as BufferRef,
    ConvBwdData as ConvBwdData,
    ConvBwdFilter as ConvBwdFilter,
    ConvFwd as ConvFwd,
    ConvSpec as ConvSpec,
    CudnnActorError as CudnnActorError,
    DeadlineExceeded as DeadlineExceeded,
    DType as DType,
    Epilogue as Epilogue,
    ExecutionFailed as ExecutionFailed,
    Explanation as Explanation,
    Graph as Graph,
    GraphBuilder as GraphBuilder,
    InvalidRequest as InvalidRequest,
    Layout as Layout,
    Loop as Loop,
    MailboxFull as MailboxFull,
    Numerics as Numerics,
    OutcomeUnknown as OutcomeUnknown,
    OutOfMemory as OutOfMemory,
    QuarantinedRequest as QuarantinedRequest,
    Receipt as Receipt,
    RunGraph as RunGraph,
    RunLoop as RunLoop,
    ServiceStopped as ServiceStopped,
    StaleBufferError as StaleBufferError,
    StartFailed as StartFailed,
    Statistics as Statistics,
    TensorSpec as TensorSpec,
    UnsupportedGraph as UnsupportedGraph,
)
from cudnn_actor.service.as_child import child_spec as child_spec
from cudnn_actor.service.client import CudnnRef as CudnnRef
from cudnn_actor.service.health import Health as Health
from cudnn_actor.service.metrics import Metrics as Metrics
from cudnn_actor.service.scopes import Scope as Scope
from cudnn_actor.service.service import CudnnService as CudnnService, start as start
from cudnn_actor.service.spawning import spawn as spawn
from cudnn_actor.supervision import Fault as Fault, FaultPlan as FaultPlan

if _typing.TYPE_CHECKING:  # else it is one of those that are imported at their first use
    from cudnn_actor.attached import connect as connect

__version__ = "0.1.0"

__all__ = sorted(  # type-checkers see what is imported as itself
    name
    for name, value in {**globals(), **_names.LATER}.items()
    if name[0] != "_" and type(value).__name__ not in ("module", "_Feature")  # and not `annotations`
)


def __dir__() -> list[str]:
    return sorted({*globals(), *_names.LATER})


if not _typing.TYPE_CHECKING:  # to a type checker, a name that has moved is not here
    __getattr__ = _names.find_name
