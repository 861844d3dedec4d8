"""Bookkeeping of buffers: arenas, slots, generations. The only I/O is closing descriptors."""

from __future__ import annotations

from cudnn_actor.memory.arena import ARENA_STEP, Arena
from cudnn_actor.memory.base import Buffers, Mirror
from cudnn_actor.memory.exported import ExportedRange
from cudnn_actor.memory.free_list import GRANULARITY, FreeList
from cudnn_actor.memory.lending import BufferOwner
from cudnn_actor.memory.memory_table import MemoryTable
from cudnn_actor.memory.pool import ArenaPool
from cudnn_actor.memory.slot import REMEMBERED_ENDS, SharedHold, Slot

__all__ = [
    "ARENA_STEP",
    "GRANULARITY",
    "REMEMBERED_ENDS",
    "Arena",
    "ArenaPool",
    "BufferOwner",
    "Buffers",
    "ExportedRange",
    "FreeList",
    "MemoryTable",
    "Mirror",
    "SharedHold",
    "Slot",
]
