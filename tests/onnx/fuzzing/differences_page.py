"""`docs/onnx-differences.md`, made from the tables of known differences and refusals."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .known import KNOWN, OPEN, REFUSALS, THEIRS, Known

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[3] / "docs" / "onnx-differences.md"

_HEAD = """\
# Where ONNX Runtime and ONNX's reference evaluator give other results

Made by `python -m tests.onnx.fuzzing --page` from the table that the fuzzer compares by. Do not edit it by
hand.

The fuzzer draws models of each operator and version that onnx knows: empty and one-element dims, tensors of
rank 0, axes from the end, ties, NaN, infinities, optional inputs left out, loops of no turn, constants and
inputs, dims with numbers and with names. Each runs here, in ONNX Runtime and in ONNX's reference evaluator.
If the answers differ, or one is refused, then it is a fault of this package, or one of the rows below.
`python -m tests.onnx.fuzzing --case Conv-11/1/17` shows one case again, with its model.
`benchmarks/results` has the records, `fuzzing-*.json`.
"""


def _rows(known: Iterable[Known]) -> list[str]:
    return [
        f"| {', '.join(each.operators.split())} | {each.who or 'both'} | {each.sentence} |" for each in known
    ]


def render() -> str:
    """The page."""
    lines = [
        _HEAD,
        "## Faults of ONNX Runtime and of the reference evaluator",
        "",
        "| operators | whose | what ONNX says |",
        "| --- | --- | --- |",
        *_rows(each for each in KNOWN if each.kind == THEIRS),
        "",
        "## Left open by ONNX",
        "",
        "| operators | whose answer differs | why |",
        "| --- | --- | --- |",
        *_rows(each for each in KNOWN if each.kind == OPEN),
        "",
        "## Refused here, and answered by one of them",
        "",
        "| the error says | which is |",
        "| --- | --- |",
        *(f"| {each.text.replace('|', ' or ')} | {each.sentence} |" for each in REFUSALS),
    ]
    return "\n".join(lines) + "\n"
