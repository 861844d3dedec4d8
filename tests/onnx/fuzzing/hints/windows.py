"""Operators with windows, grids and regions over images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..draw import Draw
from ..versions import Version
from .parts import Hint, Parts

__all__ = ["WINDOWS"]


def _float(d: Draw, v: Version, number: int = 0) -> np.dtype[Any]:
    return d.dtype(v.schema, v.schema.inputs[number].type_str)


def _window(d: Draw, v: Version, rank: int, kernel: Sequence[int]) -> dict[str, Any]:
    """Attributes of a window; those that the version has not are dropped later."""
    auto = d.choices(("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"), (6, 1, 1, 1))[0]
    dilations = d.sizes(rank, 1, 2) if d.random() < 0.3 else None
    pads = d.sizes(2 * rank, 0, max(0, min(kernel, default=1) - int(not d.seldom(0.1))))
    return {
        "auto_pad": auto if auto != "NOTSET" or d.random() < 0.3 else None,
        "dilations": dilations,
        "pads": pads if auto == "NOTSET" and d.random() < 0.6 else None,
        "strides": d.sizes(rank, 1, 3) if d.random() < 0.6 else None,
        "ceil_mode": d.choice((None, 0, 1)),
        "output_padding": None,
        "output_shape": None,
    }


def _image(d: Draw, rank: int, channels: int) -> tuple[int, ...]:
    return (
        d.choice((1, 2, 2, 3, 0 if d.seldom() else 1)),
        channels,
        *d.sizes(rank, 1 if d.seldom(0.2) else 3, 7),
    )


def conv(d: Draw, v: Version) -> Parts:
    rank, group = d.choice((1, 2, 2, 2, 3)), d.choice((1, 1, 1, 2, 3))
    kernel = d.sizes(rank, 1, 3)
    x = _image(d, rank, group * d.randint(1, 3))
    w = (group * d.randint(1, 3), x[1] // group, *kernel)
    attributes = _window(d, v, rank, kernel) | {"group": group}
    attributes["kernel_shape"] = kernel if d.random() < 0.5 else None
    if v.operator == "ConvInteger":
        types = [d.dtype(v.schema, each.type_str) for each in v.schema.inputs]
        points = [d.array(types[2], ()), d.array(types[3], () if d.random() < 0.6 else (w[0],))]
        return Parts([d.array(types[0], x), d.array(types[1], w), *points], attributes)
    t = _float(d, v)
    return Parts([d.array(t, x), d.array(t, w), d.array(t, (w[0],))], attributes)


def conv_transpose(d: Draw, v: Version) -> Parts:
    rank, group = d.choice((1, 2, 2, 3)), d.choice((1, 1, 2))
    kernel = d.sizes(rank, 1, 3)
    x = _image(d, rank, group * d.randint(1, 2))
    per_group = d.randint(1, 3)
    attributes = _window(d, v, rank, kernel) | {"group": group, "kernel_shape": None}
    strides = attributes["strides"] or [1] * rank
    if d.random() < 0.3:
        attributes["output_padding"] = [d.randrange(stride) for stride in strides]
    elif d.random() < 0.2:
        attributes["output_shape"] = [
            (size - 1) * by + d.randint(1, 3) for size, by in zip(x[2:], strides, strict=True)
        ]
        attributes["pads"] = None
    t = _float(d, v)
    return Parts(
        [d.array(t, x), d.array(t, (x[1], per_group, *kernel)), d.array(t, (group * per_group,))], attributes
    )


def pool(d: Draw, v: Version) -> Parts:
    rank = d.choice((1, 2, 2, 2, 3))
    kernel = d.sizes(rank, 1, 3)
    attributes = _window(d, v, rank, kernel) | {
        "kernel_shape": kernel,
        "storage_order": 0 if not d.seldom() else 1,
    }
    return Parts([d.array(_float(d, v), _image(d, rank, d.randint(1, 3)))], attributes)


def global_pool(d: Draw, v: Version) -> Parts:
    rank = d.choice((0, 1, 2, 2, 3))
    return Parts([d.array(_float(d, v), _image(d, rank, d.randint(1, 3)))])


def max_unpool(d: Draw, v: Version) -> Parts:
    rank = d.choice((1, 2, 2))
    kernel, x = d.sizes(rank, 1, 3), (d.randint(1, 2), d.randint(1, 2), *d.sizes(rank, 1, 3))
    strides = d.sizes(rank, 1, 3)
    out = [(size - 1) * by + taps for size, by, taps in zip(x[2:], strides, kernel, strict=True)]
    places = d.arrays.permutation(math.prod(x[:2]) * math.prod(out))[: math.prod(x)].reshape(x)
    larger = np.array([*x[:2], *(size + d.choice((0, 0, 1)) for size in out)])
    needed = frozenset({2} if d.random() < 0.2 else ())
    inputs = [d.array(_float(d, v), x), places.astype(np.int64), larger if needed else None]
    return Parts(inputs, {"kernel_shape": kernel, "strides": strides, "pads": None}, needed=needed)


def deform_conv(d: Draw, v: Version) -> Parts:
    groups, shared = d.sizes(2, 1, 2)
    taps, strides, dilations = (d.sizes(2, 1, most) for most in (3, 2, 2))
    spatial = [(tap - 1) * by + d.randint(2, 4) for tap, by in zip(taps, dilations, strict=True)]
    pads = d.sizes(4, 0, 1)
    out = [
        (size + pads[n] + pads[n + 2] - (taps[n] - 1) * dilations[n] - 1) // strides[n] + 1
        for n, size in enumerate(spatial)
    ]
    channels, count, t = groups * shared, taps[0] * taps[1], _float(d, v)
    inputs = [
        d.array(t, (1, channels, *spatial)),
        d.array(t, (groups, shared, *taps)),
        d.array(t, (1, shared * count * 2, *out)),
        d.array(t, (groups,)),
        d.array(t, (1, shared * count, *out)),
    ]
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "group": groups}
    return Parts(inputs, attributes | {"offset_group": shared, "kernel_shape": None})


def col2im(d: Draw, v: Version) -> Parts:
    rank = d.choice((1, 2, 2))
    block, image, strides = d.sizes(rank, 1, 3), d.sizes(rank, 3, 6), d.sizes(rank, 1, 2)
    pads = d.sizes(2 * rank, 0, 1)
    places = [(size + pads[n] + pads[n + rank] - block[n]) // strides[n] + 1 for n, size in enumerate(image)]
    x = (d.randint(1, 2), d.randint(1, 2) * math.prod(block), math.prod(places))
    attributes = {"strides": strides, "pads": pads, "dilations": None}
    return Parts([d.array(_float(d, v), x), np.array(image), np.array(block)], attributes)


def lrn(d: Draw, v: Version) -> Parts:
    x = d.array(_float(d, v), _image(d, d.choice((1, 2)), d.randint(1, 5)))
    return Parts(
        [x],
        {
            "size": d.choice((1, 2, 3, 5)),
            "alpha": d.choice((None, 0.5)),
            "beta": d.choice((None, 0.5)),
            "bias": d.choice((None, 2.0)),
        },
    )


def resize(d: Draw, v: Version) -> Parts:
    rank = d.choice((1, 2, 4, 4, 4))
    x = (1, d.randint(1, 2), *d.sizes(2, 1, 6)) if rank == 4 else tuple(d.sizes(rank, 1, 6))
    axes = sorted(d.sample(range(rank), d.randint(1, rank))) if v.has("axes") and d.random() < 0.3 else None
    moved = range(rank) if axes is None else axes
    kept = rank == 4 and axes is None
    scales = [1.0 if kept and n < 2 else d.choice((0.5, 0.6, 0.75, 1.0, 1.5, 2.0, 3.0, 2.3)) for n in moved]
    sizes = [x[n] if kept and n < 2 else d.randint(1, 9) for n in moved]
    mode = d.choice(("nearest", "linear", "cubic")) if v.since > 10 else d.choice(("nearest", "linear"))
    where = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    where += ["tf_half_pixel_for_nn"] if v.since == 11 else ["tf_crop_and_resize"]
    where += ["half_pixel_symmetric"] if v.since >= 19 else []
    attributes = {
        "axes": axes,
        "mode": mode,
        "coordinate_transformation_mode": d.choice((*where, None)),
        "nearest_mode": d.choice((None, "floor", "ceil", "round_prefer_floor", "round_prefer_ceil")),
        "cubic_coeff_a": d.choice((None, -0.5)),
        "keep_aspect_ratio_policy": d.choice((None, "stretch", "not_larger", "not_smaller")),
        "antialias": d.choice((None, None, 0, 1)),
        "exclude_outside": d.choice((None, None, 0, 1)) if mode == "cubic" else None,
    }
    image, t = d.array(_float(d, v), x), np.array(scales, np.float32)
    if v.since == 10:
        return Parts([image, t], attributes)
    cropping = attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    roi = np.array([*([0.125] * len(scales)), *([0.875] * len(scales))], np.float32) if cropping else None
    by_sizes = d.random() < 0.5
    if v.since == 11 and roi is None:
        roi = np.zeros(0, np.float32)
    if v.since == 11 and by_sizes:
        t = np.zeros(0, np.float32)
    elif by_sizes:
        t = None  # type: ignore[assignment]
    return Parts(
        [image, roi, t, np.array(sizes) if by_sizes else None], attributes, needed=frozenset({1, 2, 3})
    )


def upsample(d: Draw, v: Version) -> Parts:
    x = d.array(_float(d, v), (1, d.randint(1, 2), *d.sizes(2, 1, 4)))
    scales = [1.0, 1.0, *(d.choice((1.0, 1.5, 2.0, 3.0)) for _ in range(2))]
    return Parts(
        [x, np.array(scales, np.float32)][: len(v.schema.inputs)],
        {
            "mode": d.choice(("nearest", "linear")),
            "scales": scales,
            "height_scale": scales[2],
            "width_scale": scales[3],
        },
    )


def grid_sample(d: Draw, v: Version) -> Parts:
    rank = 2 if v.since < 20 else d.choice((2, 2, 3))
    x = (d.randint(1, 2), d.randint(1, 2), *d.sizes(rank, 1, 5))
    types = [d.dtype(v.schema, each.type_str) for each in v.schema.inputs]
    grid = (d.arrays.random((x[0], *d.sizes(rank, 1, 4), rank)) * 2.6 - 1.3).astype(types[1])
    modes = ("bilinear", "nearest", "bicubic") if v.since < 20 else ("linear", "nearest", "cubic")
    return Parts([d.array(types[0], x), grid], {"mode": d.choice((*modes, None))})


def affine_grid(d: Draw, v: Version) -> Parts:
    rank, batch = d.choice((2, 3)), d.randint(1, 2)
    size = np.array([batch, d.randint(1, 2), *d.sizes(rank, 1, 4)])
    return Parts([d.array(_float(d, v), (batch, rank, rank + 1)), size])


def roi_align(d: Draw, v: Version) -> Parts:
    x, count, t = (2, 2, *d.sizes(2, 1, 6)), d.randint(1, 3), _float(d, v)
    corners = d.arrays.standard_normal((count, 2)) * 4
    rois = np.concatenate([corners, corners + np.abs(d.arrays.standard_normal((count, 2))) * 4 - 1], axis=1)
    attributes = {
        "output_height": d.randint(1, 3),
        "output_width": d.randint(1, 3),
        "sampling_ratio": d.choice((0, 0, 1, 2)),
        "spatial_scale": d.choice((None, 0.5, 1.0)),
        "coordinate_transformation_mode": d.choice((None, "half_pixel", "output_half_pixel")),
    }
    return Parts([d.array(t, x), rois.astype(t), d.whole(0, 2, (count,))], attributes)


def max_roi_pool(d: Draw, v: Version) -> Parts:
    t = _float(d, v)
    rois = np.concatenate([d.whole(0, 2, (2, 1)), d.whole(0, 3, (2, 2)), d.whole(3, 6, (2, 2))], axis=1)
    return Parts([d.array(t, (2, 2, 6, 6)), rois.astype(t)], {"pooled_shape": d.sizes(2, 1, 3)})


def non_max_suppression(d: Draw, v: Version) -> Parts:
    batch, classes, count = d.randint(1, 2), d.randint(1, 2), d.randint(1, 6)
    corners = d.whole(0, 6, (batch, count, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + d.whole(1, 5, (batch, count, 2))], axis=2).astype(np.float32)
    scores = d.arrays.permutation(batch * classes * count).reshape(batch, classes, count).astype(np.float32)
    numbers = [
        np.array([d.choice((0, 1, 3, 100))]),
        np.array([d.choice((0.0, 0.3, 0.5, 1.0))], np.float32),
        np.array([d.choice((0.0, 2.0, -1.0))], np.float32),
    ]
    needed = frozenset({2} if d.random() < 0.8 else ())
    return Parts([boxes, scores, *numbers], {}, needed=needed)


WINDOWS: dict[str, Hint] = {
    "AffineGrid": affine_grid,
    "AveragePool": pool,
    "Col2Im": col2im,
    "Conv": conv,
    "ConvInteger": conv,
    "ConvTranspose": conv_transpose,
    "DeformConv": deform_conv,
    "GlobalAveragePool": global_pool,
    "GlobalLpPool": global_pool,
    "GlobalMaxPool": global_pool,
    "GridSample": grid_sample,
    "LRN": lrn,
    "LpPool": pool,
    "MaxPool": pool,
    "MaxRoiPool": max_roi_pool,
    "MaxUnpool": max_unpool,
    "NonMaxSuppression": non_max_suppression,
    "Resize": resize,
    "RoiAlign": roi_align,
    "Upsample": upsample,
}
