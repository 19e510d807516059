"""Hugging Face's models with ``attn_implementation="bwdtune"``, beside ``sdpa`` and ``eager``: small, random ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_kernels import Kernels
from stub_kernels import stub_for

from bwdtune.gen.device import Device
from bwdtune.gen.problem import Problem
from bwdtune.runtime import attention as attention_module
from bwdtune.runtime import dispatch
from bwdtune.runtime.dispatch import Choice
from bwdtune.runtime.kernel import Kernel

transformers = pytest.importorskip(
    "transformers", "4.53", reason="transformers is not installed: pip install transformers"
)
integration = pytest.importorskip("bwdtune.runtime.integrations.transformers")
sdpa_attention = pytest.importorskip("transformers.integrations.sdpa_attention")

VOCABULARY, LENGTH = 97, 24
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
}
WINDOW = {"sliding_window": 6}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 2},
    **{"head_dim": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", WINDOW),
    "gemma2": ("Gemma2", {**WINDOW, **LAYERS, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3", {**WINDOW, **LAYERS, "query_pre_attn_scalar": 32}),
    "deepseek": ("DeepseekV3", LATENT),
    "gpt-oss": ("GptOss", {**WINDOW, **LAYERS, "num_local_experts": 1, "num_experts_per_tok": 1}),
}
if not hasattr(transformers, "GptOssConfig"):  # since 4.55
    del MODELS["gpt-oss"]


def model(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights at each call."""
    family, more = MODELS[name]
    names = (
        ("Gemma3TextConfig", "Gemma3ForCausalLM") if family == "Gemma3" else (f"{family}Config", f"{family}ForCausalLM")
    )
    config = getattr(transformers, names[0])(**{**SMALL, **more})
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return getattr(transformers, names[1])(config).to(dtype).train()


TOKENS = torch.randint(1, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> dict[str, torch.Tensor]:
    counts = torch.tensor([LENGTH, 17, 9])[:, None]
    places = torch.arange(LENGTH)
    mask = (places < counts if side == "right" else places >= LENGTH - counts).long()
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": TOKENS * mask, "attention_mask": mask, "position_ids": position_ids}


def packed() -> dict[str, torch.Tensor]:
    lengths = (11, 1, 20, 16)
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": TOKENS.flatten()[None, : sum(lengths)], "position_ids": places}


def packed_with_lengths() -> dict[str, Any]:
    batch = packed()
    starts = torch.tensor([0, 11, 12, 32, 48], dtype=torch.int32)
    return {**batch, **{f"cu_seq_lens_{which}": starts for which in "qk"}, "max_length_q": 20, "max_length_k": 20}


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"input_ids": TOKENS},
    "right padding": lambda: padded("right"),
    "left padding": lambda: padded("left"),
    "packed": packed,
    "packed, with lengths": packed_with_lengths,
}


