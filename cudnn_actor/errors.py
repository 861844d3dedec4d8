"""Every error of this package: each says whether the request ran, and whether it is safe to send it again."""

from cudnn_actor.models.errors import (
    InvalidModel as InvalidModel,
    ModelNotFound as ModelNotFound,
    UnsupportedModel as UnsupportedModel,
)
from cudnn_actor.protocol.errors import (
    ContextLost as ContextLost,
    CudnnActorError as CudnnActorError,
    DeadlineExceeded as DeadlineExceeded,
    ExecutionFailed as ExecutionFailed,
    InvalidRequest as InvalidRequest,
    MailboxFull as MailboxFull,
    MalformedMessage as MalformedMessage,
    NoEventLoop as NoEventLoop,
    NotDeployed as NotDeployed,
    NoValues as NoValues,
    OutcomeUnknown as OutcomeUnknown,
    OutOfDescriptors as OutOfDescriptors,
    OutOfMemory as OutOfMemory,
    QuarantinedRequest as QuarantinedRequest,
    ReentrantAsk as ReentrantAsk,
    ServiceStopped as ServiceStopped,
    StaleBufferError as StaleBufferError,
    StaleReason as StaleReason,
    StartFailed as StartFailed,
    UnsupportedGraph as UnsupportedGraph,
)

__all__ = sorted(name for name in globals() if name[0] != "_")
