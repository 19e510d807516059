"""An attention implementation for Hugging Face's transformers: ``attn_implementation="bwdtune"``.

    from bwdtune.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="bwdtune")

transformers asks two functions: one what the mask is, once a forward of the model, and one for the attention of each
layer. The first hands on what the mask means (causal, a window, padding, packed sequences) where a kernel has words for
it, and the second unpads: padding and packed batches become packed sequences of `attention_varlen`. All else has
PyTorch's attention with the mask as a tensor, as with ``attn_implementation="sdpa"``, and the log of ``bwdtune`` says
why, once.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...gen.cached import cached_property
from ...gen.problem import UNLIMITED
from ..attention import attention, attention_varlen, unsupported

__all__ = ["register"]

_log = logging.getLogger("bwdtune")

NAME = "bwdtune"


def register() -> None:
    """Makes the implementation known to transformers, as ``bwdtune``. Calling it again changes nothing.

    Raises:
        ImportError: transformers is not installed, or is older than 4.53.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(f"transformers 4.53 or newer is needed: {error}") from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


# ---- masks ----


@dataclass(frozen=True, eq=False)
class Packing:
    """Which tokens of a (B, S) batch count, and how they fall into sequences.

    Attributes:
        indices: int64 (T), of the B * S tokens those that count, in order; None for all.
        cu_seqlens: int32, where each sequence begins among these, and one past the end of the last.
        max_seqlen: Length of the longest.
    """

    indices: torch.Tensor | None
    cu_seqlens: torch.Tensor
    max_seqlen: int

    def to(self, device: torch.device) -> Packing:
        """On the device of a layer that lies elsewhere than the first."""
        if self.cu_seqlens.device == device:
            return self
        indices = None if self.indices is None else self.indices.to(device)
        return Packing(indices, self.cu_seqlens.to(device), self.max_seqlen)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, H, S, D) to (T, H, D)."""
        rows = tensor.transpose(1, 2).flatten(0, 1)
        return rows if self.indices is None else rows.index_select(0, self.indices)

    def unpack(self, rows: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """(T, H, D) to (B, S, H, D), contiguous, zero where there is padding."""
        if self.indices is not None:
            rows = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, self.indices, rows)
        return rows.contiguous().view(batch, length, *rows.shape[1:])


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask that a kernel has words for. Self-attention: as many queries as keys.

    Attributes:
        causal: A query sees no key past its own place.
        window_size: Keys before and past it that a query sees, -1 for all.
        packing: Of padded or packed batches; None where each row of the batch is one sequence.
        arguments: What transformers asked for it with.
    """

    causal: bool
    window_size: tuple[int, int]
    packing: Packing | None
    arguments: Mapping[str, Any]

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The same mask as a boolean (B, 1, S, S)."""
        return _tensor_mask(**{**self.arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def make_mask(**arguments: Any) -> Mask | torch.Tensor | None:
    """transformers' mask function.

    Returns:
        None for a mask that `attention_forward` knows without it; a `Mask`; or a boolean tensor (B, 1, Sq, Skv).
    """
    if torch.compiler.is_compiling():
        # Whether a row is packed is not known then, so transformers' masks are closures over tensors, and they are not
        # to be looked into. Layers that are compiled one by one have their mask from outside.
        return _tensor_mask(**arguments)
    pattern = _pattern(arguments["mask_function"])
    kv_length = arguments["kv_length"]
    # Until 4.57 and 5.0 the queries' places are given in place of their number and offset.
    places = arguments.get("cache_position")
    q_length = arguments["q_length"] if places is None else places.shape[0]
    padding = arguments.get("attention_mask")
    if pattern is None:
        _say("the mask is none of transformers' causal, sliding, padded or packed ones")
        return _tensor_mask(**arguments)
    tensor_is_asked = not arguments.get(
        "allow_is_causal_skip" if pattern.causal else "allow_is_bidirectional_skip", pattern.causal
    )
    moved = not _same(arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
    if q_length != kv_length or moved or (tensor_is_asked and pattern.sequences is None):
        return _tensor_mask(**arguments)  # keys from a cache, or a mask that the model works on
    if padding is not None and padding.shape[-1] != kv_length:
        return _tensor_mask(**arguments)
    if padding is not None and bool(padding.all()):
        padding = None
    if padding is not None and pattern.windowed and _has_holes(padding):
        _say("there is padding between tokens, and a window counts it")
        return _tensor_mask(**arguments)
    packing = None
    if padding is not None or pattern.sequences is not None:
        packing = _packing(padding, pattern.sequences)
    if packing is None and not pattern.windowed:
        return None
    return Mask(pattern.causal, pattern.window_size, packing, arguments)


def _tensor_mask(**arguments: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**arguments)


def _same(first: Any, second: Any) -> bool:
    return not isinstance(first, torch.Tensor) and not isinstance(second, torch.Tensor) and first == second


@dataclass(frozen=True, eq=False)
class _Pattern:
    """What one of transformers' mask functions means, without padding."""

    causal: bool = False
    window_size: tuple[int, int] = (UNLIMITED, UNLIMITED)
    sequences: torch.Tensor | None = None

    @property
    def windowed(self) -> bool:
        return self.window_size != (UNLIMITED, UNLIMITED)


