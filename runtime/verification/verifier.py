"""The third gate: a kernel's gradients against an fp64 reference, on inputs and buffers that faults cannot hide in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ...db.records import VerificationRecord
from ...gen.problem import Problem
from ..kernel import Kernel, KernelError
from .cases import Case, cases
from .inputs import Inputs, make_inputs
from .reference import (
    GRADIENTS,
    BiasReference,
    Errors,
    HeadReference,
    SinkReference,
    bias_reference,
    head_reference,
    sink_reference,
)

_ERROR_FACTOR = 2.0  # the relative error may be so many times PyTorch's own ...
_ERROR_FLOOR = 0.25  # ... plus so many rounding steps of the dtype
_WORST_FACTOR = 4.0  # the same for the worst single element, whose extremes vary more
_WORST_FLOOR = 2.0

_SINK_ERROR = 2.0**-15  # of dsink, by the terms that are summed up in fp32
_BIAS_FLOOR = 1.0  # as _ERROR_FLOOR, of dbias: dS may be made of a P in 16 bits

_NEAR = 2.0  # an error that is less than so many times its limit may be over it by chance ...
_DRAWS = 16  # ... and is judged on so many inputs of its case, by root mean squares: both kernels' errors are random

# Of a deterministic kernel, by the device: fewer where a launch is emulated, which takes long.
_REPEATS = {"cuda": 3, "cpu": 1}

_GUARD_BYTES = 4096
_POISON_BYTE = 0xFF  # every float made of it is not a number


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A case's inputs, its reference, and the errors that PyTorch's own backward makes on it."""

    case: Case
    inputs: Inputs
    heads: tuple[HeadReference, ...]
    torch_errors: Errors
    sinks: SinkReference | None
    bias: BiasReference | None


class Verifier:
    """Checks kernels on one device; references are computed once and kept, as many candidates share them."""

    def __init__(self, device: torch.device | str) -> None:
        """Args:
        device: Where the kernels run: a CUDA device, or the CPU for libraries of the arch ``host``.
        """
        self.device = torch.device(device)
        self._small: dict[Case, _Prepared] = {}
        # Of the last problem only, whose tensors may be large:
        self._real_inputs: tuple[Case, Inputs] | None = None
        self._real: _Prepared | None = None

    def verify(self, problem: Problem, kernel: Kernel) -> VerificationRecord:
        """Checks a kernel on the small cases of a problem.

        Raises:
            torch.OutOfMemoryError: There is no memory for the cases.
        """
        for case in cases(problem, cuda=self.device.type == "cuda"):
            if case not in self._small:
                self._small[case] = _prepare(case, make_inputs(case, self.device))
        return _judge(kernel, [self._small[case] for case in cases(problem, cuda=self.device.type == "cuda")])

    def verify_on(self, cases: Sequence[Case], kernel: Kernel) -> VerificationRecord:
        """Checks a kernel on other cases, of which nothing is kept.

        Raises:
            torch.OutOfMemoryError: There is no memory for one of them.
        """
        return _judge(kernel, (_prepare(case, make_inputs(case, self.device)) for case in cases))

    def verify_at(self, problem: Problem, kernel: Kernel) -> VerificationRecord:
        """Checks a kernel at the problem's own sizes, on the first and the last head.

        Raises:
            torch.OutOfMemoryError: There is no memory for the problem.
        """
        inputs = self.inputs_at(problem)
        if self._real is None:
            self._real = _prepare(_real_case(problem), inputs)
        return _judge(kernel, [self._real])

    def inputs_at(self, problem: Problem) -> Inputs:
        """The inputs of `verify_at`, which are kept until another problem comes.

        Raises:
            torch.OutOfMemoryError: There is no memory for the problem.
        """
        case = _real_case(problem)
        if self._real_inputs is None or self._real_inputs[0] != case:
            self._real_inputs = self._real = None  # before the new ones take their memory
            self._real_inputs = (case, make_inputs(case, self.device))
        return self._real_inputs[1]


def _real_case(problem: Problem) -> Case:
    return Case(problem, "normal", every_head=False)


