"""Errors that a user of the command line can fix."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """Raised when a command cannot be carried out as given. Its text is one line that says how to fix it."""
