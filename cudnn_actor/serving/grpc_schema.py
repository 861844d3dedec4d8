"""The protocol's messages for gRPC, with the fields that are used here, in a pool of descriptors of their
own.

In the default pool they would clash with another copy of the package `inference`, such as tritonclient's.
Names and numbers are those of
https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto
and fields that are not listed are skipped when a message is read.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

__all__ = ["SERVICE", "message_class"]

_PACKAGE = "inference"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"
_SCHEMA = """
ServerLiveRequest
ServerLiveResponse
    bool live 1
ServerReadyRequest
ServerReadyResponse
    bool ready 1
ModelReadyRequest
    string name 1
    string version 2
ModelReadyResponse
    bool ready 1
ServerMetadataRequest
ServerMetadataResponse
    string name 1
    string version 2
    repeated string extensions 3
ModelMetadataRequest
    string name 1
    string version 2
ModelMetadataResponse
    string name 1
    repeated string versions 2
    string platform 3
    repeated ModelMetadataResponse.TensorMetadata inputs 4
    repeated ModelMetadataResponse.TensorMetadata outputs 5
ModelMetadataResponse.TensorMetadata
    string name 1
    string datatype 2
    repeated int64 shape 3
InferParameter
    parameter_choice bool bool_param 1
    parameter_choice int64 int64_param 2
    parameter_choice string string_param 3
    parameter_choice double double_param 4
    parameter_choice uint64 uint64_param 5
InferTensorContents
    repeated bool bool_contents 1
    repeated int32 int_contents 2
    repeated int64 int64_contents 3
    repeated uint32 uint_contents 4
    repeated uint64 uint64_contents 5
    repeated float fp32_contents 6
    repeated double fp64_contents 7
    repeated bytes bytes_contents 8
ModelInferRequest
    string model_name 1
    string model_version 2
    string id 3
    map InferParameter parameters 4
    repeated ModelInferRequest.InferInputTensor inputs 5
    repeated ModelInferRequest.InferRequestedOutputTensor outputs 6
    repeated bytes raw_input_contents 7
ModelInferRequest.InferInputTensor
    string name 1
    string datatype 2
    repeated int64 shape 3
    map InferParameter parameters 4
    InferTensorContents contents 5
ModelInferRequest.InferRequestedOutputTensor
    string name 1
    map InferParameter parameters 2
ModelInferResponse
    string model_name 1
    string model_version 2
    string id 3
    map InferParameter parameters 4
    repeated ModelInferResponse.InferOutputTensor outputs 5
    repeated bytes raw_output_contents 6
ModelInferResponse.InferOutputTensor
    string name 1
    string datatype 2
    repeated int64 shape 3
    map InferParameter parameters 4
ModelStreamInferResponse
    string error_message 1
    ModelInferResponse infer_response 2
ModelConfigRequest
    string name 1
    string version 2
ModelConfigResponse
    ModelConfig config 1
ModelConfig
    string name 1
    string platform 2
    ModelVersionPolicy version_policy 3
    int32 max_batch_size 4
    repeated ModelInput input 5
    repeated ModelOutput output 6
    ModelDynamicBatching dynamic_batching 11
    string backend 17
ModelVersionPolicy
    ModelVersionPolicy.Specific specific 3
ModelVersionPolicy.Specific
    repeated int64 versions 1
ModelDynamicBatching
    repeated int32 preferred_batch_size 1
    uint64 max_queue_delay_microseconds 2
ModelInput
    string name 1
    DataType data_type 2
    repeated int64 dims 4
    bool optional 8
ModelOutput
    string name 1
    DataType data_type 2
    repeated int64 dims 3
ModelStatisticsRequest
    string name 1
    string version 2
ModelStatisticsResponse
    repeated ModelStatistics model_stats 1
ModelStatistics
    string name 1
    string version 2
    uint64 last_inference 3
    uint64 inference_count 4
    uint64 execution_count 5
    InferStatistics inference_stats 6
    repeated InferBatchStatistics batch_stats 7
