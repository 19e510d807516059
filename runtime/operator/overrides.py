"""`enable` without C++: where there is no compiler, PyTorch's operators are overridden from Python.

It takes what the C++ side takes (``source/aten.h``, ``source/launch.h``), at some tens of microseconds a call.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from typing import Any

import torch
from torch.library import Library

from ...gen.errors import BwdtuneError
from ...gen.problem import UNLIMITED, Problem, bias_pattern, visible_range
from .. import dispatch, row_features
from ..dispatch import notices
from ..features import Features, Sequences
from ..kernel import BIAS_DTYPES, TORCH_DTYPES, backward
from . import native
from .aten import AtenBackward

Gradients = tuple[torch.Tensor | None, ...]
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_BIAS_DTYPE_NAMES = {dtype: name for name, dtype in BIAS_DTYPES.items()}
_ROW_ALIGNMENT = 16  # elements


class PythonOverrides:
    """Stands in for `native.Native` in `enable`."""

    def __init__(self) -> None:
        self._library = Library("aten", "IMPL")
        self._installed: set[tuple[str, str]] = set()
        self._on = False
        self._launches: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()

    @staticmethod
    def possible() -> bool:
        """Whether this PyTorch hands out the implementation that is to be overridden: since 2.10."""
        return hasattr(torch.library, "get_kernel")

    def install(self, operator: AtenBackward, dispatch_key: str) -> bool:
        """See `native.Native.install`."""
        if (operator.name, dispatch_key) in self._installed:
            return True
        overload = getattr(torch.ops.aten, operator.name).default
        if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), dispatch_key):
            return False
        original = torch.library.get_kernel(overload, dispatch_key)
        names = [argument.name for argument in overload._schema.arguments]

        def implementation(keys: Any, *arguments: Any, **options: Any) -> Any:
            found = self._gradients(operator, dict(zip(names, arguments, strict=False)) | options) if self._on else None
            if found is None:
                return original.call_boxed(keys, *arguments, **options)
            return found[: len(overload._schema.returns)]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the dispatcher, on overriding
            self._library.impl(operator.name, implementation, dispatch_key, with_keyset=True, allow_override=True)
        self._installed.add((operator.name, dispatch_key))
        return True

    def enable(self, on: bool) -> None:
        """See `native.Native.enable`."""
        self._on = on

    def forget(self) -> None:
        """Nothing is remembered here but by dispatch."""

    def launches(self) -> dict[str, int]:
        """See `native.Native.launches`."""
        return dict(self._launches)

    def fallbacks(self) -> dict[str, int]:
        """See `native.Native.fallbacks`."""
        return dict(self._fallbacks)

    def _gradients(self, operator: AtenBackward, given: dict[str, Any]) -> Gradients | None:
        try:
            return self._by_kernel(operator, given)
        except _Declined as declined:
            reason, said = declined.cause, declined.said
        except Exception as error:  # never one in a step
            reason = said = str(error) if isinstance(error, BwdtuneError) else f"{type(error).__name__}: {error}"
        self._fallbacks[reason] += 1
        if said:
            notices.warn_once(said, f"attention has PyTorch's backward: {said}")
        return None

    def _by_kernel(self, operator: AtenBackward, given: dict[str, Any]) -> Gradients:
        dout = given.get("grad_out", given.get("grad_out_"))
        tensors = [dout, *(given[name] for name in ("query", "key", "value", "out"))]
        bias = given.get("attn_bias", given.get("attn_mask"))
        bias_grad = bias is not None and bool(given.get("grad_input_mask", [False])[-1])
        starts: list[Any] = [given.get("cum_seq_q"), given.get("cum_seq_k")]
        for reason, holds in (
            ("no gradient flows into the output", dout is None),
            ("dropout is asked for", given["dropout_p"] != 0),
            ("a mask tensor is given", bias is not None and bias.dtype not in _BIAS_DTYPE_NAMES),
            ("the sequences are those of a nested tensor", starts[0] is not None and not operator.packs),
            ("the dtypes are not all bfloat16 or all float16", tensors[1].dtype not in _DTYPE_NAMES),
            ("head_dim is not a multiple of 8", any(tensor.shape[-1] % 8 for tensor in tensors[1:4])),
            ("the input is empty", not all(tensor.numel() for tensor in tensors[1:4])),
        ):
            if holds:
                raise _Declined(reason, reason)
        sequences = None
        if starts[0] is not None:
            sequences = Sequences(starts[0], starts[1], given["max_q"], given["max_k"])
        as_kernels = _packed if sequences else _heads_first if operator.heads_inside else _same
        dout, q, k, v, out = (as_kernels(tensor) for tensor in tensors)
        scale = given.get("scale")
        scale = q.shape[3] ** -0.5 if scale is None else scale
        if not 0 < scale < math.inf:
            raise _Declined("the scale is not positive", "the scale is not positive")
        keys = sequences.seqlen_kv if sequences else k.shape[2]
        limits = [given.get(f"window_size_{side}") for side in ("left", "right")]
        left, right = (UNLIMITED if limit is None or not 0 <= limit < keys else limit for limit in limits)
        right = 0 if given.get("is_causal") else right
        features = _simplest(q, k, Features((left, right), operator.bottom_right, 0.0, sequences))
        if bias is not None:
            bias = _readable_bias(bias, bias_grad)
        problem = _problem(q, k, v, features, bias, bias_grad)
        device = q.device.type
        if device not in native.DEVICE_TYPES:
            raise _Declined(f"the tensors are on {device}", f"the tensors are on {device}")
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        choice = dispatch.choose(problem, q.device.index or 0, capturing=capturing)
        if choice.kernel is None:
            raise _Declined(choice.cause or choice.reason)
        if choice.kernel.info.mask != "window":
            features = Features(bottom_right=features.bottom_right, sequences=sequences)
        lse = _lse(given["logsumexp"], q, sequences)
        if bias is not None:
            lse = row_features.without_unseen(lse)
        found = backward(choice.kernel, q, k, v, out, dout, lse, scale, features, bias=bias)
        self._launches[choice.kernel.path.stem] += 1
        restored = (as_kernels(gradient, back=True) for gradient in found[:3])
        pairs = zip(restored, tensors[1:4], strict=True)
        laid_out = (_laid_out(gradient, tensor, operator) for gradient, tensor in pairs)
        return (*laid_out, _with_aligned_rows(found[3]) if bias_grad else None)


@functools.cache
def load() -> PythonOverrides:
    """The one of this process."""
    return PythonOverrides()


class _Declined(Exception):
    """PyTorch computes this one.

    Attributes:
        cause: What it is counted by.
        said: What the log is told; empty where dispatch has.
    """

    def __init__(self, cause: str, said: str = "") -> None:
        super().__init__(cause)
        self.cause, self.said = cause, said


def _same(tensor: torch.Tensor, back: bool = False) -> torch.Tensor:
    return tensor


def _heads_first(tensor: torch.Tensor, back: bool = False) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _packed(tensor: torch.Tensor, back: bool = False) -> torch.Tensor:
    return tensor[0].transpose(0, 1) if back else tensor.transpose(0, 1)[None]


def _readable_bias(bias: torch.Tensor, bias_grad: bool) -> torch.Tensor:
    """(B or 1, Hq or 1, Sq or 1, Skv) of one that PyTorch has expanded; a gradient is that of all of its elements."""
    bias = bias[(None,) * (4 - bias.dim())]
    if not bias_grad:
        for dim in range(3):
            bias = bias.narrow(dim, 0, 1) if bias.stride(dim) == 0 and bias.shape[dim] > 1 else bias
    return bias if bias.stride(3) == 1 or bias.shape[3] == 1 else bias.contiguous()


def _with_aligned_rows(gradient: torch.Tensor) -> torch.Tensor:
    """In the strides that PyTorch's meta function promises for the gradient of a bias."""
    keys = gradient.shape[3]
    if not keys % _ROW_ALIGNMENT:
        return gradient
    return torch.nn.functional.pad(gradient, (0, -keys % _ROW_ALIGNMENT))[..., :keys]