def _prepare(case: Case, inputs: Inputs) -> _Prepared:
    last = (case.problem.batch - 1, case.problem.heads_kv - 1)
    every = itertools.product(range(last[0] + 1), range(last[1] + 1))
    checked = every if case.every_head else sorted({(0, 0), last})
    heads = tuple(head_reference(case, inputs, sequence, head) for sequence, head in checked)
    sinks = sink_reference(inputs) if case.problem.sink else None
    bias = bias_reference(case, heads) if case.problem.bias_grad else None
    theirs = inputs.forward.backward(inputs.dout, inputs.dlse)
    results = dict(zip(GRADIENTS, theirs, strict=False)) | ({"dbias": theirs[-1]} if case.problem.bias_grad else {})
    return _Prepared(case, inputs, heads, _worst_errors(heads, bias, results), sinks, bias)


def _worst_errors(
    heads: tuple[HeadReference, ...], bias: BiasReference | None, results: Mapping[str, torch.Tensor]
) -> Errors:
    """The largest over the heads, each kind of error for itself: one wrong head must not vanish in an average."""
    by_head = [head.errors(tuple(results[name] for name in GRADIENTS)) for head in heads]
    worst = {
        name: (max(errors[name][0] for errors in by_head), max(errors[name][1] for errors in by_head))
        for name in GRADIENTS
    }
    if "dbias" in results:  # of all heads or, where not all are checked, of none
        worst["dbias"] = bias.errors(results["dbias"]) if bias else (0.0, 0.0)
    return worst


def _judge(kernel: Kernel, prepared: Iterable[_Prepared]) -> VerificationRecord:
    """Up to the first case with a fault."""
    errors: dict[str, dict[str, float]] = {}
    reason = ""
    for one in prepared:
        try:
            everything = _run(kernel, one)
            if kernel.info.deterministic:
                for _ in range(_REPEATS[one.inputs.q.device.type]):
                    _refuse_other_bits(everything, _run(kernel, one))
            measured, torch_errors = _worst_errors(one.heads, one.bias, everything), one.torch_errors
            faults = list(_faults(everything, measured, torch_errors))
            # At real sizes too many terms are summed up for chance.
            if faults and one.case.every_head and all(fault.excess < _NEAR for fault in faults):
                measured, torch_errors = _errors_over_draws(kernel, one, measured)
                faults = list(_faults(everything, measured, torch_errors))
            sink_error = one.sinks.error(everything["dsink"]) if one.sinks else 0.0
        except (KernelError, _Misbehaviour) as error:
            return VerificationRecord(False, math.inf, errors, f"{one.case.name}: {error}")
        errors[one.case.name] = {
            **{name: relative for name, (relative, _) in measured.items()},
            **{f"torch_{name}": relative for name, (relative, _) in torch_errors.items()},
        }
        if one.sinks:
            errors[one.case.name]["dsink"] = sink_error
            if not sink_error <= _SINK_ERROR:
                faults.append(_Fault(f"the error of dsink is {sink_error:.2g} of its terms", math.inf))
        if faults:
            reason = f"{one.case.name}: {faults[0].reason}"
            break
    max_error = max(case_errors[name] for case_errors in errors.values() for name in GRADIENTS)
    return VerificationRecord(not reason, max_error, errors, reason)


@dataclass(frozen=True)
class _Fault:
    """What a gradient is refused for, and how many times its limit the error is."""

    reason: str
    excess: float


def _faults(results: Mapping[str, torch.Tensor], measured: Errors, torch_errors: Errors) -> Iterator[_Fault]:
    step = torch.finfo(results[GRADIENTS[0]].dtype).eps / 2
    for name, errors in measured.items():
        yield from _faults_of(name, results[name], errors, torch_errors[name], step)


def _faults_of(
    name: str, result: torch.Tensor, measured: tuple[float, float], torch_errors: tuple[float, float], step: float
) -> Iterator[_Fault]:
    bad = result.numel() - int(result.isfinite().sum())
    if bad:
        yield _Fault(f"{bad} of {result.numel()} elements of {name} were not written or are not finite", math.inf)
        return
    # Where PyTorch itself overflows it is no yardstick.
    allowance = [error if math.isfinite(error) else 0.0 for error in torch_errors]
    relative, worst = measured
    floor = _BIAS_FLOOR if name == "dbias" else _ERROR_FLOOR
    limit = _ERROR_FACTOR * allowance[0] + floor * step
    worst_limit = _WORST_FACTOR * allowance[1] + _WORST_FLOOR * step
    if relative > limit:
        reason = f"the relative error of {name} is {relative:.2g}, PyTorch's {allowance[0]:.2g}"
        yield _Fault(reason, relative / limit)
    elif worst > worst_limit:
        reason = f"an element of {name} is off by {worst:.2g} of its terms, PyTorch's worst by {allowance[1]:.2g}"
        yield _Fault(reason, worst / worst_limit)


