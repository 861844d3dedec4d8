"""Reads photographs of all formats that Pillow supports, as an array of colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import cbook
from PIL import Image, ImageOps, UnidentifiedImageError

from cudnn_actor.cli.user_error import UserError

__all__ = ["LONGEST_SIDE", "SHORTEST_SIDE", "luminance", "read_photograph"]

LONGEST_SIDE = 400
"""Pixels. Larger photographs are scaled down, so that the effect of 5x5 filters is visible."""
SHORTEST_SIDE = 48
"""Pixels. Smaller photographs are too small for the demo's patches."""

_LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)


def read_photograph(path: Path | None) -> np.ndarray:
    """A photograph of dims (3, height, width), float32, 0 to 1.

    Parameters
    ----------
    path
        An image file; None for the photograph that matplotlib ships (Grace Hopper, public domain).

    Raises
    ------
    UserError
        There is no such file, it is not an image, or it is too small.
    """
    image = _open(path or Path(str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))))
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    if min(image.size) < SHORTEST_SIDE:
        width, height = image.size
        raise UserError(
            f"{path} is {width} x {height} at the demo's scale; give an image whose sides are both "
            f"{SHORTEST_SIDE} pixels or more"
        )
    return np.ascontiguousarray(np.asarray(image, dtype=np.float32).transpose(2, 0, 1)) / 255


def luminance(photo: np.ndarray) -> np.ndarray:
    """The brightness of a photograph, dims (height, width): ITU-R BT.601 weights."""
    return np.tensordot(_LUMINANCE, photo, axes=1)


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return _upright_colour(image)
    except FileNotFoundError:
        raise UserError(f"there is no image {path}") from None
    except UnidentifiedImageError:
        raise UserError(f"{path} is not an image that Pillow can read; give a JPEG or a PNG") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _upright_colour(image: Image.Image) -> Image.Image:
    """Convert to three colours, rotated upright; transparent areas become white."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith(("I", "F")):
        upright = _to_8_bits(upright)
    layers = upright.convert("RGBA")
    white = Image.new("RGBA", layers.size, "white")
    return Image.alpha_composite(white, layers).convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale deeper greys to 8 bits; Pillow would clip them at 255."""
    values = np.asarray(image, dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) * (255 / (high - low)) if high > low else np.zeros_like(values)
    return Image.fromarray(scaled.astype(np.uint8))
