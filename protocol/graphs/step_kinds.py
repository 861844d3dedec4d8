"""The kinds of steps that plans consist of: what explanations call them, and their colours in pictures."""

from __future__ import annotations

import enum

__all__ = ["StepKind"]


class StepKind(enum.Enum):
    """A kind of step: its name, with `{}` for the part that differs from step to step, and its colour."""

    CUDNN = ("cuDNN {}", "#dcebfa")
    """An engine of cuDNN, and its settings."""
    CUBLAS = ("cuBLAS", "#e7e0f8")
    CUBLAS_PACKED = ("cuBLAS, on packed copies", "#e7e0f8")
    CUBLASLT = ("cuBLASLt", "#e7e0f8")
    """A product with what follows it, by a chosen algorithm."""
    LIBRARY = ("libcudnn", "#d6f0ec")
    """A function of cuDNN that takes no graph."""
    KERNEL = ("kernel of {}", "#fbe3d6")
    """A kernel that this package has for an operation of that kind."""
    ELEMENTWISE = ("generated kernel", "#fdebd0")
    """Generated for the piece, like the kinds from here to `COPIES`."""
    LINES = ("generated kernel over lines", "#fdebd0")
    NORM = ("generated kernels of {}", "#fdebd0")
    """The kernels of a norm and of what stands around it, and how many there are."""
    DEPTHWISE = ("generated depthwise kernel", "#fdebd0")
    COPY = ("generated copy", "#fdebd0")
    COPIES = ("generated copies", "#fdebd0")
    NUMPY = ("NumPy", "#eeeeee")
    TILES = ("NumPy, tile by tile", "#eeeeee")
    BLOCKS = ("NumPy, block by block", "#dcebfa")
    SESSION = ("ONNX Runtime", "#e3f1d8")
    """The whole graph."""

    def step_name(self, *of: str) -> str:
        """The name of a step of this kind."""
        text, _ = self.value
        return text.format(*of)

    @property
    def colour(self) -> str:
        """The colour, as HTML writes it."""
        return self.value[1]

    @classmethod
    def colour_of(cls, step: str) -> str:
        """The colour of a step with that name; white if no kind has it."""
        for kind in cls:
            text, colour = kind.value
            if step == text or ("{}" in text and step.startswith(text.format(""))):
                return colour
        return "#ffffff"
