"""Loads the kernels of cuBLASLt's products on another thread, before the pieces with the products are built.

cuBLASLt loads a kernel when it is first launched, or captured. That takes some 3 ms, and a network of another
size has some twenty such kernels (ResNet-50, H100). The interpreter's lock is not held meanwhile. A kernel
that is missed here is loaded by the self-check.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from cudnn_actor.actors.threads import ThreadRefused, start_thread
from cudnn_actor.engines.cuda.library.failures import mind_own_captures
from cudnn_actor.engines.cuda.library.libcublas import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.cublaslt import LtProduct
from cudnn_actor.engines.cuda.planning.products import product_of
from cudnn_actor.engines.cuda.planning.rearranging import as_product
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["NOWHERE_BYTES", "loading_ahead"]

NOWHERE_BYTES = 4096
"""The device memory whose address kernels get that are only loaded: nothing is read or written there."""


@contextlib.contextmanager
def loading_ahead(pieces: Iterable[OperationGraph], limit: int) -> Iterator[None]:
    """Load the kernels of the products among the pieces on another thread, during the `with` block.

    The end of the block waits for the kernel that is being loaded. `limit`: bytes of workspace.
    """
    left = deque(dict.fromkeys(product for piece in pieces if (product := _product_in(piece)) is not None))
    if not left:
        yield
        return
    arguments = left, min(limit, WORKSPACE_BYTES), libraries().cupy.cuda.Device()
    thread = threading.Thread(target=_load_all, args=arguments, name="cudnn-loader", daemon=True)
    try:
        start_thread(thread)
    except ThreadRefused:
        yield
        return
    try:
        yield
    finally:
        left.clear()
        thread.join()


def _product_in(piece: OperationGraph) -> LtProduct | None:
    """The product by which cuBLASLt computes a piece; None if it does not."""
    found = product_of(piece)
    if found is None and (seen := as_product(piece)) is not None:
        found = product_of(seen.graph)
    return None if found is None else found.product


def _load_all(left: deque[LtProduct], limit: int, device: Any) -> None:
    with contextlib.suppress(Exception):  # the self-check itself meets the same error, and reports it
        device.use()
        mind_own_captures()
        cupy = libraries().cupy
        stream, nowhere = cupy.cuda.Stream(non_blocking=True), cupy.cuda.alloc(NOWHERE_BYTES)
        while True:
            product = left.popleft()  # raises when there is none: the builder's thread may empty it
            with contextlib.suppress(Exception):
                _load(product, limit, stream, int(nowhere.ptr))


def _load(product: LtProduct, limit: int, stream: Any, address: int) -> None:
    """Capture a run of the first algorithm: nothing is read or written at the address."""
    chosen = next(product.with_algorithms(limit, 1), None)
    if chosen is None:
        return
    run = chosen.run()
    count = len(chosen.matrices) + (chosen.bias_alignment > 0) + (chosen.workspace > 0)
    stream.begin_capture(libraries().runtime.streamCaptureModeRelaxed)  # loading may allocate
    try:
        with stream:
            run((address,) * count, ())
    finally:
        stream.end_capture()
