"""The process that builds plans for another: `python -m cudnn_actor.engines.remote.child FD`.

FD is its end of a socket pair, on which it is told what to do and answers (`remote.frames`). What it does is
in `remote.serving`; a worker has one that it forked instead (`remote.spare`).
"""

from __future__ import annotations

import socket
import sys

from cudnn_actor.engines.remote.serving import Channel, follow_parent, serve

__all__ = ["main"]


def main() -> None:
    """Serve one parent until it has had enough."""
    follow_parent()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.set_inheritable(False)
        serve(Channel(connection))


if __name__ == "__main__":
    main()
