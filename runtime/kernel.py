"""A compiled library becomes something that takes torch tensors: the ctypes side of the kernels' C interface."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..gen.errors import BwdtuneError
from ..gen.problem import BIAS, CAUSAL, FLAGS, FULL, UNLIMITED, WINDOW
from .features import PLAIN, Features

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BIAS_DTYPES = {**TORCH_DTYPES, "fp32": torch.float32}

_ABI_VERSION = 6
_MASKS = (FULL, CAUSAL, WINDOW)  # in the order of their numbers in the C interface
_ALIGNMENT_BYTES = 16  # of TMA: bases and strides
_STRIDE_LIMIT_BYTES = 2**40  # of TMA


class KernelError(BwdtuneError):
    """A library that is not a kernel, tensors that it does not take, or a launch that failed."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride_batch", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
        ("stride_seqlen", ctypes.c_int64),
    ]


_INPUTS = ("q", "o", "dout", "k", "v")
_OUTPUTS = ("dq", "dk", "dv")


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_int64),
        *((name, _Tensor) for name in (*_INPUTS, *_OUTPUTS)),
        ("lse", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("heads_q", ctypes.c_int64),
        ("heads_kv", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_kv", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("device", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_kv", ctypes.c_void_p),
        ("positions_q", ctypes.c_int64),
        ("positions_kv", ctypes.c_int64),
        ("softcap", ctypes.c_float),
        ("reserved", ctypes.c_int32),
        ("dlse", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("dsink", ctypes.c_void_p),
        ("bias", _Tensor),
        ("dbias", _Tensor),
        ("alibi_slopes", ctypes.c_void_p),
        ("alibi_batch_stride", ctypes.c_int64),
    ]


class _Info(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_int64),
        ("abi_version", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("head_dim_v", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        *((flag, ctypes.c_int32) for flag in FLAGS),
        ("writes_all_rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_memory_bytes", ctypes.c_int64),
        ("dtype", ctypes.c_char_p),
        ("config", ctypes.c_char_p),
        *((name, ctypes.c_char_p) for name in BIAS),
    ]


@dataclass(frozen=True)
class KernelInfo:
    """What a library says of itself.

    Attributes:
        dtype: ``bf16`` or ``fp16``.
        head_dim: D, of q and k.
        head_dim_v: Of v and o.
        mask: ``full``, ``causal`` or ``window``.
        bottom_right: Where the mask is aligned: see `gen.problem.Problem`.
        softcap: Whether scores are capped.
        varlen: Whether it takes `Sequences`.
        deterministic: Whether its gradients are the same bits at each call.
        lse_grad: Whether it takes a gradient of the log-sum-exp.
        sink: Whether it takes sinks, and gives their gradient.
        alibi: Whether it takes ALiBi slopes.
        bias_grad: Whether it gives the gradient of a bias.
        bias: Which bias it takes: `gen.problem.Problem.bias`.
        bias_dtype: The bias' dtype.
        writes_all_rows: Whether keys that belong to no packed sequence get gradients of zero; else they get none.
        config: The configuration's id.
        threads: Threads of a block of the main kernel.
        shared_memory_bytes: Dynamic shared memory of a block.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    bottom_right: bool
    softcap: bool
    varlen: bool
    deterministic: bool
    lse_grad: bool
    sink: bool
    alibi: bool
    bias_grad: bool
    bias: str
    bias_dtype: str
    writes_all_rows: bool
    config: str
    threads: int
    shared_memory_bytes: int


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch with all of its arguments set, so that a timed region holds nothing but the C call.

    Attributes:
        arguments: The struct that the library is given.
        tensors: What its pointers point to, the workspace last; held so that it lives as long as the launch may be
            repeated.
        probe: The bytes of the workspace where a kernel that counts its cycles leaves them; None for any other.
    """

    arguments: _Arguments
    tensors: tuple[torch.Tensor, ...]
    call: Callable[[_Arguments], None]
    probe: slice | None = None

    def __call__(self) -> None:
        """Launches on the stream that was current when the launch was prepared; asynchronous.

        Raises:
            KernelError: The library refused its arguments or the launch failed.
        """
        self.call(self.arguments)

    def cycles(self) -> int:
        """How long the last launch's main kernel took on the SM that it took longest on, by that SM's own clock.

        From the first start of a block to the last end of one. Waits for the launch. Of kernels that count them alone,
        and until another one has used the workspace.
        """
        assert self.probe, "this kernel is not built to count its cycles"
        start, end = self.tensors[-1][self.probe].view(torch.int64).view(-1, 2).cpu().unbind(1)
        return int((end - start)[end > 0].max())


class Kernel:
    """One compiled backward: a kind of problem (`gen.problem.Problem.kernel_spec`) and a configuration, at any sizes.

    Safe between threads, under CUDA graph capture and after a fork: it holds nothing but function pointers.

    A kernel of the arch ``host`` is watched: an access of global memory outside of what it was given, or a write to
    what it was given to read, makes the launch fail.
    """

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        """Use `load`."""
        self.path = path
        self._backward = library.bwdtune_backward
        self._backward.restype = ctypes.c_int
        self._backward.argtypes = [ctypes.POINTER(_Arguments)]
        self._workspace_bytes = library.bwdtune_workspace_bytes
        self._workspace_bytes.restype = ctypes.c_int64
        self._workspace_bytes.argtypes = [ctypes.POINTER(_Arguments)]
        self._error_text = library.bwdtune_error_text
        self._error_text.restype = ctypes.c_char_p
        self._error_text.argtypes = [ctypes.c_int]
        self._probe_offset = getattr(library, "bwdtune_probe_offset", None)
        if self._probe_offset is not None:
            self._probe_offset.restype = ctypes.c_int64
            self._probe_offset.argtypes = [ctypes.POINTER(_Arguments)]
        self._register = getattr(library, "bwdtune_host_register", None)
        if self._register is not None:
            self._register.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
            self._clear = library.bwdtune_host_clear
            self._clear.restype = None
        get_info = library.bwdtune_get_info
        get_info.restype = ctypes.c_int
        get_info.argtypes = [ctypes.POINTER(_Info)]
        info = _Info(struct_bytes=ctypes.sizeof(_Info))
        if get_info(ctypes.byref(info)) or info.abi_version != _ABI_VERSION:
            raise KernelError(
                f"{path} has version {info.abi_version} of the kernel interface, not {_ABI_VERSION}: compile it again"
            )
        features: dict[str, Any] = {flag: bool(getattr(info, flag)) for flag in FLAGS}
        features |= {name: getattr(info, name).decode() for name in BIAS}
        self.info = KernelInfo(
            dtype=info.dtype.decode(),
            head_dim=info.head_dim,
            head_dim_v=info.head_dim_v,
            mask=_MASKS[info.mask],
            **features,
            writes_all_rows=bool(info.writes_all_rows),
            config=info.config.decode(),
            threads=info.threads,
            shared_memory_bytes=info.shared_memory_bytes,
        )

    @classmethod
    def load(cls, library: Path) -> Kernel:
        """Loads a shared library that `gen.build` made.

        Raises:
            KernelError: It cannot be loaded, or it is no kernel of this version.
        """
        try:
            return cls(ctypes.CDLL(str(library)), library)
        except (OSError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise KernelError(f"cannot load the kernel {library}: {reason}") from error

    def addresses(self) -> tuple[int | None, ...]:
        """Where the library's functions are, for callers in C++ (`runtime.operator.native`).

        Returns:
            Of ``bwdtune_backward``, ``bwdtune_workspace_bytes`` and ``bwdtune_error_text``, and of the two functions by
            which a kernel of the arch ``host`` is told the memory that it may access; None where it has none.
        """
        watched = (None, None) if self._register is None else (self._register, self._clear)
        functions = (self._backward, self._workspace_bytes, self._error_text, *watched)
        return tuple(function and ctypes.cast(function, ctypes.c_void_p).value for function in functions)

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        *,
        scale: float,
        features: Features = PLAIN,
        workspace: torch.Tensor | None = None,
        dlse: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        dsink: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dbias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> Launch:
        """Checks the tensors and sets up a launch on their device's current stream.

        Args:
            q: (B, Hq, Sq, D) with any strides; inputs that TMA cannot address are copied once, here.
            k: (B, Hkv, Skv, D).
            v: (B, Hkv, Skv, Dv).
            o: (B, Hq, Sq, Dv), the forward's output.
            dout: (B, Hq, Sq, Dv), its gradient.
            lse: (B, Hq, Sq), fp32, natural logarithm.
            dq: Written; as q. Outputs must be addressable as they are.
            dk: Written; as k.
            dv: Written; as v.
            scale: The softmax scale, positive.
            features: What else this kernel needs to know. With `Features.sequences` B is 1 here, and S counts the rows
                of all of them.
            workspace: At least `workspace_bytes` bytes, uint8, 16-byte aligned; allocated where it is missing.
            dlse: The gradient of the log-sum-exp, as `lse`; of kernels that take one.
            sink: (Hq), fp32, which `o` and `lse` count; of kernels that take sinks.
            dsink: Written; (Hq), fp32, contiguous.
            bias: (B or 1, Hq or 1, Sq or 1, Skv), with ones where the bias is broadcast that this kernel takes, and of
                that bias' dtype; any strides whose last is 1.
            dbias: Written; of the same shape and dtype, contiguous.
            alibi_slopes: (Hq), or (B, Hq) with B the number of sequences where they are packed; fp32, of kernels that
                take them.

        Raises:
            KernelError: A shape, dtype, device or layout that this kernel does not take.
        """
        self._check(q, k, v, o, dout, lse, dq, dk, dv)
        self._check_row_features(q, dlse, sink, dsink)
        self._check_biases(q, k, features, bias, dbias, alibi_slopes)
        if not 0 < scale < math.inf:  # a masked score is minus infinity before it is scaled
            raise KernelError(f"scale is {scale}: it must be positive")
        self._check_features(features, q.device)
        lse = lse.contiguous()
        arguments = _Arguments(
            struct_bytes=ctypes.sizeof(_Arguments),
            lse=lse.data_ptr(),
            batch=q.shape[0],
            heads_q=q.shape[1],
            heads_kv=k.shape[1],
            seqlen_q=q.shape[2],
            seqlen_kv=k.shape[2],
            scale=scale,
            device=q.device.index or 0,
            stream=torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else None,
            window_left=features.window[0],
            window_right=features.window[1],
            softcap=features.softcap,
            positions_q=q.shape[2],
            positions_kv=k.shape[2],
        )
        held = {"lse": lse}
        for name, given in (("dlse", dlse), ("sink", sink), ("dsink", dsink)):
            if given is not None:
                held[name] = given.contiguous()
                setattr(arguments, name, held[name].data_ptr())
        for name, given in (("bias", bias), ("dbias", dbias)):
            if given is not None:
                held[name] = given
                setattr(arguments, name, _Tensor(given.data_ptr(), *_broadcast_strides(given)))
        if alibi_slopes is not None:
            held["alibi_slopes"] = alibi_slopes.contiguous()
            arguments.alibi_slopes = held["alibi_slopes"].data_ptr()
            arguments.alibi_batch_stride = q.shape[1] if alibi_slopes.dim() == 2 else 0
        for name, tensor in zip(_INPUTS, (q, o, dout, k, v), strict=True):
            described = _describe(tensor)
            if described is None:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                described = _describe(tensor)
            setattr(arguments, name, described)
            held[name] = tensor
        for name, tensor in zip(_OUTPUTS, (dq, dk, dv), strict=True):
            described = _describe(tensor)
            if described is None:
                raise KernelError(f"{name} has strides {tensor.stride()}: a kernel cannot write to that layout")
            setattr(arguments, name, described)
            held[name] = tensor
        if sequences := features.sequences:
            held["cu_seqlens_q"] = sequences.cu_seqlens_q.contiguous()
            held["cu_seqlens_kv"] = sequences.cu_seqlens_kv.contiguous()
            arguments.cu_seqlens_q = held["cu_seqlens_q"].data_ptr()
            arguments.cu_seqlens_kv = held["cu_seqlens_kv"].data_ptr()
            arguments.batch = sequences.count
            arguments.seqlen_q, arguments.seqlen_kv = sequences.seqlen_q, sequences.seqlen_kv
        needed = self._workspace_bytes(ctypes.byref(arguments))
        if needed < 0:
            raise KernelError(f"{self.info.config}: {self._text(needed)}")
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=q.device)
        elif workspace.numel() < needed or workspace.device != q.device or workspace.data_ptr() % _ALIGNMENT_BYTES:
            raise KernelError(f"the workspace must hold {needed} bytes, 16-byte aligned, on {q.device}")
        arguments.workspace = workspace.data_ptr()
        arguments.workspace_bytes = workspace.numel()
        held["workspace"] = workspace
        probe = slice(self._probe_offset(ctypes.byref(arguments)), needed) if self._probe_offset else None
        call = self._launch if self._register is None else functools.partial(self._launch_watched, held)
        return Launch(arguments, tuple(held.values()), call, probe)

    @property
    def counts_cycles(self) -> bool:
        """Whether it is a build that counts its cycles."""
        return self._probe_offset is not None

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        *,
        scale: float,
        features: Features = PLAIN,
        workspace: torch.Tensor | None = None,
        dlse: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        dsink: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dbias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        """Computes dq, dk and dv on the current stream, dsink and dbias; asynchronous. See `prepare`."""
        options: dict[str, Any] = {"features": features, "workspace": workspace}
        options |= {"dlse": dlse, "sink": sink, "dsink": dsink}
        options |= {"bias": bias, "dbias": dbias, "alibi_slopes": alibi_slopes}
        self.prepare(q, k, v, o, dout, lse, dq, dk, dv, scale=scale, **options)()

    def workspace_bytes(
        self,
        batch: int,
        heads_q: int,
        heads_kv: int,
        seqlen_q: int,
        seqlen_kv: int,
        positions: tuple[int, int] | None = None,
    ) -> int:
        """Bytes of scratch memory that a launch at these sizes needs, on the current device.

        Args:
            batch: B; with packed sequences their number.
            heads_q: Hq.
            heads_kv: Hkv.
            seqlen_q: Sq; with packed sequences the longest one's length.
            seqlen_kv: Skv.
            positions: With packed sequences: rows of q, and of k, in all.

        Raises:
            KernelError: The kernel does not take these sizes.
        """
        positions_q, positions_kv = positions or (seqlen_q, seqlen_kv)
        arguments = _Arguments(
            struct_bytes=ctypes.sizeof(_Arguments),
            batch=batch,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            window_left=UNLIMITED,
            window_right=UNLIMITED,
            positions_q=positions_q,
            positions_kv=positions_kv,
            device=torch.cuda.current_device() if self._register is None and torch.cuda.is_available() else 0,
        )
        needed: int = self._workspace_bytes(ctypes.byref(arguments))
        if needed < 0:
            raise KernelError(f"{self.info.config}: {self._text(needed)}")
        return needed

    def _launch(self, arguments: _Arguments) -> None:
        code = self._backward(ctypes.byref(arguments))
        if code:
            raise KernelError(f"{self.info.config}: {self._text(code)}")

    def _launch_watched(self, held: Mapping[str, torch.Tensor], arguments: _Arguments) -> None:
        """On the host target: global memory is what is held, and only the outputs and the workspace may be written."""
        assert self._register
        try:
            for name, tensor in held.items():
                writable = name in (*_OUTPUTS, "dsink", "dbias", "workspace")
                self._register(name.encode(), tensor.data_ptr(), _extent_bytes(tensor), writable)
            self._launch(arguments)
        finally:
            self._clear()

    def _text(self, code: int) -> str:
        return (self._error_text(code) or b"unknown error").decode(errors="replace")

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> None:
        o, dout, lse, dq, dk, dv = rest
        if q.dim() != 4 or k.dim() != 4:
            raise KernelError(f"q has {q.dim()} and k {k.dim()} dimensions: both need 4, (B, H, S, D)")
        batch, heads_q, _, head_dim = q.shape
        if head_dim != self.info.head_dim:
            raise KernelError(f"head_dim is {head_dim}: this kernel was compiled for {self.info.head_dim}")
        if k.shape[0] != batch or k.shape[3] != head_dim or not k.shape[1] or heads_q % k.shape[1]:
            raise KernelError(f"q of shape {tuple(q.shape)} does not go with k of shape {tuple(k.shape)}")
        dtype = TORCH_DTYPES[self.info.dtype]
        named = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
        for name, tensor in named.items():
            *sizes, columns = k.shape if name in ("k", "v", "dk", "dv") else q.shape
            shape = (*sizes, self.info.head_dim_v if name in ("v", "o", "dout", "dv") else columns)
            if tensor.shape != shape:
                raise KernelError(f"{name} has shape {tuple(tensor.shape)}: it must be {shape}")
            if tensor.dtype != dtype:
                raise KernelError(f"{name} is {tensor.dtype}: this kernel was compiled for {dtype}")
            if tensor.device != q.device:
                raise KernelError(f"{name} is on {tensor.device} and q on {q.device}: they must share a device")
        if lse.shape != q.shape[:3] or lse.dtype != torch.float32 or lse.device != q.device:
            raise KernelError(f"lse must be float32 of shape {tuple(q.shape[:3])} on {q.device}")

    def _check_row_features(self, q: torch.Tensor, *given: torch.Tensor | None) -> None:
        info, rows, heads = self.info, q.shape[:3], q.shape[1:2]
        needed = (("dlse", info.lse_grad, rows), ("sink", info.sink, heads), ("dsink", info.sink, heads))
        for (name, needs, shape), tensor in zip(needed, given, strict=True):
            if (tensor is not None) != needs:
                raise KernelError(f"{name} is {'missing' if needs else 'given, and this kernel has none'}")
            if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (shape, torch.float32, q.device):
                raise KernelError(f"{name} must be float32 of shape {tuple(shape)} on {q.device}")

    def _check_biases(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        features: Features,
        bias: torch.Tensor | None,
        dbias: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> None:
        info = self.info
        needed = {"bias": bool(info.bias), "dbias": info.bias_grad, "alibi_slopes": info.alibi}
        for (name, needs), tensor in zip(needed.items(), (bias, dbias, alibi_slopes), strict=True):
            if (tensor is not None) != needs:
                raise KernelError(f"{name} is {'missing' if needs else 'given, and this kernel has none'}")
            if tensor is not None and tensor.device != q.device:
                raise KernelError(f"{name} is on {tensor.device} and q on {q.device}: they must share a device")
        if bias is not None:
            dtype, sizes = BIAS_DTYPES[info.bias_dtype], (*q.shape[:3], k.shape[2])
            shape = tuple(1 if part == "1" else n for part, n in zip((*info.bias.split("_"), ""), sizes, strict=True))
            for name, tensor in (("bias", bias), ("dbias", bias if dbias is None else dbias)):
                if tensor.shape != shape or tensor.dtype != dtype:
                    raise KernelError(f"{name} must be {dtype} of shape {shape}: this kernel was compiled for that")
            if bias.stride(3) != 1 and bias.shape[3] != 1:
                raise KernelError(f"bias has strides {bias.stride()}: the last one must be 1")
            if dbias is not None and not dbias.is_contiguous():
                raise KernelError(f"dbias has strides {dbias.stride()}: it must be contiguous")
        if alibi_slopes is not None:
            batch, heads = features.sequences.count if features.sequences else q.shape[0], q.shape[1]
            if alibi_slopes.shape not in ((heads,), (batch, heads)) or alibi_slopes.dtype != torch.float32:
                raise KernelError(f"alibi_slopes must be float32 of shape {(heads,)} or {(batch, heads)}")

    def _check_features(self, features: Features, device: torch.device) -> None:
        if bool(features.softcap) != self.info.softcap:
            raise KernelError(
                f"softcap is {features.softcap}: this kernel {'needs one' if self.info.softcap else 'has none'}"
            )
        if self.info.mask != WINDOW and features.window != (UNLIMITED, UNLIMITED):
            raise KernelError(f"the window is {features.window}: this kernel's mask is {self.info.mask}")
        if self.info.mask != FULL and features.bottom_right != self.info.bottom_right:
            raise KernelError(
                f"this kernel's mask is aligned {'bottom-right' if self.info.bottom_right else 'top-left'}"
            )
        if (features.sequences is not None) != self.info.varlen:
            raise KernelError(
                f"this kernel takes {'packed sequences only' if self.info.varlen else 'no packed sequences'}"
            )
        if sequences := features.sequences:
            for name in ("cu_seqlens_q", "cu_seqlens_kv"):
                tensor = getattr(sequences, name)
                if tensor.shape != (sequences.count + 1,) or tensor.dtype != torch.int32 or tensor.device != device:
                    raise KernelError(f"{name} must be int32 of shape ({sequences.count + 1},) on {device}")


def backward(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    features: Features = PLAIN,
    *,
    dlse: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of attention, in their inputs' layouts; asynchronous on the device's current stream.

    Args:
        kernel: For the inputs' dtype, head_dims and mask.
        q: (B, Hq, Sq, D), any strides.
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        o: (B, Hq, Sq, Dv).
        dout: (B, Hq, Sq, Dv), any strides, expanded ones too.
        lse: (B, Hq, Sq), fp32, natural logarithm.
        scale: The softmax scale.
        features: See `Kernel.prepare`.
        dlse: (B, Hq, Sq), fp32; zeros where the kernel takes one and there is none.
        sink: (Hq), of any floating dtype.
        bias: See `Kernel.prepare`.
        alibi_slopes: See there.

    Returns:
        dq, dk and dv, with sinks dsink, and of a kernel that gives it dbias, last. A gradient has its input's strides
        where those are dense with a unit last stride, else it is dense in the same order or contiguous, as dbias is.
        Where there are no queries or no keys, all are zero or empty.

    Raises:
        KernelError: A shape, dtype or device that the kernel does not take, or a launch that failed.
    """
    dbias = None
    if kernel.info.bias_grad and bias is not None:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not q.numel() or not k.numel():
        given = (q, k, v, *(tensor for tensor in (sink, dbias) if tensor is not None))
        return tuple(torch.zeros_like(tensor) for tensor in given)
    gradients = _gradient_like(q), _gradient_like(k), _gradient_like(v)
    if not kernel.info.writes_all_rows:
        gradients[1].zero_()
        gradients[2].zero_()
    if dlse is None and kernel.info.lse_grad:
        dlse = torch.zeros_like(lse)
    wide = sink if sink is None else sink.float()
    dsink = wide if wide is None else torch.empty_like(wide, memory_format=torch.contiguous_format)
    options: dict[str, Any] = {"dlse": dlse, "sink": wide, "dsink": dsink}
    options |= {"bias": bias, "dbias": dbias, "alibi_slopes": alibi_slopes}
    kernel.launch(q, k, v, o, dout, lse, *gradients, scale=scale, features=features, **options)
    of_sinks = () if sink is None or dsink is None else (dsink.to(sink.dtype),)
    return (*gradients, *of_sinks, *(() if dbias is None else (dbias,)))


def is_addressable(tensor: torch.Tensor) -> bool:
    """Whether TMA can address a (B, H, S, D) tensor as it lies: unit last stride, base and other strides aligned.

    A stride of zero (an expanded dimension) is not addressable; the stride of a dimension of size one is ignored.
    """
    return _describe(tensor) is not None


def _broadcast_strides(bias: torch.Tensor) -> list[int]:
    """Of the first three dimensions; 0 where there is one element."""
    return [0 if size == 1 else stride for size, stride in zip(bias.shape[:3], bias.stride(), strict=False)]


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first element to the end of its last one; other tensors may lie between."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    gradient = torch.empty_like(tensor)
    return gradient if is_addressable(gradient) else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _describe(tensor: torch.Tensor) -> _Tensor | None:
    """A tensor in the interface's terms; None where it is not addressable."""
    *extents, head_dim = tensor.shape
    *strides, last_stride = tensor.stride()
    pointer, size = tensor.data_ptr(), tensor.element_size()
    if pointer % _ALIGNMENT_BYTES or last_stride != 1:
        return None
    for index, extent in enumerate(extents):
        stride_bytes = strides[index] * size
        if extent == 1:
            # Never multiplied by anything but zero, yet torch allows any value there and TMA does not: a row's length
            # always suits it.
            strides[index] = head_dim
        elif stride_bytes <= 0 or stride_bytes % _ALIGNMENT_BYTES or stride_bytes >= _STRIDE_LIMIT_BYTES:
            return None
    return _Tensor(pointer, *strides)