def _pattern(function: Callable[..., Any]) -> _Pattern | None:
    """The meaning of a mask function; None where it is not one that is known here.

    transformers composes closures. What they hold is read from them: nothing else tells a sliding window from, say,
    chunks of the same size.
    """
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return _Pattern(causal=True)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return _Pattern()
    kind = f"{function.__module__}.{function.__qualname__}"
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    prefix = f"{masking_utils.__name__}."
    if not kind.startswith(prefix):
        return None
    kind = kind[len(prefix) :].split(".")[0]
    if kind == "and_masks":
        parts = [_pattern(part) for part in held["mask_functions"].cell_contents]
        return functools.reduce(_both, parts)
    if kind == "sliding_window_overlay":
        return _Pattern(window_size=(held["sliding_window"].cell_contents - 1, UNLIMITED))
    if kind == "sliding_window_bidirectional_overlay":
        return _Pattern(window_size=(held["sliding_window"].cell_contents,) * 2)
    if kind == "packed_sequence_mask_function":
        return _Pattern(sequences=held["packed_sequence_mask"].cell_contents)
    if kind == "remap_positions_for_packed_sequence":  # distances within a sequence are what they were
        return _pattern(held["mask_function"].cell_contents)
    return None


def _both(first: _Pattern | None, second: _Pattern | None) -> _Pattern | None:
    """What is seen under two masks; None where one of them is unknown, or both limit the same."""
    if first is None or second is None:
        return None
    if (first.windowed and second.windowed) or (first.sequences is not None and second.sequences is not None):
        return None
    return _Pattern(
        first.causal or second.causal,
        first.window_size if first.windowed else second.window_size,
        first.sequences if first.sequences is not None else second.sequences,
    )


def _has_holes(padding: torch.Tensor) -> bool:
    """Whether a row's tokens are not next to each other. Waits for the device."""
    return bool((padding.long().diff(dim=1).clamp(min=0).sum(1) + padding[:, 0].long() > 1).any())


def _packing(padding: torch.Tensor | None, sequences: torch.Tensor | None) -> Packing:
    """Waits for the device, once a forward of the model: a launch needs to know how many tokens there are.

    Args:
        padding: (B, S), true for tokens that count; None where all do.
        sequences: (B, S), of each token the number of its sequence in its row; None for one a row.
    """
    given = sequences if padding is None else padding
    assert given is not None
    batch, length = given.shape
    numbers = torch.arange(batch, device=given.device)[:, None] * length + (0 if sequences is None else sequences)
    numbers = numbers.expand(batch, length).flatten()
    indices = None
    if padding is not None:
        indices = padding.flatten().nonzero().flatten()
        numbers = numbers[indices]
    lengths = torch.unique_consecutive(numbers, return_counts=True)[1]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return Packing(indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0)


