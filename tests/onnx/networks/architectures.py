"""The networks, from torchvision, transformers and diffusers: small or in their usual size."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["NETWORKS", "Network"]


class Network(NamedTuple):
    """How a network is made and called.

    `make(full)` gives the module, `inputs(full)` its inputs by name: their dims, with None for the batch, and
    their dtypes. `call` gives its outputs, in the order of `outputs`.
    """

    make: Callable[[bool], Any]
    inputs: Callable[[bool], Mapping[str, tuple[tuple[int | None, ...], Any]]]
    call: Callable[..., Any]
    outputs: tuple[str, ...] = ("logits",)
    most: int | None = None
    """The largest batch for which it does the same."""


def _torchvision() -> Any:
    """Its models. Beside another build of PyTorch it lacks its compiled operators, which they do not use."""
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError:  # it registers what computes these operators, and has none
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        return importlib.import_module("torchvision.models")


models = _torchvision()


def resnet50(full: bool) -> Any:
    if full:
        return models.resnet50()

    class Narrow(models.ResNet):  # type: ignore[misc, name-defined]
        def _make_layer(self, block: Any, planes: int, *of: Any, **named: Any) -> Any:
            return super()._make_layer(block, planes // 8, *of, **named)

    small = Narrow(models.resnet.Bottleneck, [1, 2, 1, 1])
    small.fc = nn.Linear(256, 10)
    return small


def mobilenet_v2(full: bool) -> Any:
    if full:
        return models.mobilenet_v2()
    blocks = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2], [6, 64, 2, 2]]
    return models.MobileNetV2(num_classes=10, width_mult=0.25, inverted_residual_setting=blocks)


def convnext(full: bool) -> Any:
    if full:
        return models.convnext_tiny()
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(16, 32, 1), block(32, 64, 1), block(64, None, 1)], num_classes=10)


def _small(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        **more,
    }


def vit(full: bool) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    small = _small(image_size=32, patch_size=8, num_labels=10)
    return ViTForImageClassification(ViTConfig(**({"num_labels": 1000} if full else small)))


def bert(full: bool) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**({} if full else _small(vocab_size=99, max_position_embeddings=32))))


def gpt2(full: bool) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"vocab_size": 99, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **ends, **({} if full else small)))


def llama(full: bool) -> Any:
    """Eight layers in the width of a model of 1.2 billion weights, with a fourth of the heads for keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    large = {"hidden_size": 2048, "num_hidden_layers": 8, "intermediate_size": 5632}
    heads = {"num_attention_heads": 32 if full else 4, "num_key_value_heads": 8 if full else 2}
    small = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    whole = {"use_cache": False, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**whole, **heads, **(large if full else small)))


def whisper_encoder(full: bool) -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    width = 768 if full else 32
    more = {} if full else {"num_mel_bins": 16, "max_source_positions": 20}
    heads = {"encoder_attention_heads": width // (64 if full else 8)}
    layers = {"encoder_layers": 12 if full else 2, "encoder_ffn_dim": 4 * width if full else 64}
    return WhisperEncoder(WhisperConfig(d_model=width, **heads, **layers, **more))


def unet(full: bool) -> Any:
    from diffusers import UNet2DModel

    down, up = ["DownBlock2D", "AttnDownBlock2D"], ["AttnUpBlock2D", "UpBlock2D"]
    if full:
        return UNet2DModel(
            sample_size=32,
            block_out_channels=(128, 256, 256, 256),
            down_block_types=[*down, "DownBlock2D", "DownBlock2D"],
            up_block_types=["UpBlock2D", "UpBlock2D", *up],
        )
    small = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    return UNet2DModel(
        sample_size=16, attention_head_dim=8, down_block_types=down, up_block_types=up, **small
    )


def _image(small: int, large: int = 224, name: str = "image") -> Any:
    return lambda full: {name: ((None, 3, *2 * [large if full else small]), torch.float32)}


def _tokens(full: bool) -> Any:
    dims = (None, 128 if full else 12)
    return {"input_ids": (dims, torch.int64), "attention_mask": (dims, torch.int64)}


def _text(full: bool) -> Any:
    return {"input_ids": ((None, 512 if full else 12), torch.int64)}


def _sound(full: bool) -> Any:
    return {"input_features": ((None, *((80, 3000) if full else (16, 40))), torch.float32)}


def _noisy(full: bool) -> Any:
    return {**_image(16, 32, "sample")(full), "timestep": ((None,), torch.int64)}


NETWORKS: Mapping[str, Network] = {
    "resnet50": Network(resnet50, _image(64), lambda net, image: net(image)),
    "mobilenet_v2": Network(mobilenet_v2, _image(32), lambda net, image: net(image)),
    "convnext": Network(convnext, _image(32), lambda net, image: net(image)),
    "vit": Network(vit, _image(32, name="pixel_values"), lambda net, x: net(pixel_values=x).logits),
    "bert": Network(
        bert,
        _tokens,
        lambda net, ids, mask: net(input_ids=ids, attention_mask=mask).to_tuple()[:2],
        ("last_hidden_state", "pooler_output"),
    ),
    "gpt2": Network(gpt2, _tokens, lambda net, ids, mask: net(input_ids=ids, attention_mask=mask).logits),
    "llama": Network(llama, _text, lambda net, ids: net(input_ids=ids).logits),
    "whisper_encoder": Network(
        whisper_encoder, _sound, lambda net, x: net(x).last_hidden_state, ("last_hidden_state",)
    ),
    "unet": Network(unet, _noisy, lambda net, x, time: net(x, time).sample, ("noise",), most=63),
}
