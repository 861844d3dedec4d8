"""The seed of a run."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

__all__ = ["seed_from"]


def seed_from(environment: Mapping[str, str]) -> int:
    """`CUDNN_ACTOR_SEED`, or a new seed, which whoever draws with it has to print.

    The processes of one run of pytest-xdist get the same new seed: what they draw is recorded as one run.
    """
    if given := environment.get("CUDNN_ACTOR_SEED"):
        return int(given)
    if run := environment.get("PYTEST_XDIST_TESTRUNUID"):
        return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest())
    return secrets.randbelow(1 << 32)
