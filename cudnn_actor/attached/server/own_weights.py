"""Weights of models that the service's own process loads. They share buffers with equal weights of its
clients.

While a socket is served, such a weight is added to the table of shared weights when it is uploaded. The
process counts as one user of it, as each client does. So the process's models free no buffer that a client
still uses.
"""

from __future__ import annotations

import asyncio

import numpy as np

from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.server.shared_weights import Digest, SharedWeights
from cudnn_actor.attached.wire import digest_of
from cudnn_actor.protocol.messages.messages import Allocate
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.service import CudnnService

__all__ = ["OwnWeights"]


class OwnWeights:
    """Shares the weights that a process uploads to its own service from now on, until `end`.

    Only weights that are uploaded on this loop, which owns the table, are shared. Weights that are uploaded
    on another loop get buffers of their own, and so do all weights of a service whose weights another socket
    shares already.

    Parameters
    ----------
    service
        The service of this process.
    shared
        The weights that its clients share.
    wanted
        Whether weights are shared at all.
    """

    def __init__(self, service: CudnnService, shared: SharedWeights, *, wanted: bool = True) -> None:
        self._service, self._shared = service, shared
        self._loop = asyncio.get_running_loop()
        self._active = wanted and service.share_weight is None
        if self._active:
            service.share_weight, service.state.give_back = self._share, self._give_back

    def end(self) -> None:
        """Share no more weights. Shared weights are freed by the models that have them. Idempotent."""
        if self._active:
            self._active = False
            self._service.share_weight = self._service.state.give_back = None

    async def _share(self, values: np.ndarray, spec: TensorSpec) -> BufferRef:
        """A buffer with these values: one that exists, or a new one. Raises as `upload`."""
        if asyncio.get_running_loop() is not self._loop:
            return await self._upload(values, spec)
        digest = Digest(await in_own_thread(digest_of, values), spec)
        if (there := self._shared.find(digest)) is not None:
            return there
        made = await self._upload(values, spec)
        if (there := self._shared.find(digest)) is not None:  # another upload has made it meanwhile
            self._service.state.discard(made)
            return there
        if self._active:
            self._shared.add(digest, made)
        return made

    async def _upload(self, values: np.ndarray, spec: TensorSpec) -> BufferRef:
        message = Allocate(spec=spec, data=self._service.values(values))
        made: BufferRef = await CudnnRef(self._service).ask(message)
        return made

    def _give_back(self, ref: BufferRef) -> bool:
        """Let the loop note that a model gives a buffer back. Any thread may call this.

        Returns False if the buffer is not shared, or the loop is closed: then the caller frees it. A shared
        buffer stays in the table until its last user has gone, and the calling model is a user until the loop
        has released the buffer. So the lookup, one step of a dict, cannot miss it.
        """
        if not self._shared.has(ref):
            return False
        try:
            self._loop.call_soon_threadsafe(self._shared.release, ref)
        except RuntimeError:  # the loop is closed, and all clients have gone with it
            return False
        return True
