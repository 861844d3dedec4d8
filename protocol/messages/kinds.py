"""The list of messages that are no operations: one line for each file.

A file's `__all__` is what users import of it, from `cudnn_actor`: its messages. See "Adding a message" in
docs/architecture.md.
"""

from cudnn_actor.protocol.messages.buffer_messages import *
from cudnn_actor.protocol.messages.convolution_messages import *
from cudnn_actor.protocol.messages.planning_messages import *
from cudnn_actor.protocol.messages.run_graph import *
from cudnn_actor.protocol.messages.service_messages import *
