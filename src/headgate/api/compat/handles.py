"""CUDA handles of vLLM's, SkyRL's and SGLang's trainers, as parts of an update.

These trainers pickle the arguments with which torch opens another process's GPU memory (`rebuild_cuda_tensor`): numbers,
texts and bytes. They are read with `headgate.pickled`, which builds nothing; whatever else a pickle has is refused by name.
The engine opens the memory itself, after it has verified what the handles declare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.errors import RequestError
from headgate.pickled import Call, Name, NotPlain, decode_base64, read_pickle
from headgate.protocol.command import Part, SharedMemorySource, SharedOnGpus, SharedStorage, SharedTensor, TensorSpec

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
REBUILD = {
    "torch.multiprocessing.reductions.rebuild_cuda_tensor",
    "sglang.srt.utils.patch_torch._rebuild_cuda_tensor_modified",  # has the UUID of the GPU instead of its number
    "sglang.srt.patch_torch._rebuild_cuda_tensor_modified",
}
METADATA = "sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata"
NAMES = frozenset(
    {
        *REBUILD,
        METADATA,
        *("torch.Size", "torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"),
        *("torch.storage.UntypedStorage", "torch.storage.TypedStorage"),
        *(f"torch.{dtype}" for dtype in ITEM_BYTES),
    }
)


@dataclass(frozen=True, slots=True)
class CudaTensor:
    """A contiguous tensor in the GPU memory of another process. `gpu` is "" if only the trainer's number of it is known."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the storage
    storage: SharedStorage
    gpu: str

    def named(self, name: str, storage: int) -> SharedTensor:
        return SharedTensor(name, self.dtype, self.shape, storage, self.start)


def vllm_part(pickled: str, tensors: Sequence[TensorSpec], param: str) -> Part:
    """The part in `ipc_handles_pickled`: a list with handles for each tensor, or handles of one buffer of all tensors.

    Handles are a dict from the UUID of a GPU to the arguments for it; SkyRL puts the function before them.
    """
    try:
        match _read(pickled):
            case list(each):
                return _on_gpus(_per_tensor(each, tensors))
            case dict(handles):
                return _on_gpus({gpu: _packed(tensor, tensors) for gpu, tensor in _of_gpus(handles).items()})
        raise NotPlain("there is neither a list nor a dict of handles")
    except NotPlain as error:
        raise _refused(error, param) from error


def sglang_part(serialized: Sequence[str], flattened: bool, param: str) -> Part:
    """The part in `serialized_named_tensors`, which has one entry per GPU."""
    if not serialized:
        raise RequestError("there are no tensors", param=param)
    try:
        sources = [_bucket(_read(each)) if flattened else _named(_read(each)) for each in serialized]
    except NotPlain as error:
        raise _refused(error, param) from error
    if len(sources) > 1 and not all(source.gpu for source in sources):
        raise RequestError("handles for several GPUs must have their UUIDs", param=param)
    return sources[0] if len(sources) == 1 else SharedOnGpus(tuple(sources))


def _read(text: str) -> Any:
    return read_pickle(decode_base64(text), NAMES)


def _refused(error: NotPlain, param: str) -> RequestError:
    message = f"the handles cannot be read, and pickled objects are never loaded: {error}"
    return RequestError(message, param=param, code="unsupported_transfer")


# ------------------------------------------------------------------------------------------------------- vLLM, SkyRL


def _of_gpus(handles: Any) -> dict[str, CudaTensor]:
    if not isinstance(handles, dict) or not handles or not all(isinstance(gpu, str) for gpu in handles):
        raise NotPlain("handles must be a dict with the UUID of each GPU")
    return {gpu: _tensor(_arguments(each), gpu) for gpu, each in handles.items()}


def _arguments(value: Any) -> Any:
    match value:
        case (Name(text=function), tuple(arguments)) if function in REBUILD:
            return arguments
    return value


def _per_tensor(handles: list[Any], tensors: Sequence[TensorSpec]) -> dict[str, SharedMemorySource]:
    if len(handles) != len(tensors):
        raise NotPlain(f"there are {len(handles)} handles for {len(tensors)} tensors")
    found = [_of_gpus(each) for each in handles]
    gpus = found[0].keys() if found else set()
    if any(each.keys() != gpus for each in found):
        raise NotPlain("the tensors are on different GPUs")
    return {gpu: _source(gpu, tensors, [each[gpu] for each in found]) for gpu in gpus}


