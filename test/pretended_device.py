# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: tensors that compute on the CPU and behave as if they lay on it.

`with pretended_device() as counted:` lets the code believe in CUDA. Mistakes that a GPU would
notice raise: operands on two devices, something made on another GPU, `.numpy()` of a tensor that
lies there, a generator of another device. What a GPU would do is counted: operations (all that
launch a kernel, so no views), uploads, downloads, and synchronisations, where the program waits
for a value or a size.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

MEMORY = 8 << 30  # bytes, free
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
SIZE_FROM_DATA = ("nonzero", "masked_select", "unique", "_unique", "_unique2", "bincount", "equal")
NO_KERNEL = ("_unsafe_view", "lift_fresh", "detach", "alias", "_reshape_alias", "empty")
FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)


@dataclass
class Counted:
    """What the device was asked to do."""

    operations: Counter[str] = field(default_factory=Counter)  # by name
    uploads: list[int] = field(default_factory=list)  # bytes of each
    downloads: list[int] = field(default_factory=list)
    synchronisations: list[str] = field(default_factory=list)  # what waited

    def clear(self) -> None:
        for counts in vars(self).values():
            counts.clear()


_counted = Counted()
_gpu = [0]  # the number of the one in use


class OnDevice(torch.Tensor):
    """A tensor on the pretended device; `inner` holds its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        like = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        kind = {"dtype": inner.dtype, "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **like, **kind)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner.detach()

    device = property(lambda self: torch.device("cuda", _gpu[0]))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            return func._op_dk(COMPOSITE, *args, **kwargs)  # in inference mode it arrives whole
        if torch._C._current_graph_task_id() >= 0:  # zeros that autograd made for a gradient
            args, kwargs = tree_map_only(torch.Tensor, _here, (args, kwargs))
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_" and not (type(args[0]) is type(args[1]) is cls):
            return _transfer(*args[:2])
        _check_devices(name, (args, kwargs))
        _count(func, name, args, kwargs)
        given = tree_map_only(cls, lambda t: t.inner, (args, kwargs))
        result = func(*given[0], **given[1])
        if func._schema.is_mutable and name != "_amp_update_scale_":
            return kwargs.get("out", args[0]) if func._schema.returns else None
        return tree_map_only(torch.Tensor, cls, result)

    def numpy(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy: use .cpu() first")

    def __array__(self, *_, **__):
        return self.numpy()

    def tolist(self):
        _counted.synchronisations.append("tolist")
        return self.inner.tolist()

    def cpu(self, *_, **__) -> torch.Tensor:
        return download(self)

    def to(self, *args, **kwargs):
        device, dtype = _place_and_type(args, kwargs)
        if device is not None and device.type == "cpu":
            return download(self).to(dtype or self.dtype)
        return self if dtype in (None, self.dtype) else super().to(dtype)

    def __reduce_ex__(self, protocol):  # copied or stored
        return OnDevice, (self.inner.clone(),)

    def __deepcopy__(self, memo):
        copied = OnDevice(self.inner.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied


class Upload(torch.autograd.Function):
    """Gradients find their way back, as they do through `.to`."""

    @staticmethod
    def forward(ctx, x):
        return upload(x)

    @staticmethod
    def backward(ctx, gradient):
        return download(gradient)


def upload(x: torch.Tensor) -> OnDevice:
    if isinstance(x, OnDevice):
        return x
    _counted.uploads.append(x.numel() * x.element_size())
    return OnDevice(x.detach().clone())


def download(x: OnDevice) -> torch.Tensor:
    _counted.downloads.append(x.numel() * x.element_size())
    return x.inner.clone()


def _transfer(target, source):
    """`copy_` between devices."""
    if isinstance(target, OnDevice) and not source.dim():  # a number: no more than `fill_`
        _counted.operations["fill_"] += 1
        target.inner.copy_(source)
    elif isinstance(target, OnDevice):
        _counted.uploads.append(source.numel() * source.element_size())
        target.inner.copy_(source)
    else:
        target.copy_(download(source))
    return target


def _here(x: torch.Tensor) -> OnDevice:
    return x if isinstance(x, OnDevice) else OnDevice(x)


def _check_devices(name: str, arguments) -> None:
    for value in tree_flatten(arguments)[0]:
        if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) and value.dim():
            raise RuntimeError(f"{name}: expected all tensors on one device, found cuda:0 and cpu")
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"{name}: expected a 'cuda' device type for generator, found 'cpu'")


def _check_number(device: torch.device) -> None:
    if (device.index or 0) != _gpu[0]:  # without a number it is the first
        raise RuntimeError(f"something was made on {device}, not on cuda:{_gpu[0]}")


def _count(func, name: str, args, kwargs) -> None:
    viewed = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
    if name == "_local_scalar_dense":
        _counted.synchronisations.append("item")
    elif not any(viewed) and not name.startswith(NO_KERNEL):
        _counted.operations[name] += 1
    masks = name in ("index", "index_put_", "index_put") and any(
        i is not None and i.dtype == torch.bool for i in args[1]
    )
    if name in SIZE_FROM_DATA or masks:
        _counted.synchronisations.append("boolean indexing" if masks else name)
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        _counted.synchronisations.append(name)


def _place_and_type(args, kwargs) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and the type that the arguments of `.to` name."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for value in args:
        if isinstance(value, (str, torch.device)):
            device = value
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
    return None if device is None else torch.device(device), dtype


class Believe(TorchFunctionMode):
    """Sends what names `cuda` to the pretended device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            return self._to(func, args, kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        _check_number(torch.device(device))
        given = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if isinstance(given, OnDevice):  # zeros_like and the like
            return func(*args, **{n: v for n, v in kwargs.items() if n != "device"})
        if kwargs.get("generator") is not None:
            raise RuntimeError("expected a 'cuda' device type for generator but found 'cpu'")
        made = func(*args, **{**kwargs, "device": "cpu"})
        if func in FROM_NUMBERS or given is not None:
            return upload(made)
        _counted.operations[func.__name__] += 1
        return OnDevice(made)

    @staticmethod
    def _to(func, args, kwargs):
        x, rest = args[0], args[1:]
        if isinstance(x, OnDevice):
            return x.to(*rest, **kwargs)
        device, dtype = torch.device("cuda"), None
        if func is torch.Tensor.to:
            device, dtype = _place_and_type(rest, kwargs)
        if device is None or device.type != "cuda":
            return func(*args, **kwargs)
        _check_number(device)
        x = x.to(dtype or x.dtype)
        return Upload.apply(x) if x.requires_grad and torch.is_grad_enabled() else upload(x)


@contextmanager
def pretended_device(memory: int = MEMORY, number: int = 0) -> Iterator[Counted]:
    """CUDA, as far as this thread can tell, with so many bytes free on the GPU of this number; no
    other is to be used. Yields what is counted."""
    real = torch.autocast
    pretended = {
        "is_available": lambda: True,
        "device_count": lambda: number + 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda *_: (memory, memory),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
        "is_bf16_supported": lambda *_: True,
        "get_device_properties": lambda *_: SimpleNamespace(name="pretended", total_memory=memory),
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
    }
    replaced = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _counted.clear()
    _gpu[0] = number
    with ExitStack() as stack:
        for name, function in pretended.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        # the arithmetic is the CPU's, whose list of operations in half precision is much the same
        stack.enter_context(patch.object(torch, "autocast", lambda _, **kw: real("cpu", **kw)))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(Believe())
        try:
            yield _counted
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(replaced)