def run(network: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the tokens that count, the loss, and the gradients."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    after_padding = torch.nn.functional.pad(~mask[:, :-1], (1, 0))  # predicted from what is nobody's
    labels = batch["input_ids"].masked_fill(~mask | after_padding, -100)
    result = network(**batch, labels=labels, use_cache=False)
    result.loss.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    return result.logits.detach()[mask], result.loss.detach(), gradients


def assert_alike(found: Any, expected: Any, tolerance: float) -> None:
    logits, loss, gradients = found
    assert (logits - expected[0]).norm() <= tolerance * expected[0].norm()
    assert torch.allclose(loss.float(), expected[1].float(), rtol=tolerance)
    assert gradients.keys() == expected[2].keys()
    for name, gradient in gradients.items():
        right = expected[2][name].float()
        assert (gradient.float() - right).norm() <= tolerance * right.norm() + 1e-6, name


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()
    integration.register()
    integration._said.clear()


@pytest.fixture
def problems(host: Device, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Every problem has a right kernel; those that were launched."""
    launched: list[Problem] = []
    kernels: dict[int, Problem] = {}

    def choose(problem: Problem, device_index: int, **options: Any) -> Choice:
        kernel = Kernel.load(stub_for(problem))
        kernels[id(kernel)] = problem
        return Choice(kernel, "a stub")

    launch = Kernel.launch

    def launching(self: Kernel, *arguments: Any, **options: Any) -> None:
        launched.append(kernels[id(self)])
        launch(self, *arguments, **options)

    monkeypatch.setattr(dispatch, "choose", choose)
    monkeypatch.setattr(Kernel, "launch", launching)
    return launched


def reference(name: str) -> str:
    return "eager" if name in ("gemma2", "gpt-oss") else "sdpa"  # which has no softcap and no sinks


CASES = [
    (name, batch)
    for name in MODELS
    for batch in (BATCHES if name in ("llama", "gemma2") else ("plain", "left padding", "packed"))
    # transformers' gpt-oss does not look at where its positions begin anew.
    if (name, batch) != ("gpt-oss", "packed")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_kernels_of_ours(problems: list[Problem], name: str, batch: str) -> None:
    """bf16, with kernels: gradients as near to fp32's as PyTorch's are."""
    given = BATCHES[batch]()
    exact = run(model(name, reference(name)), given)
    found = run(model(name, "bwdtune", torch.bfloat16), given)
    assert_alike(found, exact, 0.06)
    assert len(problems) == 2, "one of each layer"
    for problem in problems:
        assert problem.causal
        assert problem.varlen == (batch != "plain")
        assert problem.softcap == (name == "gemma2")
        assert problem.sink == (name == "gpt-oss")
    windows = [problem.window_left for problem in reversed(problems)]
    alternating = [5, -1]
    of_models = {"mistral": [5, 5], "gemma2": alternating, "gemma3": alternating, "gpt-oss": alternating}
    assert windows == of_models.get(name, [-1, -1])
    assert not integration._said


@pytest.mark.parametrize("batch", ["left padding", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_without_kernels_it_is_pytorchs(name: str, batch: str, caplog: pytest.LogCaptureFixture) -> None:
    """fp32 on a CPU: the same numbers, and a reason."""
    given = BATCHES[batch]()
    assert_alike(run(model(name, "bwdtune"), given), run(model(name, reference(name)), given), 1e-5)
    assert "the tensors are on cpu" in caplog.text


def test_a_row_of_padding_alone(problems: list[Problem]) -> None:
    given = padded("right")
    given["attention_mask"][2] = 0
    found = run(model("llama", "bwdtune", torch.bfloat16), given)
    assert_alike(found, run(model("llama", "sdpa"), given), 0.06)
    assert problems[0].batch == 2


def test_padding_between_tokens(problems: list[Problem], caplog: pytest.LogCaptureFixture) -> None:
    """What precedes is seen whatever lies between; a window counts the places."""
    given = padded("right")
    given["attention_mask"][1, 5] = 0
    for name in ("llama", "mistral"):
        problems.clear()
        assert_alike(run(model(name, "bwdtune", torch.bfloat16), given), run(model(name, reference(name)), given), 0.06)
        assert len(problems) == (2 if name == "llama" else 0)
    assert "there is padding between tokens" in caplog.text


def test_a_users_mask_is_pytorchs(problems: list[Problem], caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[10:, 3] = False
    given = {"input_ids": TOKENS, "attention_mask": mask.expand(3, 1, -1, -1)}
    losses = [
        network(**given, labels=TOKENS, use_cache=False).loss
        for network in (model("llama", "bwdtune"), model("llama", "sdpa"))
    ]
    assert torch.allclose(*losses)
    assert not problems
    assert "the mask is a boolean tensor" in caplog.text


def test_a_users_mask_that_is_added_is_a_bias(problems: list[Problem]) -> None:
    """Of a document that begins in the middle; what the first one's padding sees is nobody's."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[10:, :10] = False
    mask = torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
    given = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
    losses = [
        network(**given, attention_mask=mask.to(network.dtype)).loss
        for network in (model("llama", "bwdtune", torch.bfloat16), model("llama", "sdpa"))
    ]
    assert torch.allclose(losses[0].float(), losses[1], rtol=0.02)
    losses[0].backward()
    assert [(problem.bias, problem.bias_grad, problem.causal) for problem in problems] == [("1_1_S", False, False)] * 2


T5_GIVEN = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 1, "num_heads": 2}


def t5(implementation: str, dtype: torch.dtype) -> Any:
    config = transformers.T5Config(**T5_GIVEN, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).to(dtype).train()


@pytest.mark.skipif(
    not hasattr(sdpa_attention, "create_position_bias_mask"),
    reason="T5 of this transformers has an attention of its own",
)
@pytest.mark.parametrize("side", ["", "right"])
def test_relative_positions_are_a_bias(problems: list[Problem], side: str) -> None:
    """T5's: the gradient of its table of positions flows through dBias."""
    given = {name: value for name, value in padded(side).items() if name != "position_ids"} if side else {}
    given = given or {"input_ids": TOKENS}

    def run(network: Any) -> dict[str, torch.Tensor]:
        network(**given, labels=TOKENS[:, :20].contiguous()).loss.backward()
        return {name: parameter.grad for name, parameter in network.named_parameters()}

    found, expected = run(t5("bwdtune", torch.bfloat16)), run(t5("sdpa", torch.float32))
    tables = [name for name in found if "relative_attention_bias" in name]
    assert len(tables) == 2
    for name, gradient in found.items():
        assert (gradient.float() - expected[name]).norm() <= 0.1 * expected[name].norm() + 1e-6, name
    pattern = "B_H_S" if side else "1_H_S"
    # Of the decoder's attention to the encoder, of the decoder and of the encoder; the first has no table of its own.
    assert {(problem.bias, problem.causal) for problem in problems} == {(pattern, False), ("1_H_S", True)}


def test_dropout_is_pytorchs(problems: list[Problem], caplog: pytest.LogCaptureFixture) -> None:
    network = model("llama", "bwdtune", torch.bfloat16)
    for layer in network.model.layers:
        layer.self_attn.attention_dropout = 0.5
    network(TOKENS, labels=TOKENS).loss.backward()
    assert not problems
    assert "dropout is 0.5" in caplog.text


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(problems: list[Problem], reentrant: bool) -> None:
    given = padded("left")
    expected = run(model("mistral", "bwdtune", torch.bfloat16), given)
    network = model("mistral", "bwdtune", torch.bfloat16)
    network.gradient_checkpointing_enable({"use_reentrant": reentrant})
    network.enable_input_require_grads()
    assert_alike(run(network, given), expected, 1e-3)
    assert len(problems) == 4


def test_autocast_of_fp32_weights(problems: list[Problem]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = run(model("qwen3", "bwdtune"), padded("left"))
    assert_alike(found, run(model("qwen3", "sdpa"), padded("left")), 0.06)
    assert len(problems) == 2


@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str) -> None:
    """Caches, static and growing, padded prompts: what has no backward is PyTorch's, and right."""
    prompt = {key: value for key, value in padded("left").items() if key != "position_ids"}
    answers = [
        model(name, implementation).eval().generate(**prompt, max_new_tokens=10, do_sample=False)
        for implementation in ("bwdtune", reference(name))
    ]
    assert torch.equal(*answers)


def test_an_encoder(problems: list[Problem]) -> None:
    """No causal mask, right padding."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    given = {key: padded("right")[key] for key in ("input_ids", "attention_mask")}
    outputs = []
    for implementation, dtype in (("bwdtune", torch.bfloat16), ("sdpa", torch.float32)):
        config._attn_implementation = implementation
        torch.manual_seed(0)
        output = transformers.BertModel(config).to(dtype)(**given).last_hidden_state[given["attention_mask"].bool()]
        outputs.append(output.float())
        output.float().square().sum().backward()
    assert (outputs[0] - outputs[1]).norm() < 0.06 * outputs[1].norm()
    assert [(problem.causal, problem.varlen) for problem in problems] == [(False, True)] * 2


def test_a_mask_that_is_not_known(problems: list[Problem], caplog: pytest.LogCaptureFixture) -> None:
    from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, or_masks

    arguments = {"batch_size": 1, "q_length": 8, "kv_length": 8, "device": "cpu"}
    for function in (
        chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)),
        or_masks(causal_mask_function, lambda batch, head, q, kv: q == 3),
        lambda batch, head, q, kv: kv <= q,
    ):
        mask = integration.make_mask(mask_function=function, allow_is_causal_skip=False, **arguments)
        assert isinstance(mask, torch.Tensor)
        assert mask.shape == (1, 1, 8, 8)
    assert "the mask is none of transformers'" in caplog.text


def test_old_names_of_arguments() -> None:
    """transformers 4.53 gave the queries' places."""
    from transformers.masking_utils import causal_mask_function

    mask = integration.make_mask(
        batch_size=1, cache_position=torch.arange(8), kv_length=8, mask_function=causal_mask_function
    )
    assert mask is None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_whole_model_that_is_compiled_is_pytorchs(name: str) -> None:
    torch._dynamo.reset()
    given = {"input_ids": TOKENS}
    compiled = torch.compile(model(name, "bwdtune"), backend="aot_eager")
    loss = compiled(**given, labels=TOKENS, use_cache=False).loss
    assert torch.allclose(loss, model(name, reference(name))(**given, labels=TOKENS, use_cache=False).loss, rtol=1e-4)
    loss.backward()


@pytest.mark.parametrize("batch", ["plain", "left padding"])
def test_compiled_layers_run_kernels_of_ours(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, batch: str) -> None:
    """Through the operator, in one graph each."""
    monkeypatch.setattr(attention_module, "_DEVICE_TYPES", ("cpu",))
    torch._dynamo.reset()
    given = BATCHES[batch]()
    network = model("mistral", "bwdtune", torch.bfloat16)
    for layer in network.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_alike(run(network, given), run(model("mistral", "sdpa"), given), 0.06)
    assert kernels.launches == 2
