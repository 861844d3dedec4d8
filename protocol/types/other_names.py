"""The names that other libraries have for the functions of a `GraphBuilder` and the attributes of its
tensors."""

from __future__ import annotations

from collections.abc import Iterable

from cudnn_actor.protocol.types.checks import did_you_mean

__all__ = ["ARGUMENTS", "BUILDER", "TENSOR", "no_attribute"]

BUILDER = {
    "concatenate": "concat cat hstack vstack",
    "transpose": "permute t",
    "reshape": "view flatten",
    "expand_dims": "unsqueeze",
    "astype": "cast to_dtype",
    "conv": "conv1d conv2d conv3d convolution",
    "conv_transpose": "conv_transpose1d conv_transpose2d conv_transpose3d deconv deconvolution",
    "max_pool": "max_pool1d max_pool2d max_pool3d maxpool",
    "avg_pool": "avg_pool1d avg_pool2d avg_pool3d average_pool avgpool",
    "adaptive_avg_pool": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    "adaptive_max_pool": "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d",
    "global_avg_pool": "global_average_pool",
    "linear": "dense fully_connected gemm",
    "matmul": "mm bmm dot",
    "einsum": "tensordot inner",
    "attention": "scaled_dot_product_attention dot_product_attention sdpa",
    "layer_norm": "layernorm",
    "rms_norm": "rmsnorm",
    "batch_norm": "batchnorm",
    "group_norm": "groupnorm",
    "instance_norm": "instancenorm",
    "swish": "silu",
    "hard_swish": "hardswish",
    "hard_sigmoid": "hardsigmoid",
    "relu": "relu6",
    "clip": "clamp hardtanh",
    "sum": "reduce_sum",
    "mean": "reduce_mean average",
    "max": "reduce_max amax",
    "min": "reduce_min amin",
    "prod": "reduce_prod product",
    "all": "reduce_all reduce_and",
    "any": "reduce_any reduce_or",
    "var": "variance",
    "logsumexp": "log_sum_exp reduce_logsumexp",
    "cross_entropy": "softmax_cross_entropy nll_loss cross_entropy_loss",
    "ctc_loss": "ctc",
    "take": "index_select embedding gather",
    "take_along_axis": "gather_elements",
    "put_along_axis": "scatter scatter_elements",
    "top_k": "topk",
    "power": "pow",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div true_divide",
    "negative": "neg",
    "mod": "remainder",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arcsinh": "asinh",
    "arccosh": "acosh",
    "arctanh": "atanh",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "where": "select masked_fill",
    "full": "zeros ones constant zeros_like ones_like full_like",
    "arange": "range linspace",
    "input": "placeholder parameter variable tensor",
    "grad": "backward gradient gradients",
    "build": "compile",
    "resize": "interpolate upsample",
    "depth_to_space": "pixel_shuffle",
    "space_to_depth": "pixel_unshuffle",
    "split": "chunk",
    "broadcast_to": "expand",
    "uniform": "rand random_uniform",
    "normal": "randn random_normal",
    "slice": "getitem narrow",
    "swapaxes": "swapdims",
    "moveaxis": "movedim",
    "abs": "absolute",
    "bit_cast": "bitcast view_as",
    "unfold": "im2col extract_patches",
    "fold": "col2im",
    "divisive_norm": "divisive_normalization local_contrast_norm",
    "pointwise_backward": "relu_backward tanh_backward sigmoid_backward elu_backward gelu_backward "
    "softplus_backward swish_backward silu_backward threshold_backward",
    "max_pool_backward": "max_pool2d_backward",
    "avg_pool_backward": "avg_pool2d_backward",
}
"""A function's name → the names that others have for it."""
ARGUMENTS = {
    name: frozenset(others.split())
    for name, others in {
        "size": "kernel_size ksize kernel kernel_shape pool_size window window_size window_shape filter_size",
        "window": "size kernel_size ksize kernel kernel_shape pool_size window_size window_shape pad stride",
        "pad": "padding pads",
        "stride": "strides",
        "dilation": "dilations dilation_rate",
        "flipped": "mode conv_mode",
        "groups": "group num_groups feature_group_count",
        "output": "output_size size",
        "output_pad": "output_padding",
        "include_padding": "count_include_pad",
        "axis": "dim axes",
        "axes": "perm permutation axis dim",
        "alphas": "alpha alpha1 alpha2",
        "compute_dtype": "compute_data_type preferred_element_type accumulate_dtype math_type dtype",
        "dims": "shape newshape size input_size weight_size output_shape dx dw w x",
        "keepdims": "keepdim keep_dim keep_dims",
        "keep_dims": "keepdim keep_dim keepdims",
        "epsilon": "eps",
        "variance": "var running_var",
        "running_variance": "running_var",
        "scale": "weight gamma",
        "bias": "b attn_mask mask",
        "w": "weight weights kernel filter filters",
        "dw": "w weight",
        "dx": "x",
        "dy": "grad_output grad gradient",
        "x": "a input inputs tensor x1 self",
        "a": "x x1 input",
        "b": "y x2 other",
        "array": "data values x input",
        "data": "array values",
        "q": "query queries",
        "k": "key keys diagonal",
        "v": "value",
        "causal": "is_causal",
        "dropout": "dropout_p",
        "slope": "negative_slope alpha",
        "lower": "min a_min",
        "upper": "max a_max",
        "indices": "index",
        "updates": "src source",
        "ddof": "correction",
        "probability": "p",
        "depth": "num_classes",
        "repeats": "reps",
        "sections": "chunks indices_or_sections num_or_size_splits",
        "shift": "shifts",
        "block": "upscale_factor downscale_factor block_size blocksize",
        "scales": "scale_factor scale",
        "sizes": "size",
        "tensors": "arrays",
        "ignore": "ignore_index",
        "targets": "target labels",
        "input_lengths": "logit_length logit_lengths",
        "target_lengths": "label_length label_lengths",
        "value": "fill_value constant_values",
        "widths": "pad_width pad",
        "conv": "pad padding stride strides dilation groups",
    }.items()
}
"""An argument's name → the names that others have for it."""
_FUNCTIONS = {other: name for name, others in BUILDER.items() for other in others.split()}
_NO_VALUES = "a graph's tensor holds no values: build the graph, run it, and download its output"
TENSOR = {
    "ndim": "x.rank",
    "size": "math.prod(x.dims)",
    "numel": "math.prod(x.dims)",
    "layout": "g.to_layout(x, layout)",
    **dict.fromkeys(("view", "flatten", "ravel"), "x.reshape(dims)"),
    **dict.fromkeys(("permute", "t"), "x.transpose(axes)"),
    **dict.fromkeys(("to", "type", "cast"), "x.astype(dtype)"),
    "float": "x.astype('float32')",
    "double": "x.astype('float64')",
    "half": "x.astype('float16')",
    "bfloat16": "x.astype('bfloat16')",
    "int": "x.astype('int32')",
    "long": "x.astype('int64')",
    "bool": "x != 0",
    **dict.fromkeys(("numpy", "item", "tolist", "cpu", "detach", "data", "eval"), _NO_VALUES),
}
"""An attribute that tensors of other libraries have → what stands in its place here."""


def no_attribute(kind: str, name: str, functions: Iterable[str], attributes: Iterable[str] = ()) -> str:
    """The text of an `AttributeError`: it names what to use in the place of the missing attribute."""
    functions, attributes = set(functions), set(attributes)
    if kind == "Tensor" and name in TENSOR:
        instead = TENSOR[name]
        return f"Tensor has no {name!r}; {'use ' if instead.startswith(('x', 'g', 'm')) else ''}{instead}"
    known = name if name in functions else _FUNCTIONS.get(name)
    if known is not None:
        return f"{kind} has no {name!r}; use g.{known}(...), where g is the builder"
    return (
        f"{kind} has no {name!r}; {did_you_mean(name, functions | attributes)}help({kind}) lists what it has"
    )
