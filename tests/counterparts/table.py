"""Each function of cuDNN's headers and each public name of its graphs in Python, and what does it here.

Only names and answers. Names of this package stand in backticks, as expressions: a test looks them up.
Another test, in `tests/support`, compares the functions with the installed headers, and the names with the
installed frontend.

The file is long because it is one table.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["FRONTEND", "HEADERS", "Header", "Kind", "Row"]


class Kind(enum.Enum):
    """What becomes of a function here. The value: how the answer begins."""

    HERE = ""
    """The answer does the same."""
    NEEDLESS = "Nothing to call. "
    """It prepares for a function that needs no such preparation here."""
    NOT_YET = "Not yet. "
    NO = "No. "


class Row(NamedTuple):
    """Functions, separated by blanks, and one answer for all of them."""

    kind: Kind
    functions: str
    answer: str

    @property
    def names(self) -> tuple[str, ...]:
        """The functions."""
        return tuple(self.functions.split())


class Header(NamedTuple):
    """Functions of one header.

    Parameters
    ----------
    name
        The header's, without its suffix.
    title
        The section of the page.
    rows
        The functions, and what does the same.
    since
        The first version of cuDNN that has these functions, if it is later than 9.0; the title says it.
    optional
        Whether older versions do not have this header.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    since: tuple[int, int] = (9, 0)
    optional: bool = False


