"""One supervised actor per GPU that owns cuDNN and answers asyncio.

    async with spawn(device="auto") as gpu:
        x = await gpu.upload(image)
        ...

Use `spawn` in async code, `start` with threads and pykka actors, `child_spec` with your own supervisor, and
`FaultPlan` to test what your service does when the GPU side fails.
"""

from __future__ import annotations

from cudnn_actor import _linux  # noqa: F401 - first: on other systems it raises a clear error
from cudnn_actor import logging as logging
from cudnn_actor.attached import (
    ServedSocket as ServedSocket,
    connect as connect,
    serve_socket as serve_socket,
)
from cudnn_actor.broker.request_counts import Histogram as Histogram, RequestCounts as RequestCounts
from cudnn_actor.isolation.base import StandbyState as StandbyState
from cudnn_actor.models import (
    BatchedModel as BatchedModel,
    BatchStatistics as BatchStatistics,
    Feature as Feature,
    InvalidModel as InvalidModel,
    Model as Model,
    ModelNotFound as ModelNotFound,
    UnsupportedModel as UnsupportedModel,
)
from cudnn_actor.options import Options as Options
from cudnn_actor.protocol import (
    Activation as Activation,
    BufferRef as BufferRef,
    CacheStatistics as CacheStatistics,
    Compute as Compute,
    ContextLost as ContextLost,
    ConvSpec as ConvSpec,
    CudnnActorError as CudnnActorError,
    DeadlineExceeded as DeadlineExceeded,
    DeviceSpeed as DeviceSpeed,
    Draws as Draws,
    DType as DType,
    Epilogue as Epilogue,
    ExecutionFailed as ExecutionFailed,
    Explanation as Explanation,
    Graph as Graph,
    GraphBuilder as GraphBuilder,
    GraphLimits as GraphLimits,
    InvalidRequest as InvalidRequest,
    Layout as Layout,
    Loop as Loop,
    MailboxFull as MailboxFull,
    MalformedMessage as MalformedMessage,
    ModelGraph as ModelGraph,
    ModelRef as ModelRef,
    Message as Message,
    NoEventLoop as NoEventLoop,
    NotDeployed as NotDeployed,
    NoValues as NoValues,
    Numerics as Numerics,
    Operation as Operation,
    OutcomeUnknown as OutcomeUnknown,
    OutOfDescriptors as OutOfDescriptors,
    OutOfMemory as OutOfMemory,
    PieceOfPlan as PieceOfPlan,
    PieceTime as PieceTime,
    PlanCounts as PlanCounts,
    PlanStatistics as PlanStatistics,
    QuarantinedRequest as QuarantinedRequest,
    Receipt as Receipt,
    ReentrantAsk as ReentrantAsk,
    ServiceStopped as ServiceStopped,
    StaleBufferError as StaleBufferError,
    StaleReason as StaleReason,
    StartFailed as StartFailed,
    Statistics as Statistics,
    TensorSpec as TensorSpec,
    UnsupportedGraph as UnsupportedGraph,
)
from cudnn_actor.protocol.messages.kinds import *
from cudnn_actor.protocol.operations.families import *
from cudnn_actor.service.client import CudnnRef as CudnnRef
from cudnn_actor.service.health import Health as Health, HealthState as HealthState
from cudnn_actor.service.metrics import Metrics as Metrics
from cudnn_actor.service.scopes import Scope as Scope
from cudnn_actor.service.service import CudnnService as CudnnService, child_spec as child_spec, start as start
from cudnn_actor.service.spawning import Spawning as Spawning, spawn as spawn
from cudnn_actor.supervision import (
    Escalated as Escalated,
    ExitKind as ExitKind,
    ExitReason as ExitReason,
    Fault as Fault,
    FaultPlan as FaultPlan,
    FaultRule as FaultRule,
    Fired as Fired,
    LifecycleEvent as LifecycleEvent,
    Restarted as Restarted,
    Restarting as Restarting,
    Started as Started,
    Stopped as Stopped,
)

__version__ = "0.1.0"

__all__ = sorted(  # type-checkers see what is imported with `*`, or as itself
    name
    for name, value in globals().items()
    if name[0] != "_" and type(value).__name__ not in ("module", "_Feature")  # and not `annotations`
)
