"""`spawn` for code without asyncio."""

from __future__ import annotations

from cudnn_actor.blocking.handle import BlockingRef
from cudnn_actor.options import Options, takes_options
from cudnn_actor.service.service import start_checked

__all__ = ["spawn"]


@takes_options(Options)
def spawn(options: Options) -> BlockingRef:
    """Start a service: `with spawn(...) as gpu:`, or `gpu = spawn(...)` and `gpu.close()`.

    Blocks until its actor is ready. Leaving the body drains for up to 10 seconds, then stops. If the service
    has given up for good, every call raises `ServiceStopped`, and so does the end of the body unless it
    raises something else; `on_give_up` changes this.

    Raises
    ------
    InvalidRequest
        An option is out of its range, or the device is not available here.
    StartFailed
        The actor could not be started, and the restarts are used up.
    """
    service = start_checked(options)
    try:
        return BlockingRef(service)._end_when_collected()
    except BaseException:  # Ctrl-C too: the caller has no handle to end the service with
        service.end("the call that started it was interrupted")
        raise