_HERE, _NEEDLESS, _NOT_YET, _NO = Kind.HERE, Kind.NEEDLESS, Kind.NOT_YET, Kind.NO
_RAW = "Raw descriptors have no meaning on the CPU, and planning with them can crash"
_GRAPH = (
    Row(
        _HERE,
        "cudnnCreate cudnnDestroy",
        "`spawn(device='cuda:0')`: the service owns the handle, and destroys it when it ends",
    ),
    Row(
        _NO,
        "cudnnSetStream cudnnGetStream",
        "A service has one stream of its own, and runs requests in order",
    ),
    Row(
        _HERE,
        "cudnnGetVersion cudnnGetProperty",
        "`gpu.statistics()`, in `Statistics.cudnn_version`; `cudnn-actor doctor` before there is a service",
    ),
    Row(
        _HERE,
        "cudnnGetCudartVersion cudnnGetMaxDeviceVersion",
        "`cudnn-actor doctor` lists the driver, the device and the packages of CUDA, and says what does not "
        "fit",
    ),
    Row(
        _HERE,
        "cudnnGraphVersionCheck",
        "`cudnn-actor doctor` calls it",
    ),
    Row(
        _HERE,
        "cudnnGetErrorString cudnnGetLastErrorString",
        "`ExecutionFailed(status=..., detail=...)` has both",
    ),
    Row(
        _NO,
        "cudnnQueryRuntimeError",
        "A failure is the error of its request, or the worker is replaced: `gpu.events()`",
    ),
    Row(
        _NO,
        "cudnnSetCallback cudnnGetCallback",
        "The service's own log lines are those of Python's logger `cudnn_actor`",
    ),
    Row(
        _NO,
        """
        cudnnBackendInitialize cudnnBackendCreateDescriptor cudnnBackendDestroyDescriptor
        cudnnBackendSetAttribute cudnnBackendGetAttribute cudnnBackendFinalize
        """,
        f"{_RAW}. A graph is built with `GraphBuilder`",
    ),
    Row(_NO, "cudnnBackendExecute", f"{_RAW}. `gpu.apply(graph)` runs a graph"),
    Row(
        _NO,
        "cudnnBackendPopulateCudaGraph cudnnBackendUpdateCudaGraph",
        "A model is captured in CUDA graphs by the service: `gpu.load(model)`, `DeployModel`",
    ),
)
_GRAPH_9_23 = (
    Row(
        _NO,
        "cudnnGetExecutionPlanWorkspaceSize",
        f"{_RAW}. `gpu.explain(graph)` tells the plan's workspace: `Explanation.workspace`",
    ),
)
_OPS = (
    Row(
        _NEEDLESS,
        """
        cudnnCreateTensorDescriptor cudnnDestroyTensorDescriptor
        cudnnSetTensor4dDescriptor cudnnSetTensor4dDescriptorEx cudnnGetTensor4dDescriptor
        cudnnSetTensorNdDescriptor cudnnSetTensorNdDescriptorEx cudnnGetTensorNdDescriptor
        """,
        "A buffer has its `TensorSpec`: `gpu.empty(dims, dtype='float32', layout='NHWC')`",
    ),
    Row(_HERE, "cudnnGetTensorSizeInBytes cudnnGetFilterSizeInBytes", "`TensorSpec.nbytes`"),
    Row(
        _NEEDLESS,
        """
        cudnnCreateFilterDescriptor cudnnDestroyFilterDescriptor
        cudnnSetFilter4dDescriptor cudnnGetFilter4dDescriptor
        cudnnSetFilterNdDescriptor cudnnGetFilterNdDescriptor
        """,
        "A filter is a buffer like any other, of dims (K, C / groups, spatial)",
    ),
    Row(
        _HERE,
        "cudnnTransformTensor",
        "`gpu.copy(src, dst)`; `g.to_layout(x, 'NHWC')`, `g.astype(x, dtype)`: "
        "[programs](cudnn.md#layouts-padding-and-folding)",
    ),
    Row(
        _HERE,
        "cudnnTransformTensorEx cudnnTransformFilter",
        "`g.pad(x, widths)`, `g.space_to_depth(x, block)`, `g.depth_to_space(x, block)`, "
        "`g.reshape(x, dims)`, `g.transpose(x, axes)`: [programs](cudnn.md#layouts-padding-and-folding)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateTensorTransformDescriptor cudnnDestroyTensorTransformDescriptor
        cudnnSetTensorTransformDescriptor cudnnGetTensorTransformDescriptor cudnnInitTransformDest
        """,
        "What it says are arguments; dims of results follow",
    ),
    Row(
        _HERE,
        "cudnnOpTensor",
        "`g.pointwise('add', a, b, alphas=(alpha1, alpha2))`: [programs](cudnn.md#elementwise)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateOpTensorDescriptor cudnnDestroyOpTensorDescriptor
        cudnnSetOpTensorDescriptor cudnnGetOpTensorDescriptor
        """,
        "The operation is an argument: `PointwiseMode`. NaN propagates",
    ),
    Row(_HERE, "cudnnAddTensor", "`g.add(a, b)`, with dims of 1 broadcast: [program](cudnn.md#elementwise)"),
    Row(_HERE, "cudnnScaleTensor", "`g.multiply(a, b)`: [program](cudnn.md#elementwise)"),
    Row(_HERE, "cudnnSetTensor", "`gpu.fill(dst, value)`, `Fill`; `g.full(dims, value)`"),
    Row(
        _HERE,
        "cudnnReduceTensor",
        "`g.reduce(mode, x, axes)`, `Reduction`; indices: `g.argmax(x, axis)`, `g.argmin(x, axis)`, "
        "`ArgReduction`: [programs](cudnn.md#reductions)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateReduceTensorDescriptor cudnnDestroyReduceTensorDescriptor
        cudnnSetReduceTensorDescriptor cudnnGetReduceTensorDescriptor
        cudnnGetReductionIndicesSize cudnnGetReductionWorkspaceSize
        """,
        "The mode is an argument: `ReductionMode`. The service has the workspace",
    ),
    Row(
        _HERE,
        "cudnnSoftmaxForward",
        "`g.softmax(x, axis)`, `g.log_softmax(x, axis)`, `Softmax`: "
        "[programs](cudnn.md#activations-and-softmax)",
    ),
    Row(_HERE, "cudnnSoftmaxBackward", "`SoftmaxBackward`: [programs](cudnn.md#activations-and-softmax)"),
    Row(
        _HERE,
        "cudnnActivationForward",
        "`g.pointwise(mode, x)`, `Pointwise`: [program](cudnn.md#activations-and-softmax)",
    ),
    Row(
        _HERE,
        "cudnnActivationBackward",
        "`g.pointwise_backward(mode, dy, x)`: [program](cudnn.md#activations-and-softmax)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateActivationDescriptor cudnnDestroyActivationDescriptor
        cudnnSetActivationDescriptor cudnnGetActivationDescriptor
        cudnnSetActivationDescriptorSwishBeta cudnnGetActivationDescriptorSwishBeta
        """,
        "The mode and its coefficient are arguments: `g.pointwise('swish', x, parameter=beta)`, `Epilogue`",
    ),
    Row(
        _HERE,
        "cudnnPoolingForward",
        "`MaxPool`, `AvgPool`; `g.max_pool(x, size)`, `g.avg_pool(x, size)`: [programs](cudnn.md#pooling)",
    ),
    Row(
        _HERE,
        "cudnnPoolingBackward",
        "`MaxPoolBackward`, `AvgPoolBackward`; `g.max_pool_backward(dy, x, size)`, "
        "`g.avg_pool_backward(dy, x, size)`: [programs](cudnn.md#pooling)",
    ),
    Row(
        _HERE,
        "cudnnGetPooling2dForwardOutputDim cudnnGetPoolingNdForwardOutputDim",
        "`Window.output_dims`",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreatePoolingDescriptor cudnnDestroyPoolingDescriptor
        cudnnSetPooling2dDescriptor cudnnGetPooling2dDescriptor
        cudnnSetPoolingNdDescriptor cudnnGetPoolingNdDescriptor
        """,
        "`Window` is part of the message",
    ),
    Row(
        _HERE,
        "cudnnLRNCrossChannelForward",
        "`LocalResponseNorm`, `g.local_response_norm(x, size)`: [program](cudnn.md#response-normalisation)",
    ),
    Row(
        _HERE,
        "cudnnLRNCrossChannelBackward",
        "`LocalResponseNormBackward`: [program](cudnn.md#response-normalisation)",
    ),
    Row(
        _HERE,
        "cudnnDivisiveNormalizationForward",
        "`g.divisive_norm(x, size, means=means)`: [programs](cudnn.md#response-normalisation)",
    ),
    Row(
        _HERE,
        "cudnnDivisiveNormalizationBackward",
        "`g.grad(y, (x, means), dy)` of it: [programs](cudnn.md#response-normalisation)",
    ),
    Row(
        _NEEDLESS,
        "cudnnCreateLRNDescriptor cudnnDestroyLRNDescriptor cudnnSetLRNDescriptor cudnnGetLRNDescriptor",
        "The parameters are arguments",
    ),
    Row(
        _HERE,
        "cudnnBatchNormalizationForwardInference cudnnNormalizationForwardInference",
        "`BatchNorm`, `g.batch_norm(x, mean, variance, scale, bias)`: [programs](cudnn.md#batch-norm)",
    ),
    Row(
        _HERE,
        """
        cudnnBatchNormalizationForwardTraining cudnnBatchNormalizationForwardTrainingEx
        cudnnNormalizationForwardTraining
        """,
        "`BatchNormTraining`, `g.batch_norm_training(x, scale, bias)`, with z and an activation behind it in "
        "the graph: [programs](cudnn.md#batch-norm)",
    ),
    Row(
        _HERE,
        """
        cudnnBatchNormalizationBackward cudnnBatchNormalizationBackwardEx cudnnNormalizationBackward
        """,
        "`BatchNormBackward`; `g.grad(y, x, dy)` with z and an activation: [programs](cudnn.md#batch-norm)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnDeriveBNTensorDescriptor cudnnDeriveNormTensorDescriptor
        cudnnGetBatchNormalizationBackwardExWorkspaceSize
        cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize
        cudnnGetBatchNormalizationTrainingExReserveSpaceSize
        cudnnGetNormalizationBackwardWorkspaceSize cudnnGetNormalizationForwardTrainingWorkspaceSize
        cudnnGetNormalizationTrainingReserveSpaceSize
        """,
        "Scales and statistics have dims (C,), or (C, ...) per activation. The service has the workspace; "
        "there is no reserve",
    ),
    Row(
        _HERE,
        "cudnnSpatialTfGridGeneratorForward",
        "`g.affine_grid(theta, dims, align_corners=True)`: [program](cudnn.md#spatial-transformer)",
    ),
    Row(
        _HERE,
        "cudnnSpatialTfSamplerForward",
        "`GridSample`, `g.grid_sample(x, grid, align_corners=True)`: [program](cudnn.md#spatial-transformer)",
    ),
    Row(
        _HERE,
        "cudnnSpatialTfGridGeneratorBackward cudnnSpatialTfSamplerBackward",
        "`g.grad(y, (x, grid), dy)`: [programs](cudnn.md#spatial-transformer)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateSpatialTransformerDescriptor cudnnDestroySpatialTransformerDescriptor
        cudnnSetSpatialTransformerNdDescriptor
        """,
        "The dims are an argument",
    ),
    Row(
        _HERE,
        "cudnnDropoutForward cudnnDropoutBackward",
        "`g.dropout(x, probability, state)`, of x or of dy, with the same state: "
        "[programs](cudnn.md#dropout)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateDropoutDescriptor cudnnDestroyDropoutDescriptor
        cudnnSetDropoutDescriptor cudnnGetDropoutDescriptor cudnnRestoreDropoutDescriptor
        cudnnDropoutGetStatesSize cudnnDropoutGetReserveSpaceSize
        """,
        "The state is a buffer of two int64, which can be downloaded and uploaded: "
        "[random numbers](operations.md#random-numbers). There is no reserve",
    ),
    Row(_HERE, "cudnnOpsVersionCheck", "`cudnn-actor doctor` calls it"),
)
_CNN = (
    Row(
        _NEEDLESS,
        """
        cudnnCreateConvolutionDescriptor cudnnDestroyConvolutionDescriptor
        cudnnSetConvolution2dDescriptor cudnnGetConvolution2dDescriptor
        cudnnSetConvolutionNdDescriptor cudnnGetConvolutionNdDescriptor
        cudnnSetConvolutionGroupCount cudnnGetConvolutionGroupCount
        """,
        "`ConvSpec` is part of the message. `CUDNN_CONVOLUTION`: `g.conv(x, w, flipped=True)`. The compute "
        "type follows from the operands: [compute types](cudnn.md#compute-types)",
    ),
    Row(
        _NEEDLESS,
        "cudnnSetConvolutionMathType cudnnGetConvolutionMathType",
        "`Numerics(tf32=True)` is part of the message",
    ),
    Row(
        _NO,
        "cudnnSetConvolutionReorderType cudnnGetConvolutionReorderType cudnnReorderFilterAndBias",
        "There are no vectorised layouts. Filters are NCHW or NHWC",
    ),
    Row(
        _HERE,
        "cudnnGetConvolution2dForwardOutputDim cudnnGetConvolutionNdForwardOutputDim",
        "`ConvSpec.output_dims`",
    ),
    Row(_HERE, "cudnnConvolutionForward", "`ConvFwd`, `gpu.conv_fwd(x, w)`, `g.conv(x, w)`"),
    Row(
        _HERE,
        "cudnnConvolutionBiasActivationForward",
        "`ConvFwd(bias=bias, epilogue=epilogue, alpha=alpha1, beta=alpha2)`, where z is y's buffer; any z in "
        "a graph: [programs](cudnn.md#convolutions)",
    ),
    Row(
        _HERE,
        "cudnnConvolutionBackwardData",
        "`ConvBwdData`, `gpu.conv_bwd_data(dy, w)`, `g.conv_transpose(x, w)`",
    ),
    Row(_HERE, "cudnnConvolutionBackwardFilter", "`ConvBwdFilter`, `gpu.conv_bwd_filter(x, dy, dims=dims)`"),
    Row(_HERE, "cudnnConvolutionBackwardBias", "`g.sum(x, axis)`: [program](cudnn.md#convolutions)"),
    Row(_HERE, "cudnnIm2Col", "`g.unfold(x, size)`: [program](cudnn.md#convolutions)"),
    Row(
        _HERE,
        """
        cudnnFindConvolutionForwardAlgorithm cudnnFindConvolutionForwardAlgorithmEx
        cudnnFindConvolutionBackwardDataAlgorithm cudnnFindConvolutionBackwardDataAlgorithmEx
        cudnnFindConvolutionBackwardFilterAlgorithm cudnnFindConvolutionBackwardFilterAlgorithmEx
        """,
        "`gpu.plans(message, measure=True)` times candidates, and lists them with their times. "
        "`Warm(messages=messages, tune=True)` and `spawn(autotune=True)` time them, too. The fastest is kept",
    ),
    Row(
        _HERE,
        """
        cudnnGetConvolutionForwardAlgorithm_v7 cudnnGetConvolutionForwardAlgorithmMaxCount
        cudnnGetConvolutionBackwardDataAlgorithm_v7 cudnnGetConvolutionBackwardDataAlgorithmMaxCount
        cudnnGetConvolutionBackwardFilterAlgorithm_v7 cudnnGetConvolutionBackwardFilterAlgorithmMaxCount
        """,
        "`gpu.plans(graph)` lists candidates, timed ones after tuning; `gpu.explain(graph)` tells which one "
        "runs, and why",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnGetConvolutionForwardWorkspaceSize cudnnGetConvolutionBackwardDataWorkspaceSize
        cudnnGetConvolutionBackwardFilterWorkspaceSize
        """,
        "The service has the workspace; `spawn(workspace_limit=limit)` bounds it, `Explanation.workspace` is "
        "that of a plan",
    ),
    Row(
        _NEEDLESS,
        "cudnnGetFoldedConvBackwardDataDescriptors",
        "Folding is left to plans; by hand, see [programs](cudnn.md#layouts-padding-and-folding)",
    ),
    Row(
        _NO,
        """
        cudnnCreateFusedOpsConstParamPack cudnnDestroyFusedOpsConstParamPack
        cudnnSetFusedOpsConstParamPackAttribute cudnnGetFusedOpsConstParamPackAttribute
        cudnnCreateFusedOpsVariantParamPack cudnnDestroyFusedOpsVariantParamPack
        cudnnSetFusedOpsVariantParamPackAttribute cudnnGetFusedOpsVariantParamPackAttribute
        cudnnCreateFusedOpsPlan cudnnDestroyFusedOpsPlan cudnnMakeFusedOpsPlan cudnnFusedOpsExecute
        """,
        "A graph of several operations takes its place: `GraphBuilder`",
    ),
    Row(_HERE, "cudnnCnnVersionCheck", "`cudnn-actor doctor` calls it"),
)
_ADV = (
    Row(
        _HERE,
        "cudnnRNNForward cudnnRNNBackwardData_v8 cudnnRNNBackwardWeights_v8",
        "`g.lstm(x, weights)`, `g.gru(x, weights)`, `g.rnn(x, weights)`, and `g.grad(y, (x, h0), dy)` of "
        "them; a layer as a message: `Recurrent`, `RecurrentBackwardData`, `RecurrentBackwardWeights`, with "
        "the reserve in a buffer: [programs](cudnn.md#recurrent-networks)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateRNNDescriptor cudnnDestroyRNNDescriptor cudnnSetRNNDescriptor_v8 cudnnGetRNNDescriptor_v8
        cudnnCreateRNNDataDescriptor cudnnDestroyRNNDataDescriptor cudnnSetRNNDataDescriptor
        cudnnGetRNNDataDescriptor cudnnBuildRNNDynamic
        cudnnGetRNNWeightSpaceSize cudnnGetRNNWeightParams
        """,
        "The options and the lengths are arguments, weights are tensors in PyTorch's order",
    ),
    Row(
        _HERE,
        "cudnnGetRNNTempSpaceSizes",
        "The service has the workspace, and a graph with gradients its reserve. "
        "`await gpu.reserve_nbytes(layer)` gives the size of a reserve that lies in a buffer",
    ),
    Row(
        _HERE,
        "cudnnRNNSetClip_v8 cudnnRNNSetClip_v9 cudnnRNNGetClip_v8 cudnnRNNGetClip_v9",
        "A loop whose body has `g.clip`: [a program](cudnn.md#recurrent-networks). The `clip` of "
        "`RecurrentSteps` bounds what gates are computed from, as ONNX's: "
        "[steps of other cells](operations.md#steps-of-other-recurrent-cells)",
    ),
    Row(
        _NEEDLESS,
        """
        cudnnCreateCTCLossDescriptor cudnnDestroyCTCLossDescriptor
        cudnnSetCTCLossDescriptor cudnnSetCTCLossDescriptorEx
        cudnnSetCTCLossDescriptor_v8 cudnnSetCTCLossDescriptor_v9
        cudnnGetCTCLossDescriptor cudnnGetCTCLossDescriptorEx
        cudnnGetCTCLossDescriptor_v8 cudnnGetCTCLossDescriptor_v9
        cudnnGetCTCLossWorkspaceSize cudnnGetCTCLossWorkspaceSize_v8
        """,
        "The options are fields of `CTCLoss`",
    ),
    Row(
        _HERE,
        "cudnnCTCLoss cudnnCTCLoss_v8",
        "`g.ctc_loss(log_probs, targets, input_lengths, target_lengths)`, `CTCLoss`; by a kernel of this "
        "package, with any blank and padded labels: [CTC loss](operations.md#ctc-loss)",
    ),
    Row(
        _HERE,
        """
        cudnnCreateAttnDescriptor cudnnDestroyAttnDescriptor cudnnSetAttnDescriptor cudnnGetAttnDescriptor
        cudnnCreateSeqDataDescriptor cudnnDestroySeqDataDescriptor
        cudnnSetSeqDataDescriptor cudnnGetSeqDataDescriptor
        cudnnGetMultiHeadAttnBuffers cudnnGetMultiHeadAttnWeights
        cudnnMultiHeadAttnForward cudnnMultiHeadAttnBackwardData cudnnMultiHeadAttnBackwardWeights
        """,
        "`g.multi_head_attention(query, key, value, weights=..., heads=...)`, "
        "`g.attention_weights(packed, features)`, `g.grad(y, x, dy)`: "
        "[programs](cudnn.md#multi-head-attention)",
    ),
    Row(_HERE, "cudnnAdvVersionCheck", "`cudnn-actor doctor` calls it"),
)
_GNN = (
    Row(
        _HERE,
        "cudnnGnnAggSimpleForward cudnnGnnAggSimpleBackward",
        "Of several operations: `g.take(x, indices, axis)` and `g.put(x, indices, updates, "
        "reduction=ScatterReduction.ADD)`, with `g.grad(y, x, dy)`",
    ),
    Row(
        _NO,
        """
        cudnnGnnMhaGatForward cudnnGnnMhaGatBackward cudnnGnnMhaGatV2Forward cudnnGnnMhaGatV2Backward
        """,
        "There is no attention over the edges of a graph",
    ),
)
_SUBQUADRATIC = (
    Row(
        _HERE,
        """
        cudnnCausalConv1dForward cudnnCausalConv1dNwhForward
        """,
        "`g.conv(x, w, pad=((size - 1, 0),), groups=channels, bias=bias)`, with filters of dims "
        "(C, 1, size), and an activation behind it",
    ),
    Row(
        _HERE,
        "cudnnCausalConv1dBackward cudnnCausalConv1dNwhBackward",
        "`g.grad(y, (x, w, bias), dy)` of that",
    ),
    Row(
        _HERE,
        "cudnnB2BCausalConv1dForward cudnnB2BCausalConv1dBackward",
        "Of several operations: `g.conv(x, w)` twice, and products, with `g.grad(y, x, dy)`",
    ),
    Row(
        _NO,
        """
        cudnnFFTCausalConv1dForward cudnnFFTCausalConv1dBackward
        cudnnLongFFTCausalConv1dForward cudnnLongFFTCausalConv1dBackward
        cudnnLongFFTCausalConv1dGetBufferSizes
        """,
        "There are no Fourier transforms. `g.conv(x, w, groups=channels)` takes filters of any length",
    ),
    Row(_NO, "cudnnSubquadraticOpsVersionCheck", "The library is not used"),
)
HEADERS = (
    Header("cudnn_graph", "Handles, versions and raw graphs", _GRAPH),
    Header("cudnn_graph", "Raw graphs, from cuDNN 9.23 on", _GRAPH_9_23, since=(9, 23)),
    Header("cudnn_ops", "Operations", _OPS),
    Header("cudnn_cnn", "Convolutions", _CNN),
    Header("cudnn_adv", "Recurrent networks, CTC and attention", _ADV),
    Header("cudnn_gnn_ops", "Graph neural networks", _GNN, optional=True),
    Header("cudnn_subquadratic_ops", "Long convolutions", _SUBQUADRATIC, optional=True),
)
"""All functions of the headers, in the order of the page."""

