"""A builder that takes nothing, gives nothing back, and keeps no plans: tests derive theirs from it."""

from __future__ import annotations

from typing import Any

__all__ = ["PlainBuilder"]


class PlainBuilder:
    """The methods of a `Builder` that most of the tests' own have nothing to do in. It has no `build`."""

    fingerprint = "a test's"

    def expect_builds(self) -> None:
        """Nothing to get ready."""

    def open(self) -> None:
        """Nothing to take."""

    def close(self) -> None:
        """Nothing to give back."""

    def interrupt(self) -> None:
        """Deaf: the test alone ends a build."""

    def export(self, plan: Any) -> Any:
        """None: there is nothing to keep."""
