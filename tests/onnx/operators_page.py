"""`docs/onnx.md`, made from the table of operators and from a run of ONNX's node suite on the CPU engine.

python -m tests.onnx.operators_page     writes the page, and the names of the cases that are refused
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
from onnx import defs

from cudnn_actor.onnx import ModelLimits, backend
from cudnn_actor.onnx.control import CONTROL
from cudnn_actor.onnx.expanding import has_body
from cudnn_actor.onnx.operator_table import NO_WAY
from cudnn_actor.onnx.operators import HANDLERS
from cudnn_actor.onnx.runtime_schemas import SCHEMAS

from .node_suite import Outcome, Verdict, cases, judged, write_refused

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[2] / "docs" / "onnx.md"
_OWN = frozenset({"Constant", *(name for _, name in CONTROL)})

_HEAD = """\
# ONNX models

Made by `python -m tests.onnx.operators_page` from the table of operators and from a run of ONNX's own node
suite on the CPU engine. Do not edit it by hand.

```python
import asyncio
import numpy as np
from cudnn_actor import spawn


async def main():
    async with spawn(device="auto") as gpu:
        model = await gpu.load("model.onnx")  # a path, the bytes of a file, or an onnx.ModelProto
        print(model)  # its inputs and outputs: names, dtypes, dims
        inputs = {{}}
        for each in model.inputs:  # here ones, and 1 for each dim without a number
            dims = [dim if isinstance(dim, int) else 1 for dim in each.dims]
            inputs[each.name] = np.ones(dims, each.dtype.numpy)
        outputs = await gpu.run(model, inputs)  # arrays or references, by name; gives arrays by name
        for name, array in outputs.items():
            print(name, array.shape)
        await model.close()  # frees the weights


asyncio.run(main())
```

[models.md](models.md) says what a service does with a model: warming, batches, precision, tuning, other
weights while it serves, crashes, measuring. This page says which files it takes, and what it computes.

`pip install -e ".[onnx]"` in a clone brings the package onnx. [onnx_model.py](../examples/onnx_model.py) is
a program to start from; `cudnn-actor run MODEL.onnx` runs a file without one.

## Loading a file

The model is checked when it is loaded, and nothing is allocated for one that is refused:

