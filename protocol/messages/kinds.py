"""The list of messages that are no operations: what users import from `cudnn_actor.messages`.

A name that is imported as itself is exported. See "Adding a message" in docs/architecture.md.
"""

from cudnn_actor.protocol.messages.buffer_messages import (
    Allocate as Allocate,
    Copy as Copy,
    Download as Download,
    Fill as Fill,
    Free as Free,
    LendStaging as LendStaging,
    Upload as Upload,
    View as View,
)
from cudnn_actor.protocol.messages.convolution_messages import (
    ConvBwdData as ConvBwdData,
    ConvBwdFilter as ConvBwdFilter,
    ConvFwd as ConvFwd,
)
from cudnn_actor.protocol.messages.model_messages import (
    DeployModel as DeployModel,
    RunModel as RunModel,
    UnloadModel as UnloadModel,
    WarmModel as WarmModel,
    WriteWeights as WriteWeights,
)
from cudnn_actor.protocol.messages.planning_messages import (
    ClearPlans as ClearPlans,
    Explain as Explain,
    Warm as Warm,
)
from cudnn_actor.protocol.messages.run_graph import RunGraph as RunGraph
from cudnn_actor.protocol.messages.run_loop import RunLoop as RunLoop
from cudnn_actor.protocol.messages.service_messages import (
    Drain as Drain,
    GetStatistics as GetStatistics,
    Ping as Ping,
)
