"""What a user of the command line can mend."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """Raised when a command can't be carried out as given. Its text is one line, which names the fix."""
