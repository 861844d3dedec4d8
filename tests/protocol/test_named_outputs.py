"""Named tuples of outputs."""

from __future__ import annotations

import gc
import pickle
import weakref

from cudnn_actor.protocol.graphs.named_outputs import named_outputs


def test_classes_of_names_that_are_used_no_more_are_collected() -> None:
    """A program that makes graphs with ever new names of outputs does not grow."""
    first = weakref.ref(type(named_outputs("Outputs", {"first": 1})))
    for number in range(2000):
        named_outputs("Outputs", {f"y{number}": number})
    gc.collect()
    assert first() is None


def test_outputs_survive_pickling() -> None:
    made = named_outputs("Outputs", {"y": 1, "not a name": 2})
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert (again.y, again._1) == (1, 2)
