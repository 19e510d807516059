"""A kernel on the host target that is watched."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import torch

from bwdtune.runtime.kernel import Kernel, Launch


class CheckedKernel(Kernel):
    """A kernel whose every access of global memory must lie within its tensors, and whose writes within its outputs."""

    def prepare(self, *tensors: torch.Tensor, **options: Any) -> Launch:
        launch = super().prepare(*tensors, **options)
        *held, scratch = launch.tensors
        written = {tensor.data_ptr() for tensor in (*tensors[-3:], scratch)}  # dq, dk, dv
        library = ctypes.CDLL(str(self.path))

        def call(arguments: Any) -> None:
            for tensor in (*held, scratch):
                extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                place = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(extent * tensor.element_size())
                assert library.bwdtune_host_register(*place, int(tensor.data_ptr() in written)) == 0
            try:
                launch.call(arguments)
            finally:
                library.bwdtune_host_clear()

        return dataclasses.replace(launch, call=call)
