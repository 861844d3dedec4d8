"""The typed messages, and their unions: one class per operation, never one per dtype.

A new message is a file of its own, a line in `kinds` and one in the union here.
"""

from __future__ import annotations

from cudnn_actor.protocol.messages.computations import *
from cudnn_actor.protocol.messages.kinds import *

Travelling = (
    Compute
    | Allocate
    | Upload
    | Download
    | Copy
    | Fill
    | Free
    | Ping
    | GetStatistics
    | Warm
    | Explain
    | Drain
)
"""Messages that can be encoded as bytes, and so could be answered in another process."""

Message = Travelling | View
"""Every message that a service answers."""
