"""The list of messages that are no operations: what users import from `cudnn_actor`.

What a module here names in `__all__` is exported. See "Adding a message" in docs/architecture.md.
"""

from cudnn_actor.protocol.messages.buffer_messages import *
from cudnn_actor.protocol.messages.convolution_messages import *
from cudnn_actor.protocol.messages.planning_messages import *
from cudnn_actor.protocol.messages.run_graph import *
from cudnn_actor.protocol.messages.service_messages import *