def _source(gpu: str, tensors: Sequence[TensorSpec], found: Sequence[CudaTensor]) -> SharedMemorySource:
    for spec, tensor in zip(tensors, found, strict=True):
        if (spec.shape, spec.dtype.removeprefix("torch.")) != (tensor.shape, tensor.dtype):
            raise NotPlain(
                f"tensor {spec.name} is announced as {spec.dtype} {list(spec.shape)}, and its handle differs"
            )
    named = (tensor.named(spec.name, i) for i, (spec, tensor) in enumerate(zip(tensors, found, strict=True)))
    return SharedMemorySource(gpu, tuple(tensor.storage for tensor in found), tuple(named))


def _packed(buffer: CudaTensor, tensors: Sequence[TensorSpec]) -> SharedMemorySource:
    """The tensors in one buffer, without gaps."""
    return SharedMemorySource(buffer.gpu, (buffer.storage,), tuple(_placed(buffer, tensors)))


def _placed(buffer: CudaTensor, tensors: Sequence[TensorSpec]) -> Iterator[SharedTensor]:
    start = buffer.start
    for spec in tensors:
        dtype = spec.dtype.removeprefix("torch.")
        yield SharedTensor(spec.name, dtype, spec.shape, 0, start)
        start += math.prod(spec.shape) * _item_bytes(dtype)


def _on_gpus(sources: dict[str, SharedMemorySource]) -> Part:
    if not sources:
        raise NotPlain("there are no tensors")
    each = tuple(sources.values())
    return each[0] if len(each) == 1 else SharedOnGpus(each)


# ------------------------------------------------------------------------------------------------------------- SGLang


def _named(value: Any) -> SharedMemorySource:
    """A list of (name, tensor)."""
    if not isinstance(value, list) or not value:
        raise NotPlain("there is no list of named tensors")
    tensors = dict(map(_pair, value))
    gpus = {tensor.gpu for tensor in tensors.values()}
    if len(gpus) != 1:
        raise NotPlain("the tensors are on different GPUs")
    named = (tensor.named(name, index) for index, (name, tensor) in enumerate(tensors.items()))
    return SharedMemorySource(gpus.pop(), tuple(tensor.storage for tensor in tensors.values()), tuple(named))


def _pair(value: Any) -> tuple[str, CudaTensor]:
    match value:
        case (str(name), tensor):
            return name, _built(tensor)
    raise NotPlain("there is no list of named tensors")


def _bucket(value: Any) -> SharedMemorySource:
    """A FlattenedTensorBucket: one tensor of bytes, and the place of each tensor in it."""
    match value:
        case {"flattened_tensor": flat, "metadata": list(entries)}:
            buffer = _built(flat)
            named = tuple(_entry(entry, buffer) for entry in entries)
            return SharedMemorySource(buffer.gpu, (buffer.storage,), named)
    raise NotPlain("there is no flattened bucket")


def _entry(value: Any, buffer: CudaTensor) -> SharedTensor:
    match value:
        case Call(
            function="sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata",
            arguments=(),
            state={"name": str(name), "shape": shape, "dtype": Name(text=dtype), "start_idx": int(first)},
        ):
            start = buffer.start + first * _item_bytes(buffer.dtype)
            return SharedTensor(name, dtype.removeprefix("torch."), _sizes(shape), 0, start)
    raise NotPlain("an entry of the flattened bucket has other fields")


def _built(value: Any) -> CudaTensor:
    match value:
        case Call(function=function, arguments=arguments, state=None) if function in REBUILD:
            return _tensor(arguments, None)
    raise NotPlain("there is something else where a tensor on a GPU should be")


# -------------------------------------------------------------------------------------------------------------- torch


def _tensor(arguments: Any, gpu: str | None) -> CudaTensor:
    """The tensor that `rebuild_cuda_tensor` would build from `arguments`."""
    match arguments:
        case (
            Name(),
            shape,
            strides,
            int(offset),
            Name(),
            Name(text=kind),
            int() | str() as device,
            bytes(handle),
            int(size),
            int(storage_offset),
            bool(),
            bytes(counter),
            int(counter_offset),
            bytes(event),
            bool(event_needed),
        ):
            sizes, dtype = _sizes(shape), kind.removeprefix("torch.")
            if not _contiguous(sizes, _sizes(strides)):
                raise NotPlain("a tensor is not contiguous")
            number, named = (device, "") if isinstance(device, int) else (0, device)
            fields = (number, handle, size, storage_offset, counter, counter_offset, event, event_needed)
            storage = SharedStorage(*fields)
            return CudaTensor(dtype, sizes, offset * _item_bytes(dtype), storage, named if gpu is None else gpu)
    raise NotPlain("the arguments of a tensor are not those of rebuild_cuda_tensor")


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Call) and value.function == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or not all(type(each) is int and each >= 0 for each in value):
        raise NotPlain("a shape is not a tuple of numbers")
    return tuple(value)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(shape) != len(strides):
        return False
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise NotPlain(f"the dtype {dtype:.100} is unknown")
    return ITEM_BYTES[dtype]
