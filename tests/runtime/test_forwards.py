"""Which forward is taken: by the mask, and by what was measured."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bwdtune.runtime import forwards, math_attention, torch_attention
from bwdtune.runtime.features import PLAIN, Features, Sequences
from bwdtune.runtime.forwards import flash_3


class OnGpu(torch.Tensor):
    """A CPU's tensor that says that it lies on a GPU."""

    is_cuda = True


def on_gpu(seqlen: int = 40, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, heads: int = 2) -> torch.Tensor:
    return torch.zeros(1, heads, seqlen, head_dim, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's default is cuDNN there, and FlashAttention-3 is not installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: 3)
    flash_3.module.cache_clear()
    yield
    flash_3.module.cache_clear()


def choose(q: torch.Tensor, k: torch.Tensor, causal: bool, features: Features = PLAIN, kernel: bool = True) -> str:
    return forwards.choose(q, k, k, causal, 0.125, features, enable_gqa=True, kernel=kernel)


def test_a_plain_mask_has_pytorchs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    q = on_gpu()
    assert choose(q, q, True) == "cudnn"
    assert choose(q, on_gpu(50), False) == "cudnn"
    for backend, name in ((1, "flash"), (2, "efficient"), (0, "math")):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, backend=backend, **options: backend)
        assert choose(q, q, True) == name


@pytest.mark.parametrize("dynamic", [None, True])
def test_under_torch_compile_of_other_head_dims(monkeypatch: pytest.MonkeyPatch, dynamic: bool | None) -> None:
    """From the second on they are symbols; here, where the mask has FlashAttention, as on a GPU."""
    monkeypatch.setattr(forwards, "by_mask", lambda *given: forwards.FLASH)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: 2)

    def named(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, str]:
        return q * 2, forwards.choose(q, q, v, True, 0.125, PLAIN, enable_gqa=True, kernel=True)

    torch._dynamo.reset()
    compiled = torch.compile(named, backend="eager", fullgraph=True, dynamic=dynamic)
    for head_dim, head_dim_v, name in ((64, 64, "efficient"), (128, 64, "flash"), (64, 128, "flash")):
        assert compiled(torch.zeros(1, 2, 8, head_dim), torch.zeros(1, 2, 8, head_dim_v))[1] == name


STARTS = torch.tensor([0, 20, 40], dtype=torch.int32)
SAME, OTHER = (Sequences(STARTS, starts, 20, 20) for starts in (STARTS, STARTS.clone()))
MASKS: list[tuple[int, int, bool, Features, str]] = [
    (40, 50, True, PLAIN, "efficient"),
    (40, 50, True, Features(bottom_right=True), "flash_window"),
    (50, 40, True, Features(bottom_right=True), "math"),
    (40, 40, False, Features(window=(5, 3)), "flash_window"),
    (50, 40, False, Features(window=(5, 3)), "math"),
    (40, 40, True, Features(softcap=2.0), "math"),
    (40, 40, True, Features(sequences=SAME), "flash"),
    (40, 40, False, Features(sequences=OTHER), "flash"),
    (40, 40, True, Features(sequences=OTHER), "math"),
    (40, 40, True, Features(bottom_right=True, sequences=OTHER), "flash"),
]


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "causal", "features", "name"), MASKS)
def test_by_mask(seqlen_q: int, seqlen_kv: int, causal: bool, features: Features, name: str) -> None:
    assert choose(on_gpu(seqlen_q), on_gpu(seqlen_kv), causal, features) == name


@pytest.mark.parametrize("how", [{"head_dim": 36}, {"head_dim": 264}, {"dtype": torch.float32}, {"seqlen": 0}])
def test_what_no_fused_forward_takes(how: dict[str, Any]) -> None:
    q = on_gpu(**how)
    for features in (PLAIN, Features(window=(5, 3))):
        assert choose(q, q, False, features) == "math"


