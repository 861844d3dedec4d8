"""Worker processes: the same actor, in a process of its own that may die without harm to anybody."""

from __future__ import annotations