InferBatchStatistics
    uint64 batch_size 1
    StatisticDuration compute_input 2
    StatisticDuration compute_infer 3
    StatisticDuration compute_output 4
InferStatistics
    StatisticDuration success 1
    StatisticDuration fail 2
    StatisticDuration queue 3
    StatisticDuration compute_input 4
    StatisticDuration compute_infer 5
    StatisticDuration compute_output 6
    StatisticDuration cache_hit 7
    StatisticDuration cache_miss 8
StatisticDuration
    uint64 count 1
    uint64 ns 2
ModelRepositoryParameter
    parameter_choice bool bool_param 1
    parameter_choice int64 int64_param 2
    parameter_choice string string_param 3
    parameter_choice bytes bytes_param 4
RepositoryIndexRequest
    string repository_name 1
    bool ready 2
RepositoryIndexResponse
    repeated RepositoryIndexResponse.ModelIndex models 1
RepositoryIndexResponse.ModelIndex
    string name 1
    string version 2
    string state 3
    string reason 4
RepositoryModelLoadRequest
    string repository_name 1
    string model_name 2
    map ModelRepositoryParameter parameters 3
RepositoryModelLoadResponse
RepositoryModelUnloadRequest
    string repository_name 1
    string model_name 2
    map ModelRepositoryParameter parameters 3
RepositoryModelUnloadResponse
SystemSharedMemoryStatusRequest
    string name 1
SystemSharedMemoryStatusResponse
    map SystemSharedMemoryStatusResponse.RegionStatus regions 1
SystemSharedMemoryStatusResponse.RegionStatus
    string name 1
    string key 2
    uint64 offset 3
    uint64 byte_size 4
SystemSharedMemoryRegisterRequest
    string name 1
    string key 2
    uint64 offset 3
    uint64 byte_size 4
SystemSharedMemoryRegisterResponse
SystemSharedMemoryUnregisterRequest
    string name 1
SystemSharedMemoryUnregisterResponse
"""
"""The messages, and under each its fields: a label or the name of the field's oneof, if there is one; type,
name and number."""
_DATA_TYPES = (
    *("TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8"),
    *("TYPE_INT16", "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING"),
    "TYPE_BF16",
)
"""The members of the enum `DataType`, from 0 on."""
_SCALARS = ("bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes")
_STRING, _MESSAGE = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_MESSAGE
_OPTIONAL, _REPEATED = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED


def message_class(name: str) -> Any:
    """The class of a message of the protocol, by its name."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def _pool() -> descriptor_pool.DescriptorPool:
    file = FileDescriptorProto(name="cudnn_actor/inference.proto", package=_PACKAGE, syntax="proto3")
    kinds = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        kinds.value.add(name=name, number=number)
    messages: dict[str, DescriptorProto] = {}
    message: DescriptorProto | None = None
    for line in filter(None, _SCHEMA.splitlines()):
        if not line.startswith(" "):
            outer, _, inner = line.rpartition(".")
            owner = messages[outer].nested_type if outer else file.message_type
            message = messages[line] = owner.add(name=inner)
        else:
            assert message is not None
            _add_field(message, line.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call, unused-ignore]
    return pool


def _add_field(message: DescriptorProto, words: list[str]) -> None:
    label, kind, name, number = words if len(words) == 4 else ["", *words]
    field = message.field.add(name=name, number=int(number), label=_OPTIONAL)
    if label == "map":  # by convention, a map is a repeated message of a key and a value
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_OPTIONAL, type=_STRING)
        value = entry.field.add(name="value", number=2, label=_OPTIONAL)
        _set_type(value, kind)
        field.label, field.type = _REPEATED, _MESSAGE
        field.type_name = entry.name
        return
    _set_type(field, kind)
    if label == "repeated":
        field.label = _REPEATED
    elif label:
        if not message.oneof_decl:
            message.oneof_decl.add(name=label)
        field.oneof_index = 0


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}")
        return
    field.type = FieldDescriptorProto.TYPE_ENUM if kind == "DataType" else _MESSAGE
    field.type_name = f".{_PACKAGE}.{kind}"


_POOL = _pool()
