"""The list of operations, and of the types of their fields: the names in `cudnn_actor.operations`.

A name that is imported as itself is exported. Everything else follows from this list: `OPERATIONS`, the
unions that are decoded, the public names. See "Adding an operation" in docs/architecture.md.
"""

from cudnn_actor.protocol.operations.attention import (
    Attention as Attention,
    AttentionBackward as AttentionBackward,
    alibi_slopes as alibi_slopes,
)
from cudnn_actor.protocol.operations.channel_norms import (
    BatchNorm as BatchNorm,
    BatchNormBackward as BatchNormBackward,
    BatchNormTraining as BatchNormTraining,
    GenStats as GenStats,
    GroupNorm as GroupNorm,
    GroupNormBackward as GroupNormBackward,
    InstanceNorm as InstanceNorm,
    InstanceNormBackward as InstanceNormBackward,
)
from cudnn_actor.protocol.operations.ctc_loss import CTCLoss as CTCLoss
from cudnn_actor.protocol.operations.grid_sampling import GridPadding as GridPadding, GridSample as GridSample
from cudnn_actor.protocol.operations.grouped_matmul import (
    GroupedMatMul as GroupedMatMul,
    GroupedMatMulBackwardWeights as GroupedMatMulBackwardWeights,
)
from cudnn_actor.protocol.operations.indexing import (
    Gather as Gather,
    GatherElements as GatherElements,
    GatherND as GatherND,
    Scatter as Scatter,
    ScatterElements as ScatterElements,
    ScatterND as ScatterND,
    ScatterReduction as ScatterReduction,
)
from cudnn_actor.protocol.operations.matmul import MatMul as MatMul
from cudnn_actor.protocol.operations.movement import (
    BitCast as BitCast,
    BorderPad as BorderPad,
    Concat as Concat,
    Pad as Pad,
    PadMode as PadMode,
    Reshape as Reshape,
    Slice as Slice,
    Transpose as Transpose,
)
from cudnn_actor.protocol.operations.normalization import (
    LayerNorm as LayerNorm,
    LayerNormBackward as LayerNormBackward,
    RMSNorm as RMSNorm,
    RMSNormBackward as RMSNormBackward,
)
from cudnn_actor.protocol.operations.pointwise import Pointwise as Pointwise, PointwiseMode as PointwiseMode
from cudnn_actor.protocol.operations.pooling import (
    AdaptiveWindow as AdaptiveWindow,
    AvgPool as AvgPool,
    AvgPoolBackward as AvgPoolBackward,
    LpPool as LpPool,
    LpPoolBackward as LpPoolBackward,
    MaxPool as MaxPool,
    MaxPoolBackward as MaxPoolBackward,
    Window as Window,
)
from cudnn_actor.protocol.operations.random import (
    RandomBernoulli as RandomBernoulli,
    RandomIntegers as RandomIntegers,
    RandomNormal as RandomNormal,
    RandomUniform as RandomUniform,
)
from cudnn_actor.protocol.operations.recurrent import (
    Recurrent as Recurrent,
    RecurrentBackwardData as RecurrentBackwardData,
    RecurrentBackwardWeights as RecurrentBackwardWeights,
)
from cudnn_actor.protocol.operations.recurrent_layer import RecurrentMode as RecurrentMode
from cudnn_actor.protocol.operations.recurrent_steps import (
    CellActivation as CellActivation,
    CellFunction as CellFunction,
    RecurrentCell as RecurrentCell,
    RecurrentSteps as RecurrentSteps,
)
from cudnn_actor.protocol.operations.reduction import (
    ArgReduction as ArgReduction,
    Cumulative as Cumulative,
    Reduction as Reduction,
    ReductionMode as ReductionMode,
)
from cudnn_actor.protocol.operations.resampling import (
    Coordinates as Coordinates,
    NearestRounding as NearestRounding,
    Resample as Resample,
    ResampleBackward as ResampleBackward,
    ResampleMode as ResampleMode,
)
from cudnn_actor.protocol.operations.response_norm import (
    LocalResponseNorm as LocalResponseNorm,
    LocalResponseNormBackward as LocalResponseNormBackward,
)
from cudnn_actor.protocol.operations.softmax import Softmax as Softmax, SoftmaxBackward as SoftmaxBackward
from cudnn_actor.protocol.operations.sorting import TopK as TopK
