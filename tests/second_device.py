"""A GPU for tests on machines that have none: a second device whose tensors must not meet those of the CPU.

    with SecondDevice():
        x = torch.zeros(3, device="meta")
        x + 1                 # works, with numbers
        x + torch.ones(3)     # RuntimeError, as it would be on "cuda"

Tensors of torch's device "meta" have a shape and no memory. Here each operation on them is computed on the CPU, in
memory that belongs to the meta tensor's storage, so that views and writes through them work as they do anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
COPIES = {"aten::copy_", "aten::_to_copy"}  # between devices
INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}  # the second argument may lie on the CPU


def is_there(x: Any) -> bool:
    """Whether x is a tensor of the second device."""
    return isinstance(x, torch.Tensor) and x.device == META


class SecondDevice:
    """Lends meta tensors numbers, and raises RuntimeError where devices are mixed; everything else is as without it.

    `operations` counts what has been computed on the second device.
    """

    def __init__(self) -> None:
        self._modes = _Operations(), _Constructors()

    @property
    def operations(self) -> int:
        return self._modes[0].count

    def __enter__(self) -> SecondDevice:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Operations(TorchDispatchMode):
    """Every operation, as it reaches the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.memory: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}  # of the storages, by their addresses
        self.forget_at = 100

    def numbers(self, x: torch.Tensor) -> torch.Tensor:
        """The CPU tensor behind a tensor of the second device: same shape and strides, same memory each time."""
        _, memory = self.memory[x.untyped_storage()._cdata]
        behind = torch.empty(0, dtype=x.dtype)
        return behind.set_(memory.untyped_storage(), x.storage_offset(), x.size(), x.stride())  # type: ignore[no-any-return]

    def move_there(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor of the second device with the numbers of a CPU tensor."""
        if len(self.memory) > self.forget_at:
            self.memory = {key: pair for key, pair in self.memory.items() if not pair[0].expired()}
            self.forget_at = 2 * len(self.memory) + 100
        there = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=META)
        storage = there.untyped_storage()
        self.memory[storage._cdata] = StorageWeakRef(storage), torch.zeros(storage.nbytes(), dtype=torch.uint8)
        self.numbers(there).copy_(x)
        return there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, leaves, device = func._schema.name, tree_leaves((args, kwargs)), kwargs.get("device")
        target = torch.device(device) if device is not None else None
        if not any(map(is_there, leaves)) and target != META:
            return func(*args, **kwargs)
        operands = tree_leaves((args[0], args[2:])) if name in INDEXING else leaves
        here = [tuple(x.shape) for x in operands if isinstance(x, torch.Tensor) and not is_there(x) and x.dim() > 0]
        if here and name not in COPIES:
            raise RuntimeError(f"{name} mixes tensors of the second device with the CPU's, of shapes {here}.")
        self.count += 1
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        on_cpu = tree_map(lambda x: self.numbers(x) if is_there(x) else x, (args, kwargs))
        result = func(*on_cpu[0], **on_cpu[1])
        if func._schema.is_mutable:
            return None if result is None else kwargs.get("out", args[0])
        if target is not None and target != META:
            return result.clone()  # _to_copy to the CPU
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return func(*args, **kwargs)  # a view, of the same storage
        return tree_map(lambda x: self.move_there(x) if isinstance(x, torch.Tensor) else x, result)


class _Constructors(TorchFunctionMode):
    """What torch does for meta tensors without an operation, since they are empty: filling them from data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == META:
            return func(*args, **kwargs | {"device": "cpu"}).to(META)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[1], tuple):
            index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in args[1])
            args = args[0], index, *args[2:]
        return func(*args, **kwargs)
