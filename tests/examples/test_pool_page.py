"""The lines that the page about pools shows run, one block after the other, in a pool of two on the CPU."""

from __future__ import annotations

import textwrap
from pathlib import Path

import onnx

from ..onnx.small_models import FLOAT, model_of, node
from .test_readme import printed_here, programs

PAGE = Path(__file__).parents[2] / "docs" / "pool.md"
BEFORE = """
import asyncio
import numpy as np
from cudnn_actor import ConvFwd, ConvSpec, GraphBuilder

kernel = np.ones((8, 3, 3, 3), np.float32)
picture = np.ones((1, 3, 16, 16), np.float32)
batch = np.ones((32, 3, 16, 16), np.float32)
g = GraphBuilder()
graph = g.build(y=g.conv(g.input("x", (1, 3, 16, 16)), g.input("w", (8, 3, 3, 3))))

async def main():
"""
AFTER = [
    """
print(scores["scores"].shape, y.shape, y.mean())
""",
    """
print(receipt.generation)
x = await pool.on(0).upload(picture)
""",
    """
print(pool.member_of(y), (await pool.download(y)).mean())
""",
    """
print((await pool.run(model, image=batch))["scores"].mean())
""",
    """
print(scores["scores"].shape)
""",
]
"""What follows each block: what it has given is printed, and what the next one needs is made."""
SHOWN = """\
(32, 3, 1, 1) (1, 8, 14, 14) 27.0
1
1 27.0
2.0
(1, 3, 1, 1)
"""


def test_the_lines_of_the_page_of_pools_run(tmp_path: Path) -> None:
    dims = {"image": (FLOAT, ("N", 3, 16, 16))}, {"scores": (FLOAT, ("N", 3, 1, 1))}
    first = [node("GlobalAveragePool", "image", "scores")]
    onnx.save(model_of(first, *dims), tmp_path / "resnet50.onnx")
    second = [node("Add", "image image", "twice"), node("GlobalAveragePool", "twice", "scores")]
    onnx.save(model_of(second, *dims), tmp_path / "resnet50-v2.onnx")
    blocks = programs(PAGE)
    begin = 'async with spawn_pool(["cuda:0", "cuda:1"]) as pool:'
    assert blocks[0].count(begin) == 1
    blocks[0] = blocks[0].replace(begin, 'async with spawn_pool(["cpu", "cpu"]) as pool:')
    lines = blocks[0] + "".join(
        textwrap.indent(shown + block, "    ") for shown, block in zip(AFTER, [*blocks[1:], ""], strict=True)
    )
    program = f"{BEFORE}{textwrap.indent(lines, '    ')}\nasyncio.run(main())\n"
    assert printed_here(program, tmp_path) == SHOWN
