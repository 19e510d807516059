"""Every way in which a program comes to PyTorch's attention, and to its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils import checkpoint

Gradients = tuple[torch.Tensor, ...]


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum()


def eager(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(loss(*inputs), inputs)


def function_imported_before(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(imported_before(*inputs, is_causal=True).float().square().sum(), inputs)


def compiled(backend: str, **options: Any) -> Callable[..., Gradients]:
    def gradients(*inputs: torch.Tensor) -> Gradients:
        torch._dynamo.reset()
        return torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True, **options)(*inputs), inputs)

    return gradients


def compiled_autograd(*inputs: torch.Tensor) -> Gradients:
    torch._dynamo.reset()
    total = loss(*inputs)
    with torch._dynamo.utils.maybe_enable_compiled_autograd(True, fullgraph=True, dynamic=False):
        total.backward()
    return tuple(tensor.grad for tensor in inputs)


def checkpointed(reentrant: bool) -> Callable[..., Gradients]:
    def gradients(*inputs: torch.Tensor) -> Gradients:
        checkpoint.checkpoint(loss, *inputs, use_reentrant=reentrant).backward()
        return tuple(tensor.grad for tensor in inputs)

    return gradients


def selectively_checkpointed(*inputs: torch.Tensor) -> Gradients:
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    kept += [torch.ops.aten._scaled_dot_product_cudnn_attention.default]

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts(kept)

    checkpoint.checkpoint(loss, *inputs, use_reentrant=False, context_fn=contexts).backward()
    return tuple(tensor.grad for tensor in inputs)


def autocast(*inputs: torch.Tensor) -> Gradients:
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    with torch.autocast(inputs[0].device.type, torch.bfloat16):
        total = loss(*wide)
    return tuple(gradient.bfloat16() for gradient in torch.autograd.grad(total, wide))


def functional(*inputs: torch.Tensor) -> Gradients:
    return torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)


def batched(*inputs: torch.Tensor) -> Gradients:
    output = F.scaled_dot_product_attention(*inputs, is_causal=True)
    douts = torch.stack([2 * output.detach(), output.detach()])
    return tuple(both[0] for both in torch.autograd.grad(output, inputs, douts, is_grads_batched=True))


def traced(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(torch.jit.trace(loss, inputs)(*inputs), inputs)


def symbolically_traced(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(torch.fx.symbolic_trace(loss)(*inputs), inputs)


class Model(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum()


def scripted(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(torch.jit.script(Model())(*inputs), inputs)


def exported(*inputs: torch.Tensor) -> Gradients:
    program = torch.export.export(Model(), inputs)
    return torch.autograd.grad(program.module()(*inputs), inputs)


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Gradients:
    """The sequence in two parts, as `context_parallel` has one on each rank, whose calls are the same.

    The second part's queries meet both parts' keys in a call each; each backward is given the merged log-sum-exp.
    """
    half = q.shape[2] // 2
    (q0, k0, v0), (q1, k1, v1) = ([one[:, :, :half] for one in (q, k, v)], [one[:, :, half:] for one in (q, k, v)])
    (out0, lse0, *rest0), (own, own_lse, *own_rest), (other, other_lse, *other_rest) = (
        _flash(q0, k0, v0, True),
        _flash(q1, k1, v1, True),
        _flash(q1, k0, v0, False),
    )
    lse1 = torch.logaddexp(own_lse, other_lse)
    out1 = sum(out.float() * (lse - lse1).exp().unsqueeze(-1) for out, lse in ((own, own_lse), (other, other_lse)))
    out1 = out1.to(q.dtype)
    # Of the sum of squares.
    dout0, dout1 = ((2 * out.float()).to(q.dtype) for out in (out0, out1))
    first = _flash_backward(dout0, q0, k0, v0, out0, lse0, rest0, True)
    second = _flash_backward(dout1, q1, k1, v1, out1, lse1, own_rest, True)
    across = _flash_backward(dout1, q1, k0, v0, out1, lse1, other_rest, False)
    dq = torch.cat([first[0], second[0] + across[0]], 2)
    return (
        dq,
        *(torch.cat([one + more, two], 2) for one, more, two in zip(first[1:], across[1:], second[1:], strict=True)),
    )


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> tuple[Any, ...]:
    if q.is_cuda:
        return tuple(torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal))
    return tuple(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal))


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rest: list[Any],
    is_causal: bool,
) -> Gradients:
    aten = torch.ops.aten
    if q.is_cuda:
        starts_q, starts_kv, longest_q, longest_kv, seed, offset, _ = rest
        backward = aten._scaled_dot_product_flash_attention_backward
        lengths = (starts_q, starts_kv, longest_q, longest_kv)
        return tuple(backward(dout, q, k, v, out, lse, *lengths, 0.0, is_causal, seed, offset))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(backward(dout, q, k, v, out, lse, 0.0, is_causal))


WAYS_IN: dict[str, Callable[..., Gradients]] = {
    "eager": eager,
    "function imported before": function_imported_before,
    "torch.compile, AOTAutograd, dynamic": compiled("aot_eager", dynamic=True),
    "torch.compile, inductor": compiled("inductor"),
    "compiled autograd": compiled_autograd,
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
    "checkpoint, selective": selectively_checkpointed,
    "autocast": autocast,
    "torch.func": functional,
    "is_grads_batched": batched,
    "torch.jit.trace": traced,
    "torch.jit.script": scripted,
    "torch.fx": symbolically_traced,
    "torch.export": exported,
    "ring attention": ring,
}