# ---- attention ----


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention function.

    Args:
        module: The layer's attention.
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Skv, D).
        value: (B, Hkv, Skv, Dv).
        attention_mask: Of `make_mask`, or a tensor of the user's.
        dropout: Of probabilities.
        scaling: The softmax scale.
        is_causal: In place of the module's, where `attention_mask` is None.
        softcap: See `attention`.
        **others: ``s_aux``, the sinks of gpt-oss and its like, (Hq); ``position_bias``, (1 or B, Hq, Sq, Skv), as of
            T5; of ``FlashAttentionKwargs``, the lengths of packed sequences; the rest is PyTorch's or the model's.

    Returns:
        (B, Sq, Hq, Dv), and None.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if reason := _objection(query, key, value, attention_mask, dropout, others):
        _say(reason)
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "softcap": softcap, **others}
        return _pytorch(module, query, key, value, attention_mask, given)
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": True, "softcap": softcap or 0.0}
    if (sink := others.get("s_aux")) is not None:
        options["sink"] = sink.to(query.device)
    bias: torch.Tensor | None = others.get("position_bias")
    packing, window_size = None, (UNLIMITED, UNLIMITED)
    if isinstance(attention_mask, Mask) and (bias is None or attention_mask.packing is None):
        causal, window_size = attention_mask.causal, attention_mask.window_size
        packing = attention_mask.packing
    elif attention_mask is not None:
        # Packed sequences have no bias: of padding, it is minus infinity.
        mask = attention_mask.tensor if isinstance(attention_mask, Mask) else attention_mask
        bias, causal = _biased(bias, mask), False
    if bias is None and packing is None:
        packing = _given_packing(query, key, others)
    if packing is not None:
        packing = packing.to(query.device)
        starts, longest = packing.cu_seqlens, packing.max_seqlen
        rows = attention_varlen(
            packing.pack(query),
            packing.pack(key),
            packing.pack(value),
            starts,
            starts,
            longest,
            longest,
            is_causal=causal,
            window_size=window_size,
            **options,
        )
        return packing.unpack(rows, query.shape[0], query.shape[2]), None
    # One query is a step of decoding, which sees all keys; the rest of a static cache's keys are not there yet.
    causal = causal and query.shape[2] > 1
    if causal and key.shape[2] > query.shape[2]:
        key, value = (tensor[:, :, : query.shape[2]] for tensor in (key, value))
        bias = bias if bias is None else bias[..., : query.shape[2]]
    output = attention(query, key, value, is_causal=causal, window_size=window_size, bias=bias, **options)
    return output.transpose(1, 2).contiguous(), None


def _objection(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    dropout: float,
    others: Mapping[str, Any],
) -> str | None:
    """Why PyTorch's attention has to take the call. What `attention` itself leaves to PyTorch is not its matter."""
    bias = others.get("position_bias")
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and bias is None:
        return "the mask is a boolean tensor"
    if bias is not None and _given_packing(query, key, others) is not None:
        return "the model gives position_bias, and packed sequences have none"
    if dropout:
        return f"dropout is {dropout}"
    for name in _NOT_TAKEN:
        if others.get(name) is not None:
            return f"the model gives {name}"
    # Of a mask that PyTorch's function lacks, its way with a tensor is quicker than elementary operations.
    return unsupported(query, key, value) if mask is not None or bias is not None else None


_NOT_TAKEN = ("head_mask",)


def _biased(bias: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """What is added to scores for a bias and a mask: (B or 1, H or 1, Sq or 1, Skv)."""
    if mask.dtype != torch.bool:  # which is added as it is
        return mask if bias is None else bias + mask
    assert bias is not None
    return bias.masked_fill(~mask, -math.inf)


def _given_packing(query: torch.Tensor, key: torch.Tensor, others: Mapping[str, Any]) -> Packing | None:
    """Of ``FlashAttentionKwargs``: one row of tokens, whose sequences the data's collator has counted."""
    starts, longest = others.get("cu_seq_lens_q"), others.get("max_length_q")
    if starts is None or longest is None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        return None
    return Packing(None, starts.int(), int(longest))


def _pytorch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    given: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``sdpa`` would do; what that has no word for, ``eager``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    tensor = mask.tensor if isinstance(mask, Mask) else mask
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None or not (given["softcap"] or given.get("s_aux") is not None):
        asked = {name: value for name, value in given.items() if name != "softcap" or value}
        return sdpa_attention_forward(module, query, key, value, tensor, **asked)
    causal = given["is_causal"] if given["is_causal"] is not None else getattr(module, "is_causal", True)
    if tensor is None and causal:
        tensor = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if tensor is not None and tensor.dtype == torch.bool:
        tensor = torch.zeros_like(tensor, dtype=query.dtype).masked_fill(~tensor, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, tensor, **given)


_said: set[str] = set()


def _say(reason: str) -> None:
    if reason not in _said and not torch.compiler.is_compiling():
        _said.add(reason)
        _log.warning("transformers' attention is PyTorch's: %s", reason)