@pytest.fixture
def flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package of that name, which computes in elementary operations; how it was called."""
    calls: list[dict[str, Any]] = []

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: Features, options: dict[str, Any]) -> Any:
        calls.append(options)
        inputs = (tensor.transpose(-3, -2) for tensor in (q, k, v))
        return math_attention.forward(*inputs, options["causal"], options["softmax_scale"], features)

    def flash_attn_func(q: Any, k: Any, v: Any, *, return_attn_probs: bool = False, **options: Any) -> Any:
        assert return_attn_probs
        features = Features(options["window_size"], True, options["softcap"])
        output, lse = compute(q, k, v, features, options)
        return output.transpose(1, 2), lse

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, *lengths: Any, **options: Any) -> Any:
        features = Features(options["window_size"], True, options["softcap"], Sequences(*lengths))
        output, lse = compute(q[None], k[None], v[None], features, options)
        return output[0].transpose(0, 1), lse[0]

    package = types.ModuleType("flash_attn_interface")
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    package.flash_attn_func, package.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    flash_3.module.cache_clear()
    return calls


@pytest.mark.usefixtures("flash_attention_3")
def test_flash_attention_3_where_it_was_measured_to_be_faster() -> None:
    assert choose(on_gpu(4096), on_gpu(4096), True) == "flash_3"
    assert choose(on_gpu(512, 128), on_gpu(512, 128), True) == "cudnn"
    assert choose(on_gpu(4096), on_gpu(4096), True, kernel=False) == "cudnn", "PyTorch's backward has PyTorch's forward"


@pytest.mark.usefixtures("flash_attention_3")
def test_flash_attention_3_has_windows_caps_and_sequences() -> None:
    for seqlen_q, seqlen_kv, causal, features, name in MASKS:
        if features.plain:
            continue
        fused = name != "math" or (features.softcap and seqlen_q <= seqlen_kv)
        assert choose(on_gpu(seqlen_q), on_gpu(seqlen_kv), causal, features) == ("flash_3" if fused else "math")


@pytest.mark.usefixtures("flash_attention_3")
def test_no_figures_no_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert choose(on_gpu(4096), on_gpu(4096), True) == "cudnn"


@pytest.mark.skipif(not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch 2.11 has it")
def test_flash_attention_3_that_is_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert choose(on_gpu(4096), on_gpu(4096), True, kernel=False) == "flash"
    assert choose(on_gpu(512, 128), on_gpu(512, 128), True) == "cudnn"


CALLS: list[tuple[int, int, bool, Features]] = [
    (30, 30, True, PLAIN),
    (30, 50, False, PLAIN),
    (30, 50, True, Features(bottom_right=True)),
    (30, 50, False, Features(window=(5, 3))),
    (30, 30, True, Features(window=(5, -1), softcap=2.0)),
    (40, 40, True, Features(sequences=SAME)),
]


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "causal", "features"), CALLS)
def test_flash_attention_3s_results(
    flash_attention_3: list[dict[str, Any]], seqlen_q: int, seqlen_kv: int, causal: bool, features: Features
) -> None:
    q, k, v = (torch.randn(1, 2, length, 16, dtype=torch.float64) for length in (seqlen_q, seqlen_kv, seqlen_kv))
    expected = torch_attention.forward(q, k, v, causal, 0.25, features, "math")
    found = torch_attention.forward(q, k, v, causal, 0.25, features, "flash_3")
    assert len(flash_attention_3) == 1
    assert torch.allclose(found.output, expected.output)
    assert torch.allclose(found.lse, expected.lse)
    dout = torch.randn_like(q)
    for ours, theirs in zip(found.backward(dout), expected.backward(dout), strict=True):
        assert torch.allclose(ours, theirs)


def test_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import importlib

    def load(name: str) -> Any:
        raise ImportError("undefined symbol: somewhere")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", load)
    for _ in range(2):
        assert choose(on_gpu(4096), on_gpu(4096), True) == "cudnn"
    assert [record.getMessage() for record in caplog.records] == [
        "FlashAttention-3 is installed and does not load: undefined symbol: somewhere"
    ]