def _errors_over_draws(kernel: Kernel, one: _Prepared, measured: Errors) -> tuple[Errors, Errors]:
    """The kernel's and PyTorch's errors over several draws of a case's inputs, `one` and its errors among them.

    Where few terms decide a gradient, or all of them lie in one direction, its error is like a single throw of dice: a
    kernel whose errors are as large as PyTorch's is beaten by it several times over in some percent of all inputs.
    """
    drawn = [(measured, one.torch_errors)]
    for draw in range(1, _DRAWS):
        case = replace(one.case, draw=one.case.draw + draw)
        again = _prepare(case, make_inputs(case, one.inputs.q.device))
        drawn.append((_worst_errors(again.heads, again.bias, _run(kernel, again)), again.torch_errors))
    ours, theirs = (_root_mean_square(errors) for errors in zip(*drawn, strict=True))
    return ours, theirs


def _root_mean_square(drawn: Sequence[Errors]) -> Errors:
    def mean(name: str, kind: int) -> float:
        return math.sqrt(sum(errors[name][kind] ** 2 for errors in drawn) / len(drawn))

    return {name: (mean(name, 0), mean(name, 1)) for name in drawn[0]}


class _Misbehaviour(Exception):
    """The kernel touched memory that is not its to write, or is not as repeatable as it says."""


def _refuse_other_bits(first: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> None:
    for name, tensor in first.items():
        if not torch.equal(tensor.view(torch.int16), again[name].view(torch.int16)):
            raise _Misbehaviour(f"its {name} has other bits at another call, and it was to be deterministic")


def _run(kernel: Kernel, one: _Prepared) -> dict[str, torch.Tensor]:
    """A kernel's gradients, by name: it runs once into poisoned buffers, and must leave everything else alone."""
    inputs = one.inputs
    kept = inputs.read()
    given = {name: tensor.clone() for name, tensor in kept.items()}  # the next candidate's inputs are out of reach
    outputs = {name: _Guarded.like(tensor) for name, tensor in inputs.written().items()}
    sizes = one.case.problem
    workspace = _Guarded.flat(
        kernel.workspace_bytes(
            sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.seqlen_q, sizes.seqlen_kv, one.case.positions
        ),
        inputs.q.device,
    )
    kernel.launch(
        **given,
        **{name: output.tensor for name, output in outputs.items()},
        scale=one.case.scale,
        features=inputs.features,
        workspace=workspace.tensor,
    )
    if inputs.q.is_cuda:
        torch.cuda.synchronize(inputs.q.device)
    for name, tensor in given.items():
        if not torch.equal(tensor, kept[name]):
            raise _Misbehaviour(f"it changed its input {name}")
    for name, guarded in (*outputs.items(), ("the workspace", workspace)):
        if not guarded.intact():
            raise _Misbehaviour(f"it wrote outside {name}")
    return {name: output.tensor for name, output in outputs.items()}


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A poisoned tensor between two strips of memory that nothing may write to."""

    storage: torch.Tensor
    tensor: torch.Tensor

    @classmethod
    def flat(cls, size_bytes: int, device: torch.device) -> _Guarded:
        storage = torch.full((size_bytes + 2 * _GUARD_BYTES,), _POISON_BYTE, dtype=torch.uint8, device=device)
        return cls(storage, storage[_GUARD_BYTES : _GUARD_BYTES + size_bytes])

    @classmethod
    def like(cls, tensor: torch.Tensor) -> _Guarded:
        """Of a dense tensor's dtype, shape and strides."""
        flat = cls.flat(tensor.numel() * tensor.element_size(), tensor.device)
        return cls(flat.storage, flat.tensor.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()))

    def intact(self) -> bool:
        strips = self.storage[:_GUARD_BYTES], self.storage[-_GUARD_BYTES:]
        return all(bool((strip == _POISON_BYTE).all()) for strip in strips)
