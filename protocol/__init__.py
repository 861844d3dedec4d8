"""Messages, tensor and graph specs, buffer references and errors: pure data, no I/O."""

from __future__ import annotations

from cudnn_actor.protocol.graphs.explanation import (
    Explanation as Explanation,
    Measured as Measured,
    PieceOfPlan as PieceOfPlan,
    ScratchTensor as ScratchTensor,
    Tuned as Tuned,
)
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder as GraphBuilder, Tensor as Tensor
from cudnn_actor.protocol.graphs.limits import GraphLimits as GraphLimits
from cudnn_actor.protocol.graphs.named_graph import Graph as Graph, Port as Port
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph as OperationGraph
from cudnn_actor.protocol.graphs.timing import DeviceSpeed as DeviceSpeed, PieceTime as PieceTime
from cudnn_actor.protocol.messages.codec import *
from cudnn_actor.protocol.messages.kinds import *
from cudnn_actor.protocol.messages.model_messages import (
    Draws as Draws,
    ModelGraph as ModelGraph,
    ModelRef as ModelRef,
)
from cudnn_actor.protocol.messages.messages import Compute as Compute, Message as Message
from cudnn_actor.protocol.messages.receipts import *
from cudnn_actor.protocol.messages.run_loop import Loop as Loop
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData as ConvolutionBackwardData,
    ConvolutionBackwardFilter as ConvolutionBackwardFilter,
    ConvolutionForward as ConvolutionForward,
    GraphTensor as GraphTensor,
    Movement as Movement,
    Node as Node,
    Operation as Operation,
    TensorRole as TensorRole,
)
from cudnn_actor.protocol.operations.families import *
from cudnn_actor.protocol.types.buffers import BufferRef as BufferRef
from cudnn_actor.protocol.types.conv import ConvSpec as ConvSpec
from cudnn_actor.protocol.types.device_array import DeviceArray as DeviceArray
from cudnn_actor.protocol.types.dtypes import DType as DType
from cudnn_actor.protocol.types.epilogue import Activation as Activation, Epilogue as Epilogue
from cudnn_actor.protocol.errors import *
from cudnn_actor.protocol.errors import ErrorRecord as ErrorRecord
from cudnn_actor.protocol.types.numerics import Numerics as Numerics
from cudnn_actor.protocol.types.tensor import (
    Layout as Layout,
    TensorSpec as TensorSpec,
    packed_strides as packed_strides,
)

__all__ = sorted(  # type-checkers see what is imported with `*`, or as itself
    name
    for name, value in globals().items()
    if name[0] != "_" and type(value).__name__ not in ("module", "_Feature")  # and not `annotations`
)