_LINEAR = "There is no linear attention"
_FP8 = "There is no 8-bit floating-point dtype"
FRONTEND: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "Operations",
        (
            Row(
                _HERE,
                "conv_fprop",
                "`g.conv(x, w)`, `ConvFwd`",
            ),
            Row(_HERE, "conv_dgrad", "`g.conv_transpose(x, w)`, `g.grad(y, x, dy)`, `ConvBwdData`"),
            Row(_HERE, "conv_wgrad", "`g.grad(y, w, dy)`, `ConvBwdFilter`"),
            Row(_HERE, "matmul", "`g.matmul(a, b)`, `MatMul`"),
            Row(_HERE, "moe_grouped_matmul", "`g.grouped_matmul(tokens, weights, offsets)`, `GroupedMatMul`"),
            Row(
                _HERE,
                "moe_grouped_matmul_bwd",
                "`g.grad(y, (tokens, weights), dy)`, `GroupedMatMulBackwardWeights`",
            ),
            Row(_HERE, "sdpa", "`g.attention(q, k, v)`, `Attention`"),
            Row(_HERE, "sdpa_backward", "`AttentionBackward`, `g.grad(y, (q, k, v), dy)`"),
            Row(_NOT_YET, "sdpa_fp8 sdpa_fp8_backward sdpa_mxfp8 sdpa_mxfp8_backward", _FP8),
            Row(_NOT_YET, "block_scale_quantize block_scale_dequantize", _FP8),
            Row(_HERE, "layernorm", "`g.layer_norm(x, scale, bias)`, `LayerNorm`"),
            Row(_HERE, "layernorm_backward", "`LayerNormBackward`"),
            Row(_HERE, "rmsnorm", "`g.rms_norm(x, scale)`, `RMSNorm`"),
            Row(_HERE, "rmsnorm_backward", "`RMSNormBackward`"),
            Row(
                _HERE,
                "adalayernorm",
                "`g.layer_norm(x)`, times a scale and plus a bias of each sample",
            ),
            Row(_HERE, "adalayernorm_backward", "`g.grad(y, (x, scale, bias), dy)` of that"),
            Row(_HERE, "batchnorm", "`g.batch_norm_training(x, scale, bias)`, `BatchNormTraining`"),
            Row(_HERE, "batchnorm_backward", "`BatchNormBackward`"),
            Row(_HERE, "batchnorm_inference", "`g.batch_norm(x, mean, variance, scale, bias)`, `BatchNorm`"),
            Row(_HERE, "instancenorm", "`g.instance_norm(x, scale, bias)`, `InstanceNorm`"),
            Row(_HERE, "instancenorm_backward", "`InstanceNormBackward`"),
            Row(
                _HERE,
                "genstats",
                "`GenStats`; `g.batch_norm_finalize(sums, sums_of_squares, count)` finalises its sums",
            ),
            Row(_HERE, "reduction", "`g.reduce(mode, x, axes)`, `Reduction`"),
            Row(_HERE, "reshape", "`g.reshape(x, dims)`, `Reshape`"),
            Row(_HERE, "slice", "`g.slice(x, index)`, which is `x[...]`; `Slice`"),
            Row(_HERE, "transpose", "`g.transpose(x, axes)`, `Transpose`"),
            Row(_HERE, "concatenate", "`g.concatenate(tensors, axis)`, `Concat`"),
            Row(
                _HERE,
                "rope rope_backward",
                "Of several operations: `g.split(x, 2, axis=-1)`, products, "
                "`g.concatenate(tensors, axis=-1)`, with `g.grad(y, x, dy)`",
            ),
            Row(
                _NO,
                """
                gdn gdn_bwd gdn_summary gdn_summary_bwd gdn2 gdn2_bwd gdn2_summary gdn2_summary_bwd
                gdp gdp_bwd gdp_summary gdp_summary_bwd kda kda_bwd kda_summary kda_summary_bwd
                mamba2 mamba2_bwd mamba2_summary mamba2_summary_bwd
                """,
                _LINEAR,
            ),
        ),
    ),
    (
        "Functions of each element",
        (
            Row(_HERE, "abs", "`g.abs(x)`"),
            Row(_HERE, "add bias", "`g.add(a, b)`"),
            Row(_HERE, "add_square", "`g.add(a, g.square(b))`"),
            Row(_HERE, "binary_select", "`g.where(condition, a, b)`"),
            Row(_HERE, "ceil", "`g.ceil(x)`"),
            Row(_HERE, "cmp_eq", "`g.equal(a, b)`"),
            Row(_HERE, "cmp_neq", "`g.not_equal(a, b)`"),
            Row(_HERE, "cmp_gt", "`g.greater(a, b)`"),
            Row(_HERE, "cmp_ge", "`g.greater_equal(a, b)`"),
            Row(_HERE, "cmp_lt", "`g.less(a, b)`"),
            Row(_HERE, "cmp_le", "`g.less_equal(a, b)`"),
            Row(_HERE, "cos", "`g.cos(x)`"),
            Row(_HERE, "div", "`g.divide(a, b)`"),
            Row(_HERE, "elu", "`g.elu(x)`"),
            Row(_HERE, "erf", "`g.erf(x)`"),
            Row(_HERE, "exp", "`g.exp(x)`"),
            Row(_HERE, "floor", "`g.floor(x)`"),
            Row(_HERE, "gelu", "`g.gelu(x)`"),
            Row(_HERE, "gelu_approx_tanh", "`g.gelu(x, approximate=True)`"),
            Row(_HERE, "gen_index", "`g.arange(count)`, reshaped to the axis"),
            Row(_HERE, "identity", "`g.astype(x, dtype)`, `g.to_layout(x, layout)`"),
            Row(_HERE, "leaky_relu", "`g.leaky_relu(x, slope)`"),
            Row(_HERE, "log", "`g.log(x)`"),
            Row(_HERE, "logical_and", "`g.logical_and(a, b)`"),
            Row(_HERE, "logical_or", "`g.logical_or(a, b)`"),
            Row(_HERE, "logical_not", "`g.logical_not(x)`"),
            Row(_HERE, "max", "`g.maximum(a, b)`"),
            Row(_HERE, "min", "`g.minimum(a, b)`"),
            Row(_HERE, "mod", "`g.fmod(a, b)` has the sign of a, `g.mod(a, b)` that of b"),
            Row(_HERE, "mul scale", "`g.multiply(a, b)`"),
            Row(_HERE, "neg", "`g.negative(x)`"),
            Row(_HERE, "pow", "`g.power(a, b)`"),
            Row(_HERE, "reciprocal", "`g.reciprocal(x)`"),
            Row(_HERE, "relu", "`g.relu(x, slope=slope, lower=lower, upper=upper)`"),
            Row(_HERE, "rsqrt", "`g.rsqrt(x)`"),
            Row(_HERE, "sigmoid", "`g.sigmoid(x)`"),
            Row(_HERE, "sin", "`g.sin(x)`"),
            Row(_HERE, "softplus", "`g.softplus(x)`"),
            Row(_HERE, "sqrt", "`g.sqrt(x)`"),
            Row(_HERE, "sub", "`g.subtract(a, b)`"),
            Row(_HERE, "swish", "`g.swish(x, beta)`"),
            Row(_HERE, "tan", "`g.tan(x)`"),
            Row(_HERE, "tanh", "`g.tanh(x)`"),
            Row(
                _HERE,
                """
                elu_backward gelu_backward gelu_approx_tanh_backward leaky_relu_backward relu_backward
                sigmoid_backward softplus_backward swish_backward tanh_backward
                """,
                "`g.pointwise_backward(mode, dy, x)`, where the mode is that of the function: "
                "`PointwiseMode.GELU_TANH` and the like",
            ),
        ),
    ),
    (
        "Building and running",
        (
            Row(_HERE, "tensor tensor_like", "`g.input(name, dims, dtype)`"),
            Row(_HERE, "tensor_scalar", "A number in an expression"),
            Row(
                _NEEDLESS,
                "validate build_operation_graph",
                "Each call checks its arguments, and raises `InvalidRequest`",
            ),
            Row(
                _HERE,
                "build build_plans check_support",
                "`g.build(outputs)` makes the graph, `gpu.warm(graph)` its plan; `UnsupportedGraph` says "
                "that there is none",
            ),
            Row(_HERE, "execute", "`gpu.apply(graph, buffers)`, `RunGraph`"),
            Row(
                _HERE,
                "inspect nodes tensors find_tensor get_node get_inputs get_outputs",
                "`Graph.inputs`, `Graph.outputs`, `Graph.to_json`, `Graph.to_svg`",
            ),
            Row(
                _HERE,
                "context",
                "Dtypes belong to tensors: see [where values are rounded](graphs.md#building). The "
                "compute type follows from them; `g.matmul(a, b, compute_dtype='float64')` asks for more: "
                "[compute types](cudnn.md#compute-types)",
            ),
            Row(_HERE, "key", "`Graph.digest`"),
            Row(
                _HERE,
                "serialize deserialize",
                "`spawn(plan_store=path)` keeps plans on disk; `Graph.to_json` and `Graph.from_json` are of "
                "graphs",
            ),
            Row(
                _HERE,
                "get_workspace_size plans selected_engine get_behavior_notes",
                "`gpu.explain(graph)`: `Explanation.workspace`, `Explanation.pieces`. `gpu.plans(graph)` has "
                "the notes",
            ),
            Row(
                _HERE,
                "deselect_workspace_greater_than",
                "`spawn(workspace_limit=limit)`",
            ),
            Row(
                _HERE,
                "select_numeric_notes deselect_numeric_notes",
                "`Numerics(tf32=True, deterministic=True)`, of each operation",
            ),
            Row(
                _HERE,
                """
                create_execution_plans backend_plan_entries get_execution_plan_count get_plan_name_at_index
                get_workspace_size_plan_at_index get_engine_and_knobs_at_index
                get_behavior_notes_for_plan_at_index
                """,
                "`gpu.plans(graph)`: the names, engines, knobs and notes of candidates; after tuning their "
                "workspaces and times, too",
            ),
            Row(
                _HERE,
                "create_execution_plan build_plan_at_index execute_plan_at_index select_plan",
                "`Numerics(prefer=('eng45_k2=5',))`, of a message or a graph",
            ),
            Row(_HERE, "deselect_engines", "`Numerics(exclude=('eng45',))`, of a message or a graph"),
            Row(
                _NO,
                "select_behavior_notes deselect_behavior_notes",
                "The service chooses; `gpu.plans(graph)` has the notes",
            ),
            Row(
                _NO,
                "populate_cuda_graph update_cuda_graph get_cuda_graph_retention",
                "A model is captured in CUDA graphs by the service: `gpu.load(model)`, `DeployModel`",
            ),
        ),
    ),
)
"""All public names of `cudnn.pygraph`, by the sections of the page."""