def _simplest(q: torch.Tensor, k: torch.Tensor, features: Features) -> Features:
    """The same mask in its simplest terms."""
    (left, right), bottom_right, sequences = features.window, features.bottom_right, features.sequences
    if sequences:
        bottom_right = bottom_right and sequences.cu_seqlens_q is not sequences.cu_seqlens_kv
    else:
        low, high = visible_range(q.shape[2], k.shape[2], left, right, bottom_right)
        left = UNLIMITED if low <= 1 - q.shape[2] else left
        right = UNLIMITED if high >= k.shape[2] - 1 else right
        bottom_right = bottom_right and q.shape[2] != k.shape[2]
    masked = (left, right) != (UNLIMITED, UNLIMITED)
    return Features((left, right), bottom_right and masked, 0.0, sequences)


def _problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    features: Features,
    bias: torch.Tensor | None,
    bias_grad: bool,
) -> Problem:
    sequences, (left, right) = features.sequences, features.window
    batch, lengths = q.shape[0], (q.shape[2], k.shape[2])
    if sequences:
        batch, lengths = sequences.count, (sequences.seqlen_q, sequences.seqlen_kv)
    biased: dict[str, Any] = {}
    if bias is not None:
        pattern = bias_pattern(bias.shape, batch, q.shape[1], *lengths)
        biased = {"bias": pattern, "bias_dtype": _BIAS_DTYPE_NAMES[bias.dtype], "bias_grad": bias_grad}
    return Problem(
        _DTYPE_NAMES[q.dtype],
        batch,
        q.shape[1],
        k.shape[1],
        *lengths,
        q.shape[3],
        window_left=left,
        window_right=right,
        bottom_right=features.bottom_right,
        varlen=sequences is not None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        value_head_dim=v.shape[3],
        **biased,
    )


def _lse(lse: torch.Tensor, q: torch.Tensor, sequences: Sequences | None) -> torch.Tensor:
    """(B, Hq, Sq): cuDNN's has a last dimension of one, the memory-efficient kernel's rows are padded."""
    if sequences:
        return lse[None]
    return (lse.squeeze(3) if lse.dim() == 4 else lse)[:, :, : q.shape[2]]


def _laid_out(gradient: torch.Tensor, tensor: torch.Tensor, operator: AtenBackward) -> torch.Tensor:
    if operator.inside_gradients:
        promised = torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype, device=tensor.device)
    else:
        promised = torch.empty_like(tensor)
    return gradient if gradient.stride() == promised.stride() else promised.copy_(gradient)
