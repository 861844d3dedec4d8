"""A worker without a forkserver. Its arguments are its main and its descriptors.

For times in which no forkserver gets through its start. It imports by itself what the forkserver would have
imported for it, so it takes as long as that to be ready. In everything else it is like a forked worker, and
its parent is the process that it works for.
"""

from __future__ import annotations

import os
import sys

from cudnn_actor.processes.forkserver import set_signals, work

__all__ = ["main"]


def main() -> None:
    """Run the worker's main, then exit."""
    main, descriptors = sys.argv[1], [int(number) for number in sys.argv[2:]]
    set_signals()  # a forked worker has these from its forkserver
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    work(main, descriptors)
