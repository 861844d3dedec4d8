"""Why a child ended, and which exits are followed by a restart.

============  =========  ==========  =====================================================
restart       normal     shutdown    crash, start failed, not ready, hung, killed
============  =========  ==========  =====================================================
permanent     yes        yes         yes
transient     no         no          yes
temporary     no         no          no
============  =========  ==========  =====================================================

The terms and the rules are OTP's. https://www.erlang.org/doc/system/sup_princ.html
"""

from __future__ import annotations

import enum

import msgspec

from cudnn_actor.protocol.types.short_repr import short_repr

__all__ = ["ExitKind", "ExitReason", "Restart"]


class ExitKind(enum.StrEnum):
    """How a child ended."""

    NORMAL = "normal"
    """It finished by itself."""
    SHUTDOWN = "shutdown"
    """It was asked to stop, and did."""
    CRASH = "crash"
    """It failed after it had been started."""
    START_FAILED = "start failed"
    """It could not be started."""
    NOT_READY = "not ready"
    """It was killed because it was not ready in time."""
    HUNG = "hung"
    """It was killed because it made no progress."""
    KILLED = "killed"
    """It was killed: from outside, or because it did not stop in time."""


class ExitReason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a child ended, as data: compare `kind`, display `cause` (a text, which may be empty)."""

    kind: ExitKind
    cause: str = ""

    __repr__ = short_repr

    @property
    def abnormal(self) -> bool:
        """Whether a transient child is restarted after it: all kinds but normal and shutdown."""
        return self.kind not in (ExitKind.NORMAL, ExitKind.SHUTDOWN)

    def __str__(self) -> str:
        return f"{self.kind}: {self.cause}" if self.cause else str(self.kind)

    @classmethod
    def normal(cls, cause: str = "") -> ExitReason:
        """The child finished by itself."""
        return cls(kind=ExitKind.NORMAL, cause=cause)

    @classmethod
    def shutdown(cls, cause: str = "") -> ExitReason:
        """The child was asked to stop, and did."""
        return cls(kind=ExitKind.SHUTDOWN, cause=cause)

    @classmethod
    def crash(cls, cause: str) -> ExitReason:
        """The child failed."""
        return cls(kind=ExitKind.CRASH, cause=cause)

    @classmethod
    def start_failed(cls, cause: str) -> ExitReason:
        """The child could not be started."""
        return cls(kind=ExitKind.START_FAILED, cause=cause)

    @classmethod
    def not_ready(cls, cause: str = "") -> ExitReason:
        """The child was not ready in time."""
        return cls(kind=ExitKind.NOT_READY, cause=cause)

    @classmethod
    def hung(cls, cause: str = "") -> ExitReason:
        """The child made no progress."""
        return cls(kind=ExitKind.HUNG, cause=cause)

    @classmethod
    def killed(cls, cause: str = "") -> ExitReason:
        """The child was killed."""
        return cls(kind=ExitKind.KILLED, cause=cause)


class Restart(enum.StrEnum):
    """After which exits a child is started again; see the table in the module's docstring."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"

    def covers(self, reason: ExitReason) -> bool:
        """Whether a child of this type is started again after this exit."""
        return self is Restart.PERMANENT or (self is Restart.TRANSIENT and reason.abnormal)
