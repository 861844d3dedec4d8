"""The tokens by which clients get access. They are read from a file, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from cudnn_actor.serving.failures import Refused, Unauthorised

__all__ = ["Tokens"]

_MOST_BYTES = 64 << 10


class Tokens:
    """The tokens of a file, one a line. Empty lines and lines that begin with `#` are skipped.

    Raises `Refused` if the file cannot be read, has no token, or can be read by other users than its owner.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                lines = file.read(_MOST_BYTES).split(b"\n")
        except OSError as error:
            raise Refused(
                problem=f"{path} cannot be read: {error.strerror}", fix="name a file of tokens"
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Refused(problem=f"{path} can be read by others than its owner", fix=f"chmod 600 {path}")
        kept = [line.strip() for line in lines]
        self._digests = [_digest(line) for line in kept if line and not line.startswith(b"#")]
        if not self._digests:
            raise Refused(problem=f"{path} has no token", fix="write one a line")

    @classmethod
    def of_digests(cls, digests: Iterable[bytes]) -> Tokens:
        """The tokens with these digests, which another process has read."""
        tokens = cls.__new__(cls)
        tokens._digests = list(digests)
        return tokens

    @property
    def digests(self) -> list[bytes]:
        """The SHA-256 of each token."""
        return list(self._digests)

    def require(self, header: str | None) -> None:
        """Raise `Unauthorised` unless an `Authorization` header has one of the tokens."""
        scheme, _, token = (header or "").partition(" ")
        given = _digest(token.strip().encode(errors="replace"))
        # All tokens are compared, each in constant time. So the time tells neither which token matches nor
        # how much of it.
        known = [hmac.compare_digest(given, each) for each in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise Unauthorised()


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