| error | when |
| --- | --- |
| `ModelNotFound`, which is a `FileNotFoundError` and an `InvalidRequest` | there is no file at the path |
| `InvalidModel`, which names the node or the initialiser | the file is cut off, contradicts itself, or \
refers to data outside of its folder |
| `InvalidModel`, which names the node | a node contradicts [dtypes or axes](#dtypes-axes-and-dims), or \
the file says dims that do not fit |
| `UnsupportedModel`, which names all such nodes at once | there is no way to run a node |
| `InvalidRequest`, which names the node | the inputs of a run have dims that do not fit |

- **Operators.** Each node is added to the graph by a function of this package, or replaced by the function
  that ONNX defines it by. Branches are chosen and loops are unrolled where their conditions and counts are
  known. Lists of tensors are taken apart, and none can be an input or an output. Some nodes can only be
  refused once their dims and attributes are known: when the model is loaded, or at the first run.
- **Initialisers that are inputs, too,** are the inputs' defaults: `model.defaults` has them. Leave them out,
  or give other values to a run.
- **Dims.** A model is made into a graph for the dims of its inputs, at the first run with them, or when it
  is [warmed](models.md#warm-it). Inputs whose dims have one name must agree.
- **Values that decide.** Where the values of an input decide over shapes, axes or attributes, the graph is
  made for these values, too. Arithmetic runs on the engine, and not in the importing process. Only values
  that follow from the model's constants, and values from which the deciding ones follow, are computed there.

### Dtypes, axes and dims

A node contradicts its dtypes or axes if operands that must be of one dtype are not, a result has another
dtype than the model declares, the tensor does not have an axis, a count is below its least value, or ONNX
has no mode of that name. `load` raises the error. Within functions of the model, and where ranks are not
known, the first run raises it.

Dims and attributes that no size of a named dim can make right, such as weights of (5, 3) for inputs of
(N, 4), are refused when the model is loaded.

PyTorch writes two things that ONNX does not allow, and both are taken: float32 constants beside operands of
a half type, which then have the half type, and a dtype that only a later version of an operator takes.

### Bounds

A file of a few bytes can ask for constants of any size, or for years of work. `ModelLimits` bounds what
loading and importing may take, before it is taken: `gpu.load(OnnxModel(path, ModelLimits(...)))`, both of
`cudnn_actor.onnx`.

| limit | of | default |
| --- | --- | --- |
| `nbytes` | the file and its tensors | {nbytes} GiB |
| `nodes` | the import; each takes some kB | {nodes:,} |
| `constants` | all arrays at once that are computed in the importing process | {constants} MiB, and 16 \
bytes more for each byte of the file and of its tensors |
| `steps` | the work in the importing process, of about a nanosecond each | {steps:.1f} billion, and 320 \
for each such byte |

If a value would need more, it is left to the service, whose `memory_limit` bounds it. If such a value
decides over shapes, the model is refused with `UnsupportedModel`, which names the option that raises the
limit. The same holds for numbers that an input gives. So a file of less than 1 kB takes no more than
{constants} MiB, beside its nodes. A load that is cancelled, as by `asyncio.wait_for`, returns at once and
ends by itself at the next node; neither the event loop nor the end of the program waits for it.

### Operators of ONNX Runtime's own

ONNX Runtime's optimiser and quantiser write operators of the domain `com.microsoft`. Those of the
[table](#operators) run. The error for any other one says how to export without it. `DynamicQuantizeLSTM`
quantises its input as a whole, and at each step the states of all samples at once, so its steps are
unrolled. ONNX Runtime quantises as many parts of a batch as it has threads, each by itself. On processors
without VNNI, its sums of two products saturate where weights are beyond 63.

### Refused, although ONNX Runtime answers

- a window that is longer than its padded input, or lies in its padding alone
- an axis that is named twice
- a pooling of a tensor without spatial dims

[onnx-differences.md](onnx-differences.md) lists where ONNX Runtime and ONNX's reference evaluator give
something else than this package, and what ONNX says of it.

## What a model computes

- **Numbers.** A tensor has the model's dtype where it is stored. Functions of elements that follow each
  other are computed in float32 and not rounded in between. Integers wrap around where ONNX's do in
  arithmetic, and so do powers. A product of integers saturates at int32's limits.
- **Layout.** In bfloat16 and float16, convolutions have their channels last, and so have the tensors that
  follow from them. Filters are uploaded with their channels last. An output that is kept as a reference may
  have its channels last, too.
- **Indices** that are out of range count as the nearest in range: a device cannot raise for them.
- **Random numbers** come from a seed: the node's, or `gpu.load(model, random=1)`, without which such nodes
  are refused. Each run draws other numbers. A model that is loaded again draws the same numbers again, on
  every engine. ONNX says how they are distributed, but not which numbers they are. So other programs draw
  others.
- **Recurrent networks** are one operation, of any number of steps. An LSTM, a GRU with
  `linear_before_reset=1` and an RNN of tanh or relu are [layers](operations.md#recurrent-layers) as libcudnn
  has them, if they have the usual activations, no `clip`, `input_forget` or peepholes, and lengths that the
  model says; a reversed network must have no lengths. All others are a product with the input of all steps,
  and [the steps of other cells](operations.md#steps-of-other-recurrent-cells).
- **GELU** that a model spells out in a half type, by erf or tanh, is one function here. ONNX rounds the
  result of each node. Here, functions of each element behind a product are computed in float32 and rounded
  once. There are two exceptions, in which less is stored between them: before GELU by erf, and before a
  transpose, the product with its bias is rounded as ONNX says.
- **Products of one value by several weights** (queries, keys and values; the halves of a gated network) are
  one product here, by all those weights side by side, if nothing else reads them. They are put side by side
  when they are uploaded, and `model.write` takes them by their own names. In a half type, the result of such
  a product is rounded as ONNX says, before functions of each element.
- **Attention** that a model spells out in a half type is one operation here. It takes in the nodes that
  exporters of PyTorch add in files of opsets 17 to 22: scales of queries and keys, keys that are transposed
  between two reshapes, copies of heads that several heads of queries share, scores that a mask replaces
  (`masked_fill`), and 0 instead of NaN.
  - For a row whose scores are all -inf it gives 0, where plain nodes would give NaN.
  - A mask whose values are in the file, and which hides nothing or is causal, is not read when the model
    runs. In a mask, -1e30 or less counts as -inf.
  - Scores are not rounded to the half type before Softmax. So where a finite number such as -65504 is added
    to all scores of a row, plain nodes lose the scores in the sum and weigh all keys alike. Here the keys
    keep their weights.

## Loops

A `Loop` or a `Scan` is unrolled if the number of its turns is known, the graph then has at most 10,000
operations, and the import at most 200,000 `nodes`. Each turn adds the operations of the body. One graph
takes the least time. `ModelLimits(unrolled=1000)` is a lower bound for these operations, and with 0 no such
loop is unrolled. A loop with more turns, or one that ends when the data says so, runs as a
[loop](graphs.md#loops) of the service: [models.md](models.md#loops) says how.

These loops have to be unrolled:

- loops in a body, a branch or a function
- all loops of a model with `swappable=True`
- a `Scan` of version 8
- a loop whose state changes its dims, or whose body needs the number of the turn for dims
- a loop that draws random numbers
- a loop whose rows other nodes read, if the data decides how many they are

If one of these cannot be unrolled, the model is refused. The error says why the loop is not unrolled, and
why it cannot run in the service.

Each step of a `DynamicQuantizeLSTM` is 37 unrolled operations, so it may have 269 steps, or half of that in
two directions. A longer sequence is refused after two steps, and the error names the option that raises the
limit: `spawn(graph_limits=GraphLimits(operations=...))`. Each length of a sequence is a graph of its own,
imported and planned at its first run: give chunks of one length, or pad to few lengths.

## Files that were tried

`python -m benchmarks.trained_files` runs the .onnx files of 23 packages on PyPI, at two sizes each, here and
in ONNX Runtime (`trained-files-*.json` in `benchmarks/results`). Files with operators of `ai.onnx.ml` that
the [table](#operators) does not have are refused. A speech model has graphs of 18,240 operations, which need
`spawn(graph_limits=GraphLimits(operations=20_000))`.

Where an output differs by more than 1e-4 of its largest number, both are compared with an evaluation in
float64. Outputs of three kinds of models differ so, by rounding: a model of float16, models with
`DynamicQuantizeLSTM`, and a model that takes 32 samples of sound.

`cudnn_actor.onnx.backend` is ONNX's
[Backend interface](https://onnx.ai/onnx/repo-docs/ImplementingAnOnnxBackend.html): `prepare`, `run_model`,
`run_node`, `supports_device`.

## On the CPU

NumPy computes a model, in float32, on as many threads as `spawn(threads=...)` says; with `exact=True` in
float64. Where ONNX Runtime is installed (`pip install -e ".[cpu]"` in a clone), it runs large graphs that it
has every operation of, unless `onnx_runtime=False`. [models.md](models.md#on-the-cpu) has the options,
[numerics.md](numerics.md#onnx-runtime) the rules.

## The node suite

onnx {version}, {total:,} cases. A case is right if its values match within its own tolerances, and its
dtypes and dims match, too. It is refused if it raises an error of this package that says why. Two inverse
transforms expect rounding errors of float32 that are above their own tolerance. They are compared to 1e-6.

| cases | right | refused | wrong | error |
| --- | --- | --- | --- | --- |
{counts}

## Operators

*Ours*: the node is added by a function of this package, from this version of the domain on. *Its function*:
it is replaced by the function that ONNX defines it by. *Cases* of the suite: how many of how many are right.
*Expanded*: the same of the cases in which ONNX has replaced the operator by its function.

| operator | how | cases | expanded |
| --- | --- | --- | --- |
{operators}

## What is refused

| operator | cases | why |
| --- | --- | --- |
{refused}
"""


def render(outcomes: Sequence[Outcome]) -> str:
    """The page."""
    limits = ModelLimits()

    return _HEAD.format(
        version=onnx.__version__.rpartition(".")[0],
        total=len(outcomes),
        nbytes=limits.nbytes >> 30,
        nodes=limits.nodes,
        constants=limits.constants >> 20,
        steps=limits.steps / 1e9,
        counts="\n".join(_counted(outcomes)),
        operators="\n".join(_operators(outcomes)),
        refused="\n".join(_refused(outcomes)),
    )


def _counted(outcomes: Sequence[Outcome]) -> Iterable[str]:
    for name, expanded in (("direct", False), ("expanded into their functions", True)):
        of = collections.Counter(each.verdict for each in outcomes if each.expanded is expanded)
        numbers = " | ".join(str(of[verdict]) for verdict in Verdict)
        yield f"| {name}: {sum(of.values()):,} | {numbers} |"


def _operators(outcomes: Sequence[Outcome]) -> Iterable[str]:
    newest: dict[tuple[str, str], defs.OpSchema] = {}
    for schema in defs.get_all_schemas():
        newest[schema.domain, schema.name] = schema
    newest |= SCHEMAS
    for (domain, name), schema in sorted(newest.items()):
        how = _how(domain, name, schema)
        if how is None or schema.deprecated:
            continue
        of = [each for each in outcomes if each.operator == name and (domain, name) not in SCHEMAS]
        direct, expanded = ([e for e in of if e.expanded is wanted] for wanted in (False, True))
        yield f"| {domain + '.' if domain else ''}{name} | {how} | {_share(direct)} | {_share(expanded)} |"


def _how(domain: str, name: str, schema: defs.OpSchema) -> str | None:
    if (domain, name) in HANDLERS:
        return f"ours, from {min(HANDLERS[domain, name])}"
    if name in ("Loop", "Scan") and not domain:
        return "when the model is imported, or as a loop"
    if name in _OWN and not domain:
        return "when the model is imported"
    return "its function" if has_body(schema) else None


def _share(outcomes: Sequence[Outcome]) -> str:
    right = sum(each.verdict is Verdict.RIGHT for each in outcomes)
    return f"{right} of {len(outcomes)}" if outcomes else "–"


def _refused(outcomes: Sequence[Outcome]) -> Iterable[str]:
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    count: collections.Counter[str] = collections.Counter()
    for each in outcomes:
        if each.verdict is not Verdict.RIGHT:
            count[each.operator] += 1
            reasons[each.operator].update(_reasons(each.reason))
    for operator, of in sorted(reasons.items()):
        text = "; ".join(_merged([reason for reason, _ in of.most_common(3)]))
        yield f"| {operator} | {count[operator]} | {text.replace('|', '/')} |"


def _merged(reasons: Sequence[str]) -> list[str]:
    """Reasons that differ in the dtype at their end, or in the operator that they begin with, as one."""
    by_head: dict[str, list[str]] = {}
    for reason in reasons:
        of_dtype = re.fullmatch(r"(.* is of(?: type)?) (\w+)", reason)
        head, dtype = of_dtype.groups() if of_dtype else (reason, "")
        by_head.setdefault(head, []).append(dtype)
    by_text: dict[str, list[str]] = {}
    for head, dtypes in by_head.items():
        operator, _, text = f"{head} {', '.join(dtypes)}".rstrip().partition(": ")
        by_text.setdefault(text, []).append(operator)
    return [f"{', '.join(operators)}: {text}" for text, operators in by_text.items()]


def _reasons(text: str) -> list[str]:
    """The first two reasons of a refusal, without the names of nodes and of cases."""
    text = re.sub(r"^.*?cannot be run: ", "", text)
    text = re.sub(r"\. `cudnn-actor docs onnx` lists what is supported$", "", text)
    text = re.sub(r"node '[^']*' \((?:[\w.]+\.)?(\w+)\)", r"\1", text)
    text = re.sub(r"input '[^']*'", "an input", text)
    text = text.replace(NO_WAY, "not known here, and ONNX has no function for it")
    parts = dict.fromkeys(part.rpartition(", in ")[2] for part in text.split("; "))
    return list(parts)[:2]


def main() -> None:
    """Write the page, and the names of the cases that are refused."""
    outcomes = judged(cases())
    PAGE.write_text(render(outcomes))
    write_refused(outcomes)
    backend.close()


if __name__ == "__main__":
    main()
