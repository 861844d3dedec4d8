"""A module that kills the process that imports it, as long as its environment says so."""

from __future__ import annotations

import os
import signal

VARIABLE = "CUDNN_ACTOR_TEST_DIES_IN_IMPORT"

if os.environ.get(VARIABLE):
    os.kill(os.getpid(), signal.SIGKILL)
