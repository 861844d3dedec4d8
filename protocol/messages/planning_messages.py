"""Plans: built ahead, explained, and dropped."""

from __future__ import annotations

from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.computations import Compute
from cudnn_actor.protocol.types.tune import Tune

__all__ = ["ClearPlans", "Explain", "Warm"]


class Warm(AnyMessage[int], tag=True):
    """Build the plans of `messages` and `graphs` without running them; answered by the number of plans built.

    A failure to build is cached, but not reported here.

    Parameters
    ----------
    messages, graphs
        What to build plans for.
    tune
        Whether to tune them, which takes seconds to minutes: see `Tune`. If that fails, the plans stay as
        they were built.
    soon
        Whether to answer as soon as the graphs can run: perhaps by provisional plans, which others replace
        later.
    """

    messages: tuple[Compute, ...] = ()
    graphs: tuple[Graph, ...] = ()
    tune: Tune = False
    soon: bool = False


class ClearPlans(AnyMessage[int], tag=True):
    """Drop all plans that are ready, and what is known of graphs that cannot run; answered by their number.

    A request that needs one has it built again, or gets it from the plan store, whose files stay. What is
    being tuned stays untuned. Plans that are being built now are kept.
    """


class Explain(AnyMessage[Explanation], tag=True):
    """Ask how the engine runs a graph; answered by an `Explanation`. Builds the plan if it is missing.

    Parameters
    ----------
    graph
        What to explain.
    measure
        Whether to run it, on numbers of its own, and to say how long each piece takes. The requests behind it
        wait for about a quarter of a second, or for four runs if they take longer.
    candidates
        Whether to list the plans that may run each piece. On CUDA, cuDNN is asked for them, which takes up to
        a tenth of a second for each different piece. The requests behind this one wait for that.
    weights
        Places among the graph's buffers of those that keep their values, as a model's weights do. CUDA then
        leaves out of the times what it computes from these alone, once for all runs.

    Raises as a request that runs the graph, if the engine has no plan for it; `OutOfMemory` if a second set
    of its inputs and outputs does not fit. `CudnnRef.explain` makes the message, also from other messages.
    """

    graph: OperationGraph
    measure: bool = False
    candidates: bool = False
    weights: tuple[int, ...] = ()
