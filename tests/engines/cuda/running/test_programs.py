"""Programs of one plan, and of its halves, share what is made to enqueue equal steps."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from cudnn_actor.engines.cuda.kernels.elementwise import elementwise
from cudnn_actor.engines.cuda.kernels.expressions import Leaf
from cudnn_actor.engines.cuda.operations.cublaslt import LtMatrix, LtProduct
from cudnn_actor.engines.cuda.running import program
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep, ProductStep, Recipe, Step
from cudnn_actor.protocol import DType

from ... import host_cuda

A, B, C = map(Buffer, range(3))


def product(epilogue: int) -> LtProduct:
    matrix = LtMatrix(DType.FLOAT32, 4, 4, 4, 16)
    return LtProduct(
        matrices=(matrix,) * 3,
        transposed=(False, False),
        batch=1,
        compute=1,
        epilogue=epilogue,
        alignments=(16,) * 3,
    )


def plan_of(*steps: Step) -> CudaPlan:
    return CudaPlan(Recipe(tag="some", steps=steps, scratch=0, buffers=3, scalars=0), ())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often something was made to enqueue each thing."""
    found: Counter[Any] = Counter()

    def run(self: LtProduct) -> Any:
        found[self.epilogue] += 1
        return lambda addresses, _: ran.append((self.epilogue, tuple(addresses)))

    def compile_run(launches: Any) -> Any:
        (launch,) = launches
        found[launch.name] += 1
        return lambda addresses, _: ran.append((launch.name, tuple(addresses)))

    monkeypatch.setattr(LtProduct, "run", run)
    monkeypatch.setattr(program, "compile_run", compile_run)
    ran.clear()
    return found


ran: list[tuple[Any, tuple[int, ...]]] = []


def test_equal_products_and_the_same_kernel_are_made_once(made: Counter[Any]) -> None:
    kernel = elementwise(Leaf(0, DType.FLOAT32), DType.FLOAT32, (4,), [(1,), (1,)])
    steps = (
        ProductStep(product(1), (A, B, C)),
        ProductStep(product(1), (B, A, C)),
        ProductStep(product(2), (A, B, C)),
        KernelStep(kernel, (C, A)),
        KernelStep(kernel, (A, C)),
    )
    plan, handle, stream = plan_of(*steps), SimpleNamespace(), host_cuda.Stream()
    for _ in range(2):
        Program(plan, handle, stream).run((), (10, 20, 30), (), 0)
        assert made == {1: 1, 2: 1, "elementwise": 1}
        assert ran == [
            (1, (10, 20, 30)),
            (1, (20, 10, 30)),
            (2, (10, 20, 30)),
            ("elementwise", (30, 10)),
            ("elementwise", (10, 30)),
        ]
        ran.clear()


def test_another_handle_thread_or_plan_has_its_own(made: Counter[Any]) -> None:
    plan, stream = plan_of(ProductStep(product(1), (A, B, C))), host_cuda.Stream()
    handle = SimpleNamespace()
    Program(plan, handle, stream)
    Program(plan, SimpleNamespace(), stream)
    assert made == {1: 2}
    other = threading.Thread(target=Program, args=(plan, handle, stream))
    other.start()
    other.join()
    assert made == {1: 3}
    Program(plan_of(*plan.recipe.steps), handle, stream)
    assert made == {1: 4}
    assert {id(kept) for kept, _ in plan.runs.values()} >= {id(handle)}, "its number stays its own"


def test_kernels_that_compare_equal_are_made_apart(made: Counter[Any]) -> None:
    """Of 0.0 and -0.0, one is not the other."""
    first, second = (elementwise(Leaf(0, DType.FLOAT32), DType.FLOAT32, (4,), [(1,), (1,)]) for _ in range(2))
    assert first == second
    Program(plan_of(KernelStep(first, (A, B)), KernelStep(second, (A, B))), None, host_cuda.Stream())
    assert made == {"elementwise": 2}
