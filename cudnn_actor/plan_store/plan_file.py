"""The format of a file of the plan store: a plan as bytes. No I/O here.

========  ==========================================================================
bytes     what
========  ==========================================================================
8         `CDNNPLAN`
4         version of this format, little-endian
4         length of the header, little-endian
32        BLAKE2b of everything else, in order
...       the header, a msgpack map: the whole key, tuned, provisional, workspace,
          payload length
...       the payload, in the device library's own format
========  ==========================================================================

The hash detects accidental damage: a full disk, a page lost in a power cut, a flipped bit. It is not a
signature: anyone who can write the file can write its hash. So the store checks owners and modes.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

__all__ = ["BadPlanFile", "PlanKey", "StoredPlan", "decode", "encode"]

VERSION = 1

_MAGIC = b"CDNNPLAN"
_PREFIX = struct.Struct("<8sII")
_HASH_BYTES = 32
_START = _PREFIX.size + _HASH_BYTES


class BadPlanFile(Exception):
    """Raised for bytes that are not a plan of the wanted key. Its text is the reason."""


class PlanKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identifies a stored plan.

    Parameters
    ----------
    graph
        The operation graph's digest, which covers its numerics.
    fingerprint
        Library version and kind of device: `Builder.fingerprint`.
    workspace_limit
        Bytes of workspace that the plan was allowed; None for the engine's own bound. Part of the key, since
        the best plan under one limit is not the best under another. Otherwise services that share a directory
        but have different limits would replace each other's plans for ever.
    """

    graph: str
    fingerprint: str
    workspace_limit: int | None = None

    def file_name(self) -> str:
        """The file name for this key, the same in every process."""
        return f"{hashlib.blake2b(_key_bytes(self), digest_size=_HASH_BYTES).hexdigest()}.plan"


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as it was exported.

    Parameters
    ----------
    data
        The bytes for `Builder.restore`.
    workspace
        Bytes of workspace that a run needs.
    tuned
        Whether it was the fastest in a measurement of the library's candidates.
    provisional
        Whether another plan is to replace it, which takes longer to build.
    """

    data: bytes
    workspace: int
    tuned: bool = False
    provisional: bool = False

    @property
    def rank(self) -> int:
        """A plan does not replace one of a higher rank: provisional, as built, tuned."""
        return 2 if self.tuned else 0 if self.provisional else 1


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: PlanKey
    tuned: bool
    workspace: int
    length: int
    provisional: bool = False


def encode(key: PlanKey, plan: StoredPlan) -> bytes:
    """The file for a plan."""
    header = msgspec.msgpack.encode(
        _Header(
            key=key,
            tuned=plan.tuned,
            workspace=plan.workspace,
            length=len(plan.data),
            provisional=plan.provisional,
        )
    )
    prefix = _PREFIX.pack(_MAGIC, VERSION, len(header))
    return b"".join((prefix, _hash(prefix, header, plan.data), header, plan.data))


def decode(key: PlanKey, content: bytes) -> StoredPlan:
    """The plan in a file. Raises `BadPlanFile` unless the file is complete and has this key."""
    if len(content) < _START:
        raise BadPlanFile(f"has only {len(content)} bytes")
    magic, version, length = _PREFIX.unpack_from(content)
    if magic != _MAGIC:
        raise BadPlanFile("is not a plan file")
    if version != VERSION:
        raise BadPlanFile(f"is of format {version}, not {VERSION}")
    header, data = content[_START : _START + length], content[_START + length :]
    if content[_PREFIX.size : _START] != _hash(content[: _PREFIX.size], header, data):
        raise BadPlanFile("does not match its checksum: truncated, or corrupted")
    return _check(key, header, data)


def _check(key: PlanKey, header: bytes, data: bytes) -> StoredPlan:
    try:
        facts = msgspec.msgpack.decode(header, type=_Header)
    except msgspec.DecodeError as error:
        raise BadPlanFile(f"has an invalid header: {error}") from error
    if facts.length != len(data):
        raise BadPlanFile(f"holds {len(data)} bytes of plan, not {facts.length}")
    if facts.key != key:
        raise BadPlanFile(f"is the plan of another key: {facts.key}")
    if key.workspace_limit is not None and facts.workspace > key.workspace_limit:
        raise BadPlanFile(
            f"needs {facts.workspace} bytes of workspace, over the {key.workspace_limit} allowed"
        )
    return StoredPlan(data=data, workspace=facts.workspace, tuned=facts.tuned, provisional=facts.provisional)


def _key_bytes(key: PlanKey) -> bytes:
    return msgspec.msgpack.encode(key)


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=_HASH_BYTES).digest()
