"""The operators of the namespace ``bwdtune``: their schemas, and what PyTorch has to know of them besides.

Fake implementations, batching rules and flop counts. The implementations proper are C++ (`native`), those of the
forwards that are not PyTorch's own are Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import Library

_MASK = "int window_left, int window_right, bool bottom_right, float softcap"
_MASK_DEFAULTS = "int window_left=-1, int window_right=-1, bool bottom_right=False, float softcap=0.0"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_kv, SymInt max_seqlen_q, SymInt max_seqlen_kv"
_OPTIONS = f"bool is_causal=False, float? scale=None, bool enable_gqa=False, {_MASK_DEFAULTS}, bool? deterministic=None"
_SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv)"
_WITH_SINKS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
_WITH_BIAS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)"

SCHEMAS = (
    f'attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}, str forward="flash", Tensor? sink=None, '
    "Tensor? bias=None, Tensor? alibi_slopes=None) -> (Tensor out, Tensor lse)",
    f"attention_varlen(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_OPTIONS}, "
    'str forward="flash", Tensor? sink=None, Tensor? alibi_slopes=None) -> (Tensor out, Tensor lse)',
    f"backward({_SAVED}, Tensor? seed, Tensor? offset, bool is_causal, float scale, {_MASK}, bool? deterministic, "
    "str forward, Tensor? dlse, Tensor? sink, Tensor? bias, Tensor? alibi_slopes, bool bias_grad) "
    f"-> {_WITH_BIAS}",
    f"backward_varlen({_SAVED}, Tensor? seed, Tensor? offset, {_LENGTHS}, bool is_causal, float scale, {_MASK}, "
    f"bool? deterministic, str forward, Tensor? dlse, Tensor? sink, Tensor? alibi_slopes) -> {_WITH_SINKS}",
    f"forward(Tensor q, Tensor k, Tensor v, bool is_causal, float scale, {_MASK}, str forward, Tensor? bias, "
    "Tensor? alibi_slopes) -> (Tensor out, Tensor lse)",
    f"forward_varlen(Tensor q, Tensor k, Tensor v, {_LENGTHS}, bool is_causal, float scale, {_MASK}, str forward, "
    "Tensor? alibi_slopes) -> (Tensor out, Tensor lse)",
    f"forward_backward({_SAVED}, bool is_causal, float scale, {_MASK}, bool deterministic, str forward, "
    "Tensor? bias, Tensor? alibi_slopes, bool bias_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    f"forward_varlen_backward({_SAVED}, {_LENGTHS}, bool is_causal, float scale, {_MASK}, bool deterministic, "
    f"str forward, Tensor? alibi_slopes) -> {_GRADIENTS}",
    "lse_factors(Tensor dlse, Tensor out) -> (Tensor units, Tensor terms)",
    "sink_gradient(Tensor sink, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, Tensor? cu_seqlens_q) -> Tensor",
)

_library = Library("bwdtune", "DEF")
for _schema in SCHEMAS:
    _library.define(_schema)


def _gradients(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _backward(dout: torch.Tensor, q: torch.Tensor, *others: Any) -> Any:
    *_, sink, bias, _, bias_grad = others
    return *_gradients(dout, q, *others), _of_sinks(sink), _of_bias(bias, bias_grad)


def _backward_varlen(dout: torch.Tensor, q: torch.Tensor, *others: Any) -> Any:
    *_, sink, _ = others
    return *_gradients(dout, q, *others), _of_sinks(sink)


def _forward_backward(dout: torch.Tensor, q: torch.Tensor, *others: Any) -> Any:
    *_, bias, _, bias_grad = others
    return *_gradients(dout, q, *others), _of_bias(bias, bias_grad)


def _of_sinks(sink: torch.Tensor | None) -> torch.Tensor | None:
    return sink if sink is None else torch.empty_like(sink)


def _of_bias(bias: torch.Tensor | None, wanted: bool) -> torch.Tensor | None:
    return None if bias is None or not wanted else torch.empty_like(bias, memory_format=torch.contiguous_format)


for _name, _fake in (
    ("backward", _backward),
    ("backward_varlen", _backward_varlen),
    ("forward_backward", _forward_backward),
    ("forward_varlen_backward", _gradients),
):
    torch.library.register_fake(f"bwdtune::{_name}", _fake, lib=_library)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _forward_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


torch.library.register_fake("bwdtune::forward", _forward, lib=_library)
torch.library.register_fake("bwdtune::forward_varlen", _forward_varlen, lib=_library)


def _batched_backward(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
    """A dimension more is one of the batch: (N, B, ...) as (N * B, ...)."""
    *_, dlse, sink, bias, slopes, _ = arguments
    # Gradients of a sink and of a bias are sums over the batch, and slopes may be those of one.
    if sink is not None or bias is not None or slopes is not None:
        each = [
            torch.ops.bwdtune.backward(
                *(
                    argument if dim is None else argument.select(dim, i)
                    for argument, dim in zip(arguments, in_dims, strict=True)
                )
            )
            for i in range(info.batch_size)
        ]
        gathered = (None if of_all[0] is None else torch.stack(of_all) for of_all in zip(*each, strict=True))
        return tuple(gathered), tuple(None if gradient is None else 0 for gradient in each[0])

    def flat(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        if dim is None:
            tensor = tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape)
        return tensor.movedim(dim or 0, 0).flatten(0, 1)

    tensors = [flat(tensor, dim) for tensor, dim in zip(arguments[:6], in_dims[:6], strict=True)]
    # The seeds are of a dropout that there is none of: any will do.
    seeds = [
        seed if dim is None else seed.select(dim, 0) for seed, dim in zip(arguments[6:8], in_dims[6:8], strict=True)
    ]
    dlse = dlse if dlse is None else flat(dlse, in_dims[-5])
    found = torch.ops.bwdtune.backward(*tensors, *seeds, *arguments[8:-5], dlse, *arguments[-4:])
    unbatched = (gradient.unflatten(0, (info.batch_size, -1)) for gradient in found[:3])
    return (*unbatched, *found[3:]), (0, 0, 0, None, None)


torch.library.register_vmap("bwdtune::backward", _batched_backward, lib=_library)


def register_flop_formulas() -> None:
    """Has `torch.utils.flop_counter` count our operators by its own rule: the whole score matrix, whatever the mask."""
    from torch.utils import flop_counter

    operators = torch.ops.bwdtune

    def scores(q: Sequence[int], k: Sequence[int]) -> int:
        batch, heads, seqlen_q, _ = q
        return 2 * batch * heads * seqlen_q * k[2]

    def packed_scores(q: torch.Tensor, starts_q: torch.Tensor, starts_kv: torch.Tensor) -> int:
        """Waits for the device, as PyTorch's formula of packed sequences does."""
        pairs = zip(starts_q.diff().tolist(), starts_kv.diff().tolist(), strict=True)
        return 2 * q.shape[1] * sum(rows * keys for rows, keys in pairs)

    def of_forward(q: Sequence[int], v: Sequence[int]) -> int:
        """Columns that its products have."""
        return q[-1] + v[-1]

    def of_backward(q: Sequence[int], v: Sequence[int]) -> int:
        return 3 * q[-1] + 2 * v[-1]

    @flop_counter.register_flop_formula([operators.attention, operators.forward])
    def attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *unused: Any, **options: Any) -> int:
        return scores(q, k) * of_forward(q, v)

    @flop_counter.register_flop_formula([operators.backward, operators.forward_backward])
    def backward(
        dout: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *unused: Any, **options: Any
    ) -> int:
        return scores(q, k) * of_backward(q, v)

    @flop_counter.register_flop_formula(operators.forward_varlen, get_raw=True)
    def forward_varlen(q: Any, k: Any, v: Any, starts_q: Any, starts_kv: Any, *unused: Any, **options: Any) -> int:
        return packed_scores(q, starts_q, starts_kv) * of_forward(q.shape, v.shape)

    @flop_counter.register_flop_formula([operators.backward_varlen, operators.forward_varlen_backward], get_raw=True)
    def backward_varlen(dout: Any, q: Any, k: Any, v: Any, *others: Any, **options: Any) -> int:
        starts_q, starts_kv = (other for other in others if getattr(other, "dtype", None) == torch.int32)
        return packed_scores(q, starts_q, starts_kv) * of_backward(q.shape, v.shape)
