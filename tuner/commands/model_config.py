"""The problems of a model: what a Hugging Face ``config.json`` says of its attention."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...gen.errors import BwdtuneError, UsageError
from ...gen.problem import UNLIMITED, Problem

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_CAUSAL = ("CausalLM", "LMHead", "ConditionalGeneration")


def problems_of_model(path: Path, batch: int, length: int, described: Callable[[str], Problem]) -> list[Problem]:
    """The different attention problems of a model's layers.

    Args:
        path: The model's ``config.json``, or the folder that holds it. Of one with several parts the text's counts.
        batch: Sequences.
        length: Their length.
        described: From a shape to a problem with all that the file does not say, such as the dtype.

    Raises:
        BwdtuneError: The file cannot be read.
        UsageError: It describes no attention that a kernel takes.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BwdtuneError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise BwdtuneError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no model's configuration: it holds no object")
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, dict) else config
    heads = _number(text, _HEADS, path)
    kv_heads = _number(text, _KV_HEADS, path, default=1 if text.get("multi_query") else heads)
    problem = described(f"{batch}_{heads}_{kv_heads}_{length}_{_head_dims(text, heads, path)}")
    names = text.get("architectures") or config.get("architectures") or _CAUSAL
    if any(part in name for name in names for part in _CAUSAL):
        problem = replace(problem, causal=True)
    if text.get("attn_logit_softcapping"):
        problem = replace(problem, softcap=True)
    return [_windowed(problem, window) for window in _windows(text, path)]


def _head_dims(text: Mapping[str, Any], heads: int, path: Path) -> str:
    """D as a shape has it. In multi-head latent attention q and k have columns with and without a position."""
    if "qk_nope_head_dim" not in text:
        return f"{_number(text, ('head_dim',), path, default=0) or _number(text, _WIDTH, path) // heads}"
    columns = sum(_number(text, (name,), path) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return f"{columns}x{_number(text, ('v_head_dim',), path)}"


def _windows(text: Mapping[str, Any], path: Path) -> list[int | None]:
    """The sliding windows of the layers, None for full attention; each once."""
    window = text.get("sliding_window")
    layers = set(text.get("layer_types") or ())
    if layers:
        found = [window] if _SLIDING in layers and window else []
        return [*([None] if _FULL in layers or not found else []), *found]
    if not window or text.get("use_sliding_window") is False:
        return [None]
    # Without a list of layers, these say that only some of them have a window.
    some = text.get("sliding_window_pattern") or text.get("max_window_layers") or text.get("model_type") == "gemma2"
    return [None, window] if some else [window]


def _windowed(problem: Problem, window: int | None) -> Problem:
    """A window counts the query's own key; one that is no shorter than the sequence hides nothing."""
    if window is None or window >= problem.seqlen_kv:
        return problem
    return replace(problem, window_left=window - 1, window_right=UNLIMITED if problem.causal else window - 1)


def _number(text: Mapping[str, Any], names: tuple[str, ...], path: Path, default: int | None = None) -> int:
    found = next((text[name] for name in names if text.get(name) is not None), default)
    if not isinstance(found, int):
        raise UsageError(f"{path} has no {names[0]}: it is no configuration of a model with attention")
    return found
