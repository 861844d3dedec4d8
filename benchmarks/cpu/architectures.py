"""Networks that are exported to ONNX at run time, as PyTorch modules: needs PyTorch and nothing else."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as f

__all__ = ["NETWORKS", "as_onnx"]


class Residual(nn.Module):  # type: ignore[misc]
    """A block whose input is added to what it computes."""

    def __init__(self, inner: Any, shortcut: Any) -> None:
        super().__init__()
        self.inner, self.shortcut = inner, shortcut

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.shortcut(x)


def _conv(inputs: int, outputs: int, taps: int, stride: int = 1, groups: int = 1) -> list[Any]:
    conv = nn.Conv2d(inputs, outputs, taps, stride, taps // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out")
    return [conv, nn.BatchNorm2d(outputs)]


def _classifier(width: int) -> list[Any]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]


def resnet18() -> Any:
    """The network for images of 224×224."""
    layers = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width in (64, 128, 256, 512):
        for number in range(2):
            stride = 2 if number == 0 and width > 64 else 1
            inner = nn.Sequential(*_conv(before, width, 3, stride), nn.ReLU(), *_conv(width, width, 3))
            same = stride == 1 and before == width
            shortcut = nn.Identity() if same else nn.Sequential(*_conv(before, width, 1, stride))
            layers += [Residual(inner, shortcut), nn.ReLU()]
            before = width
    return nn.Sequential(*layers, *_classifier(before))


def mobilenet_v2() -> Any:
    """The network for images of 224×224."""
    layers, before = [*_conv(3, 32, 3, 2), nn.ReLU6()], 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
    for factor, width, count, first in (*stages, (6, 320, 1, 1)):
        for number in range(count):
            hidden, stride = before * factor, first if number == 0 else 1
            wider = [*_conv(before, hidden, 1), nn.ReLU6()] if factor > 1 else []
            depthwise = [*_conv(hidden, hidden, 3, stride, hidden), nn.ReLU6()]
            inner = nn.Sequential(*wider, *depthwise, *_conv(hidden, width, 1))
            residual = stride == 1 and before == width
            layers.append(Residual(inner, nn.Identity()) if residual else inner)
            before = width
    return nn.Sequential(*layers, *_conv(before, 1280, 1), nn.ReLU6(), *_classifier(1280))


class Attention(nn.Module):  # type: ignore[misc]
    """Attention of twelve heads, with an added mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = (each(x).unflatten(-1, (12, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8 + mask, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):  # type: ignore[misc]
    """A layer of BERT's encoder."""

    def __init__(self, width: int = 768, hidden: int = 3072) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.first, self.second = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x: Any, mask: Any) -> Any:
        x = self.first(x + self.attention(x, mask))
        return self.second(x + self.down(f.gelu(self.up(x))))


class Bert(nn.Module):  # type: ignore[misc]
    """BERT's encoder with six layers, as in DistilBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8000, 768), nn.Embedding(512, 768)
        self.norm = nn.LayerNorm(768, 1e-12)
        self.layers = nn.ModuleList([Layer() for _ in range(6)])

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        x = self.norm(self.words(input_ids) + self.places.weight[: input_ids.shape[1]])
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return x


NETWORKS: dict[str, Callable[[], Any]] = {
    "MobileNetV2": mobilenet_v2,
    "ResNet-18": resnet18,
    "BERT, 6 layers": Bert,
}


def as_onnx(module: Any, inputs: dict[str, Any]) -> bytes:
    """A module as an ONNX file for inputs of these dims, written by TorchScript's exporter."""
    file = io.BytesIO()
    names = {"input_names": list(inputs), "output_names": ["y"], "opset_version": 17}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, tuple(inputs.values()), file, dynamo=False, **names)
    return file.getvalue()
