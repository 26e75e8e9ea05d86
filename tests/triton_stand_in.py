"""A stand-in for the part of Triton that the fast path uses: its kernels run on the CPU, one program after the other.

It shows that a kernel's indices, masks and sums are right. It says nothing about whether the kernel compiles. A load or
a store that leaves its tensor fails; where the mask is false nothing is read.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_program = [0, 0, 0]


class _Pointer:
    """Into the storage of a tensor, as an offset or a tensor of offsets."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory = memory
        self.offset = offset

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset + more)


def _load(pointer: _Pointer, mask: Any = None, other: float = 0) -> Tensor:
    offsets = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.memory[offsets]
    offsets, mask = torch.broadcast_tensors(offsets, mask)
    loaded = torch.full(offsets.shape, other, dtype=pointer.memory.dtype)
    loaded[mask] = pointer.memory[offsets[mask]]
    return loaded


def _store(pointer: _Pointer, value: Tensor, mask: Any) -> None:
    offsets, mask, value = torch.broadcast_tensors(torch.as_tensor(pointer.offset), mask, value)
    pointer.memory[offsets[mask]] = value[mask].to(pointer.memory.dtype)


class _Kernel:
    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> None:
            given = [
                _Pointer(argument.as_strided((argument.untyped_storage().size() // argument.element_size(),), (1,)), 0)
                if isinstance(argument, Tensor)
                else argument
                for argument in arguments
            ]
            for place in itertools.product(*map(range, grid)):
                _program[: len(place)] = place
                self.function(*given, **constants)

        return launch


def _language() -> ModuleType:
    language = ModuleType("triton.language")
    names: dict[str, Any] = {
        "constexpr": int,
        "float32": torch.float32,
        "int64": torch.int64,
        "program_id": lambda axis: torch.tensor(_program[axis], dtype=torch.int32),
        "arange": lambda first, end: torch.arange(first, end, dtype=torch.int32),
        "load": _load,
        "store": _store,
        "full": lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
        "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        "maximum": torch.maximum,
        "max": lambda value, axis: value.amax(axis),
        "sum": lambda value, axis: value.sum(axis),
        "where": torch.where,
        "exp2": torch.exp2,
        "log2": torch.log2,
        "cdiv": lambda a, b: -(-a // b),
        "dot": lambda a, b, input_precision: a.to(torch.float32) @ b.to(torch.float32),
    }
    for name, value in names.items():
        setattr(language, name, value)
    return language


@contextmanager
def standing_in() -> Iterator[None]:
    """`import triton` finds this instead, while the context lasts."""
    triton = ModuleType("triton")
    triton.jit = _Kernel  # type: ignore[attr-defined]
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    triton.language = _language()  # type: ignore[attr-defined]
    names = ("triton", "triton.language", "gpu_backend.triton_attention")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules["triton"], sys.modules["triton.language"] = triton, triton.language
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
