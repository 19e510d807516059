"""Attention through the operators of the namespace ``bwdtune``, and the forwards there that PyTorch does not have."""

from __future__ import annotations

import threading

import torch
from torch.library import Library

from ...gen.errors import BwdtuneError
from .. import math_attention, operator, row_features, torch_attention
from ..call import Call
from ..dispatch import notices
from ..dispatch.choices import waits
from ..features import Features, Sequences
from . import constant_under_compile

_Tensors = tuple[torch.Tensor, torch.Tensor]


def attention(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    forward: str,
) -> _Tensors:
    """Attention whose backward is `bwdtune::backward`.

    Args:
        call: What is asked for.
        q: (B, Hq, Sq, D); with packed sequences B is 1.
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        sink: (Hq), if there is any.
        bias: (B or 1, Hq or 1, Sq or 1, Skv), if there is any.
        forward: Of `forwards.choose`.

    Returns:
        (B, Hq, Sq, Dv) and the log-sum-exp, (B, Hq, Sq); both differentiable.
    """
    features, options = call.features, (call.causal, call.scale, call.enable_gqa)
    mask = (*features.window, features.bottom_right, features.softcap)
    q, k, v = torch_attention.readable(q), torch_attention.readable(k), torch_attention.readable(v)
    if sequences := features.sequences:
        lengths = (sequences.cu_seqlens_q, sequences.cu_seqlens_kv, sequences.seqlen_q, sequences.seqlen_kv)
        rows = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        output, lse = torch.ops.bwdtune.attention_varlen(
            *rows, *lengths, *options, *mask, call.deterministic, forward, sink, features.alibi_slopes
        )
        return output.transpose(0, 1)[None], lse[None]
    given: tuple[torch.Tensor | None, ...] = ()
    if sink is not None or bias is not None or features.alibi_slopes is not None:  # each argument costs time
        given = (sink, bias, features.alibi_slopes)
    found: _Tensors = torch.ops.bwdtune.attention(q, k, v, *options, *mask, call.deterministic, forward, *given)
    return found


def ready() -> bool:
    """Whether the operators can be called.

    Their library is built by the first call that asks, in the background: no step waits for a C++ compiler. Where a
    graph is compiled, or ``BWDTUNE_ON_MISS`` is ``wait``, it is built here.
    """
    return _ready_under_compile() if torch.compiler.is_compiling() else _ready()


def _ready_under_compile() -> bool:
    _Loading.start()
    _Loading.finish()
    return operator.loaded() is not None


constant_under_compile(_ready_under_compile)


def _ready() -> bool:
    if operator.loaded() is None:
        _Loading.start()
        if waits():
            _Loading.finish()
    return operator.loaded() is not None


class _Loading:
    """The thread that loads the library, once in a process."""

    lock = threading.Lock()
    thread: threading.Thread | None = None

    @classmethod
    def start(cls) -> None:
        with cls.lock:
            if cls.thread is None:
                cls.thread = threading.Thread(target=_load, name="bwdtune-operator", daemon=True)
                cls.thread.start()

    @classmethod
    def finish(cls) -> None:
        assert cls.thread
        cls.thread.join()


def _load() -> None:
    try:
        operator.load()
    except BwdtuneError as error:
        notices.warn_once("operator", f"attention is called through Python, which costs microseconds: {error}")


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    softcap: float,
    forward: str,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> _Tensors:
    features = Features((window_left, window_right), bottom_right, softcap, None, alibi_slopes)
    result = torch_attention.forward(q, k, v, is_causal, scale, features, forward, bias=bias)
    return result.output.contiguous(), result.lse


def _forward_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    softcap: float,
    forward: str,
    alibi_slopes: torch.Tensor | None,
) -> _Tensors:
    sequences = Sequences(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    features = Features((window_left, window_right), bottom_right, softcap, sequences, alibi_slopes)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    result = torch_attention.forward(q, k, v, is_causal, scale, features, forward)
    return result.output[0].transpose(0, 1).contiguous(), result.lse[0]


def _forward_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    softcap: float,
    deterministic: bool,
    forward: str,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias_grad: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Elementary operations, which are deterministic."""
    features = Features((window_left, window_right), bottom_right, softcap, None, alibi_slopes)
    dq, dk, dv, *of_bias = math_attention.gradients(
        dout, q, k, v, out, lse, is_causal, scale, features, bias, bias_grad
    )
    return (*_laid_out((dq, dk, dv), q, k, v), of_bias[0] if of_bias else None)


def _forward_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_causal: bool,
    scale: float,
    window_left: int,
    window_right: int,
    bottom_right: bool,
    softcap: float,
    deterministic: bool,
    forward: str,
    alibi_slopes: torch.Tensor | None,
) -> torch_attention.Gradients:
    sequences = Sequences(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
    features = Features((window_left, window_right), bottom_right, softcap, sequences, alibi_slopes)
    dense = [tensor.transpose(0, 1)[None] for tensor in (dout, q, k, v, out)]
    dq, dk, dv = math_attention.gradients(
        dense[0], dense[1], dense[2], dense[3], dense[4], lse[None], is_causal, scale, features
    )
    return _laid_out((dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)), q, k, v)


def _sink_gradient(
    sink: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
) -> torch.Tensor:
    if cu_seqlens_q is None:
        return row_features.sink_gradient(sink, out, lse, dout, dlse, None)
    out, dout = (tensor.transpose(0, 1)[None] for tensor in (out, dout))
    return row_features.sink_gradient(sink, out, lse[None], dout, dlse if dlse is None else dlse[None], cu_seqlens_q)


def _laid_out(gradients: torch_attention.Gradients, *inputs: torch.Tensor) -> torch_attention.Gradients:
    """As the operators' fake implementations say: with the strides of `torch.empty_like` of the inputs."""
    dq, dk, dv = (torch.empty_like(tensor).copy_(gradient) for gradient, tensor in zip(gradients, inputs, strict=True))
    return dq, dk, dv


_library = Library("bwdtune", "IMPL")
for _key in ("CPU", "CUDA"):
    for _name, _implementation in (
        ("forward", _forward),
        ("forward_varlen", _forward_varlen),
        ("forward_backward", _forward_backward),
        ("forward_varlen_backward", _forward_varlen_backward),
        ("lse_factors", row_features.lse_factors),
        ("sink_gradient", _sink_gradient),
    ):
        _library.impl(_name, _implementation, _key)
