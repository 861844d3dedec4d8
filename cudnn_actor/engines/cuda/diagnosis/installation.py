"""Finds out whether the CUDA engine can be used here, and what is wrong if not.

Neither the CUDA packages nor cuDNN are loaded into this process, and no context is made. So the check can run
before every start, and also on a machine without any of them.
"""

from __future__ import annotations

import functools
import os

import msgspec

from cudnn_actor.engines.cuda.diagnosis.gpus import Driver, find_driver
from cudnn_actor.engines.cuda.diagnosis.inventory import Inventory, take_inventory
from cudnn_actor.engines.cuda.diagnosis.rules import Problem, never_run, problems_of
from cudnn_actor.engines.cuda.library.cudnn_files import load_apart

__all__ = ["Problem", "caution", "examine", "obstacle", "unavailable"]


def unavailable() -> str | None:
    """Why no GPU can be used here, as one sentence that ends with what to do; None if one can be used.

    Takes microseconds on a machine without a driver. Success is cached for the process's life.
    """
    problem = obstacle()
    return None if problem is None else str(problem)


def obstacle(apart: Driver | None = None) -> Problem | None:
    """The first problem that prevents the use of a GPU; None if there is none.

    Parameters
    ----------
    apart
        For an engine in another process, the driver as `find_driver_apart` found it. The driver is then not
        queried in this process, and the libraries that this process has loaded are ignored.
    """
    try:
        if apart is None:
            _require_usable()
        else:
            _require_usable_with(apart)
    except _Unusable as found:
        return found.problem
    return None


@functools.cache
def caution(driver: Driver) -> Problem | None:
    """The problem to report once about a GPU that can be used: the GPU tests have not passed with this
    version of cuDNN. None if they have."""
    return never_run(take_inventory(driver))


class _Unusable(Exception):
    """Raised when a GPU cannot be used; carries the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@functools.cache  # does not cache exceptions, so a repaired installation is noticed
def _require_usable() -> None:
    _require_none(_looked_at(find_driver()))


@functools.cache
def _require_usable_with(driver: Driver) -> None:
    _require_none(msgspec.structs.replace(_looked_at(driver), mapped=()))


def _require_none(found: Inventory) -> None:
    for problem in problems_of(found):
        if problem.prevents:
            raise _Unusable(problem)


def _looked_at(driver: Driver) -> Inventory:
    """The inventory; without a GPU only the driver, so that a start on a machine without one costs little."""
    if driver.gpus:
        return take_inventory(driver)
    return Inventory(driver=driver, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


def examine() -> Inventory:
    """The whole inventory, including a test load of cuDNN. Blocks briefly."""
    found = take_inventory(find_driver())
    if found.cudnn is None or not found.cudnn.whole:
        return found
    return msgspec.structs.replace(found, loading=load_apart(found.cudnn.path))
