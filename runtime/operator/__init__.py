"""The backward, and attention itself, as operators of PyTorch (namespace ``bwdtune``).

Importing this package defines the schemas; `load` puts the implementations behind them, in C++ (``source``), built once
into the cache. Call it where a build may happen: in `enable`, `warmup`, or when a front is imported; not within a step.

The differentiable operators, for the fronts:

``bwdtune::attention(q, k, v, is_causal=False, scale=None, enable_gqa=False, window_left=-1, window_right=-1,
bottom_right=False, softcap=0.0, deterministic=None, forward="flash", sink=None, bias=None, alibi_slopes=None) ->
(out, lse)``

    Attention of (B, H, S, D) tensors by one forward, with `bwdtune::backward` as the derivative. ``out`` is
    (B, Hq, Sq, Dv), ``lse`` (B, Hq, Sq), fp32, natural logarithm, differentiable and possibly not contiguous; where a
    query sees no key it is infinite, of either sign. ``sink`` is (Hq), of any floating dtype: both results count it,
    and it is differentiable. ``bias`` is (B or 1, Hq or 1, Sq or 1, Skv), in bf16, fp16 or fp32, added to the scores
    after the cap and before the mask, and differentiable; ``alibi_slopes`` is fp32, contiguous, (Hq) or (B, Hq), and
    not differentiable. Who calls it sees to it that the forward takes the input: nothing is checked here, and
    nothing is cast for autocast. ``window_left`` and ``window_right`` count keys before and past the diagonal, -1 for
    all of them; ``is_causal`` is a ``window_right`` of 0. ``deterministic=None`` is PyTorch's mode at the time of the
    backward. The gradient cannot be differentiated again: that raises a RuntimeError.

    ``forward`` is one of

    - ``"cudnn"``: `aten::_scaled_dot_product_cudnn_attention`: full or causal, aligned top-left;
    - ``"flash"``: `aten::_scaled_dot_product_flash_attention`: full or causal, aligned bottom-right: where Sq and Skv
      differ, ``bottom_right`` must be given with ``is_causal``;
    - ``"efficient"``: `aten::_scaled_dot_product_efficient_attention`: full or causal, aligned top-left; with a bias,
      which must have the dtype of q, any mask; expands heads;
    - ``"flash_window"``: `aten::_flash_attention_forward`: any window and either alignment, of no more queries than
      keys;
    - ``"cpu"``: `aten::_scaled_dot_product_flash_attention_for_cpu`: full or causal, aligned top-left;
    - anything else: ``bwdtune::forward(q, k, v, is_causal, scale, window_left, window_right, bottom_right, softcap,
      forward, bias, alibi_slopes) -> (out, lse)``, implemented in Python by who made up the name. Where no kernel of
      ours takes the backward it is ``bwdtune::forward_backward(dout, q, k, v, out, lse, is_causal, scale, window_left,
      window_right, bottom_right, softcap, deterministic, forward, bias, alibi_slopes, bias_grad) -> (dq, dk, dv,
      dbias)``, implemented beside it. Their fake implementations are here: ``out``, ``lse`` and ``dbias`` are
      contiguous, other gradients as `torch.empty_like` of the inputs.

    Only ``"efficient"`` and the forwards of Python take a bias, only the latter take slopes. Where v has another
    head_dim than q and k, ``"flash"``, ``"flash_window"`` and ``"cpu"`` are given columns of zeros.

``bwdtune::attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, …) -> (out, lse)``

    The same for packed sequences, (T, H, D), with the same options but a bias; ``lse`` is (Hq, Tq). ``forward`` is
    ``"flash"`` (`aten::_flash_attention_forward`, aligned bottom-right; top-left only where all lengths are the same,
    which one tensor for both ``cu_seqlens`` tells), or goes to ``bwdtune::forward_varlen`` and
    ``bwdtune::forward_varlen_backward``, with the four lengths behind the tensors.

``bwdtune::backward`` and ``bwdtune::backward_varlen`` take what these have saved: the kernel that `dispatch.choose`
names for the problem, else PyTorch's backward of that forward. Gradients have the strides of `torch.empty_like` of
their inputs. Their last arguments are the gradient of ``lse``, the sinks, the bias, the slopes, and whether the bias'
gradient is wanted; their last results are the gradients of sinks and, contiguous, of the bias, None where there are
none or it is not wanted. Packed sequences have no bias.
"""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

from ...gen.errors import BwdtuneError
from ..dispatch import notices
from . import overrides
from . import schemas as schemas  # defines the operators
from .native import Native, load, loaded
from .overrides import PythonOverrides

__all__ = ["Counters", "Native", "PythonOverrides", "counters", "load", "loaded", "overriding"]


class Counters(TypedDict):
    """What ran since the process began.

    Attributes:
        launches: How often each kernel of ours was launched, by name.
        fallbacks: How often PyTorch's backward ran in its place, by reason.
    """

    launches: dict[str, int]
    fallbacks: dict[str, int]


def counters() -> Counters:
    """The counts of launches and fallbacks; none before `load` or `enable`."""
    counted: list[Native | PythonOverrides] = [native] if (native := loaded()) else []
    if overrides.load.cache_info().currsize:
        counted.append(overrides.load())
    launches, fallbacks = Counter[str](), Counter[str]()
    for one in counted:
        launches.update(one.launches())
        fallbacks.update(one.fallbacks())
    return {"launches": dict(launches), "fallbacks": dict(fallbacks)}


def overriding() -> Native | PythonOverrides:
    """What puts our backward before PyTorch's: C++, or Python where it cannot be built, which the log says once.

    Raises:
        BwdtuneError: Neither is possible.
    """
    try:
        return load()
    except BwdtuneError as error:
        if not PythonOverrides.possible():
            raise
        notices.warn_once(
            "operator", f"PyTorch's attention has our backward through Python, which costs microseconds: {error}"
        )
        return overrides.load()
