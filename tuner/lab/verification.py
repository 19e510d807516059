"""The third gate: a kernel's gradients against an fp64 reference, on inputs and buffers that faults cannot hide in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...db.records import VerificationRecord
from ...gen.problem import UNLIMITED, WINDOW, Problem
from ...runtime import torch_attention
from ...runtime.features import Features, Sequences
from ...runtime.kernel import TORCH_DTYPES, Kernel, KernelError

GRADIENTS = ("dq", "dk", "dv")

_ERROR_FACTOR = 2.0  # the relative error may be so many times PyTorch's own ...
_ERROR_FLOOR = 0.25  # ... plus so many rounding steps of the dtype
_WORST_FACTOR = 4.0  # the same for the worst single element, whose extremes vary more
_WORST_FLOOR = 2.0
_CANCELLATION = 8.0  # a gradient smaller than its terms by more than this is measured against the terms
_FAINT_ELEMENTS = 16.0  # an element's terms count as no smaller than the tensor's average over this

_NEAR = 2.0  # an error that is less than so many times its limit may be over it by chance ...
_DRAWS = 16  # ... and is judged on so many inputs of its case, by root mean squares: both kernels' errors are random

_FAR_SCORE = 150.0  # at the default scale; exp(89) overflows in fp32
_SOFTCAP = 2.0  # well within the scores of every kind of input
_REPEATS = 3  # of a deterministic kernel

_GUARD_BYTES = 4096
_POISON_BYTE = 0xFF  # every float made of it is not a number
_CHUNK_ELEMENTS = 2**25  # of a score matrix in fp64: 256 MiB


@dataclass(frozen=True)
class Case:
    """One input that a kernel is checked on.

    Attributes:
        problem: The sizes, and the dtype, head_dim and mask of the problem that is tuned.
        inputs: Kind of content: a key of `INPUTS`.
        heads_inside: Lay tensors out as (B, S, H, D), as models and PyTorch's forward do, instead of (B, H, S, D).
        scale_factor: On the default softmax scale.
        every_head: Compare all heads; else the first and the last of the batch, which real sizes have time for.
        lengths: Sq and Skv of each sequence, where they vary and are not those that `Problem.lengths` makes up.
        draw: Which of all inputs of this kind: a number.
    """

    problem: Problem
    inputs: str
    heads_inside: bool = False
    scale_factor: float = 1.0
    every_head: bool = True
    lengths: tuple[tuple[int, int], ...] = ()
    draw: int = 0

    @property
    def name(self) -> str:
        lengths = f" of {', '.join(f'{q}x{kv}' for q, kv in self.lengths)}" if self.lengths else ""
        layout = " (B, S, H, D)" if self.heads_inside else ""
        scale = f" scale x{self.scale_factor:g}" if self.scale_factor != 1 else ""
        draw = f" draw {self.draw}" if self.draw else ""
        return f"{self.problem.label}{lengths} {self.inputs}{layout}{scale}{draw}"

    @property
    def scale(self) -> float:
        return self.problem.softmax_scale * self.scale_factor

    @property
    def positions(self) -> tuple[int, int]:
        """Rows of q and of k of a tensor."""
        if not self.lengths:
            return self.problem.positions
        return sum(seqlen_q for seqlen_q, _ in self.lengths), sum(seqlen_kv for _, seqlen_kv in self.lengths)

    def slices(self) -> list[tuple[int, slice, slice]]:
        """For each sequence its batch, and its rows of q and of k."""
        problem = self.problem
        if not problem.varlen:
            whole = slice(0, problem.seqlen_q), slice(0, problem.seqlen_kv)
            return [(batch, *whole) for batch in range(problem.batch)]
        starts_q, starts_kv = self._starts()
        return [
            (0, slice(*edges_q), slice(*edges_kv))
            for edges_q, edges_kv in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_kv), strict=True)
        ]

    def features(self, device: torch.device) -> Features:
        """What a kernel and PyTorch are told besides the scale."""
        problem = self.problem
        sequences = None
        if problem.varlen:
            starts_q, starts_kv = (torch.tensor(starts, dtype=torch.int32, device=device) for starts in self._starts())
            sequences = Sequences(starts_q, starts_kv, problem.seqlen_q, problem.seqlen_kv)
        window = (problem.window_left, problem.right if problem.mask == WINDOW else UNLIMITED)
        return Features(window, problem.bottom_right, _SOFTCAP if problem.softcap else 0.0, sequences)

    def _starts(self) -> tuple[list[int], list[int]]:
        lengths_q, lengths_kv = zip(*(self.lengths or self.problem.lengths), strict=True)
        return list(itertools.accumulate(lengths_q, initial=0)), list(itertools.accumulate(lengths_kv, initial=0))


def cases(problem: Problem, *, cuda: bool) -> tuple[Case, ...]:
    """The small problems on which a kernel for `problem` must be right: of the same kind, and the same group of heads.

    Together they have tails in both lengths for every tile, one token, fewer and more queries than keys, several
    heads and batches, both layouts, and contents in which bugs show that Gaussian noise hides. A window's limits are
    small enough to count, sequences of several lengths have empty ones among them.

    Args:
        problem: What is tuned; its lengths, batch, number of heads and window are replaced.
        cuda: Add a length of many tiles, for which a CPU is too slow.
    """
    group = problem.heads_q // problem.heads_kv

    def case(
        lengths: Sequence[tuple[int, int]],
        heads_kv: int,
        inputs: str,
        window: tuple[int, int] = (70, 37),
        **options: Any,
    ) -> Case:
        longest_q, longest_kv = (max(length) for length in zip(*lengths, strict=True))
        if not problem.varlen:  # the longest one, and as often as there are sequences
            lengths = lengths if len(set(lengths)) == 1 else [(longest_q, longest_kv)]
        left, right = (
            limit if own == UNLIMITED else min(limit, own)
            for limit, own in zip(window, (problem.window_left, problem.window_right), strict=True)
        )
        sized = replace(
            problem,
            batch=len(lengths),
            heads_q=heads_kv * group,
            heads_kv=heads_kv,
            seqlen_q=longest_q,
            seqlen_kv=longest_kv,
            window_left=UNLIMITED if problem.window_left == UNLIMITED else left,
            window_right=UNLIMITED if problem.window_right == UNLIMITED else right,
        )
        return Case(sized, inputs, lengths=tuple(lengths) if problem.varlen else (), **options)

    small: tuple[Case, ...] = (
        case([(1, 1)], 1, "normal"),
        case([(17, 129)] * 2, 2, "normal", scale_factor=0.5),
        case([(333, 333)] * 2, 2, "normal", (1, 1)),
        case([(0, 5), (256, 256), (64, 64), (7, 0)], 2, "large features", heads_inside=True),
        case([(321, 250), (1, 1), (100, 33)], 1, "equal tokens", (129, 200)),
        case([(33, 128), (129, 391)], 2, "near one-hot", heads_inside=True),
    )
    if not problem.softcap:  # a cap leaves no score far below zero
        small = (*small, case([(167, 101), (40, 77)], 1, "far below zero"))
    return (*small, case([(1187, 1187), (0, 0), (77, 1000)], 2, "normal", (500, 300))) if cuda else small


def _normal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    del q, k, v, dout  # as they were drawn


def _large_features(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """A few channels far larger than the others, as trained models have them."""
    channels = slice(3, 6)
    for tensor, factor in ((q, 4.0), (k, 4.0), (v, 16.0), (dout, 16.0)):
        tensor[..., channels] *= factor


def _equal_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """A long run of one token (padding, silence): most of dS cancels."""
    del dout
    run = slice(0, max(1, k.shape[2] * 3 // 4))
    k[:, :, run] = k[:, :, :1].clone()
    v[:, :, run] = v[:, :, :1].clone()
    q[:, :, : q.shape[2] // 2] = q[:, :, :1].clone()


def _near_one_hot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """Each query is some key that it sees, weakly or strongly scaled: one probability is almost one."""
    del v, dout
    rows = torch.arange(q.shape[2], device=q.device)
    keys = rows * 7919 % (rows + 1).clamp(max=k.shape[2])
    strength = torch.where(rows % 2 == 0, 1.0, 2.5)[:, None]
    q.copy_(k.repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, keys] * strength)


def _far_below_zero(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """Every score is about -150, where exp(0 - lse) overflows: a key past the end, whose score is 0, must not count."""
    del v, dout
    offset = _FAR_SCORE**0.5 / q.shape[-1] ** 0.25
    q.mul_(0.1).sub_(offset)
    k.add_(offset)


INPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "normal": _normal,
    "large features": _large_features,
    "equal tokens": _equal_tokens,
    "near one-hot": _near_one_hot,
    "far below zero": _far_below_zero,
}


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a backward is given, on one device. Sequences of several lengths are a batch of one, and S counts them all.

    Attributes:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, D).
        dout: (B, Hq, Sq, D).
        features: The window, the cap and the sequences.
        forward: PyTorch's forward of q, k and v.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    features: Features
    forward: torch_attention.Forward


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draws a case's inputs: the same at each call on one kind of device."""
    problem, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
    generator = torch.Generator(device).manual_seed(20 + case.draw)
    batch, (positions_q, positions_kv) = 1 if problem.varlen else problem.batch, case.positions
    queries = (batch, problem.heads_q, positions_q, problem.head_dim)
    keys = (batch, problem.heads_kv, positions_kv, problem.head_dim)

    def draw(shape: tuple[int, int, int, int]) -> torch.Tensor:
        batch, heads, seqlen, head_dim = shape
        stored = (batch, seqlen, heads, head_dim) if case.heads_inside else shape
        values = torch.randn(stored, device=device, dtype=dtype, generator=generator)
        return values.transpose(1, 2) if case.heads_inside else values

    q, k, v, dout = (draw(shape) for shape in (queries, keys, keys, queries))
    INPUTS[case.inputs](q, k, v, dout)
    features = case.features(device)
    forward = torch_attention.forward(q, k, v, problem.causal, case.scale, features)
    return Inputs(q, k, v, dout, features, forward)


Errors = dict[str, tuple[float, float]]
"""Of dq, dk and dv: the relative L2 error, and the worst element's."""


@dataclass(frozen=True, eq=False)
class HeadReference:
    """The exact gradients of one key/value head and the query heads that share it, in fp64, of one sequence.

    Attributes:
        batch: Index.
        rows: The sequence's rows of q.
        keys: Its rows of k.
        head_kv: Index; the query heads are ``head_kv * G`` to ``(head_kv + 1) * G - 1``.
        gradients: dq (G, Sq, D), dk (Skv, D), dv (Skv, D).
        terms: For each element the root of the sum of squares of what is summed up for it: how large the gradient
            would be if nothing cancelled, and so the scale of unavoidable rounding.
    """

    batch: int
    rows: slice
    keys: slice
    head_kv: int
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    terms: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def errors(self, results: tuple[torch.Tensor, ...]) -> Errors:
        """What is wrong with the gradients of the whole batch."""
        measured = {}
        group = self.gradients[0].shape[0]
        query_heads = slice(self.head_kv * group, (self.head_kv + 1) * group)
        for name, result, exact, terms in zip(GRADIENTS, results, self.gradients, self.terms, strict=True):
            heads, rows = (query_heads, self.rows) if name == "dq" else (self.head_kv, self.keys)
            difference = result[self.batch, heads, ..., rows, :].double() - exact
            size = max(float(exact.norm()), float(terms.norm()) / _CANCELLATION)
            if not size:  # nothing is summed up for any of them: they are zero to the last bit
                measured[name] = (0.0, 0.0) if not bool(difference.any()) else (math.inf, math.inf)
                continue
            faint = terms.square().mean().sqrt() / _FAINT_ELEMENTS
            relative = float(difference.norm()) / size
            worst = float((difference.abs() / torch.hypot(terms, faint)).max())
            measured[name] = (relative, worst) if math.isfinite(relative) else (math.inf, math.inf)
        return measured


def head_reference(case: Case, inputs: Inputs, sequence: int, head_kv: int) -> HeadReference:
    """The textbook backward of one group of heads of one sequence in fp64.

    A block of rows at a time, so that memory stays bounded.

    Args:
        case: Whose.
        inputs: Of `make_inputs`.
        sequence: Index; where all have the same length, of the batch.
        head_kv: Index.
    """
    problem, scale = case.problem, case.scale
    group = problem.heads_q // problem.heads_kv
    batch, rows, keys = case.slices()[sequence]
    heads = slice(head_kv * group, (head_kv + 1) * group)
    k, v = (tensor[batch, head_kv, keys].double() for tensor in (inputs.k, inputs.v))
    queries, douts = (tensor[batch, heads, rows].double() for tensor in (inputs.q, inputs.dout))
    seqlen_q, seqlen_kv = queries.shape[1], k.shape[0]
    low, high = problem.band(seqlen_q, seqlen_kv)
    dk, dv, dk_terms, dv_terms = (torch.zeros_like(k) for _ in range(4))
    dq, dq_terms = torch.zeros_like(queries), torch.zeros_like(queries)
    columns = torch.arange(seqlen_kv, device=k.device)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, seqlen_kv))
    for head in range(group):
        for start in range(0, seqlen_q if seqlen_kv else 0, chunk):
            block = slice(start, min(start + chunk, seqlen_q))
            q, dout = queries[head, block], douts[head, block]
            s, slope = q @ k.mT * scale, torch.ones((), dtype=k.dtype, device=k.device)
            if problem.softcap:
                capped = torch.tanh(s / _SOFTCAP)
                s, slope = capped * _SOFTCAP, 1 - capped.square()
            positions = torch.arange(block.start, block.stop, device=k.device)[:, None]
            s.masked_fill_((columns < positions + low) | (columns > positions + high), -math.inf)
            p = s.softmax(-1).nan_to_num(0.0)  # of a row that sees no key
            dp = dout @ v.mT
            delta = (dout * (p @ v)).sum(-1, keepdim=True)
            ds = p * (dp - delta) * slope * scale
            ds_squares = (p * slope * scale).square() * (dp.square() + delta.square())
            dq[head, block] = ds @ k
            dq_terms[head, block] = ds_squares @ k.square()
            dk += ds.mT @ q
            dk_terms += ds_squares.mT @ q.square()
            dv += p.mT @ dout
            dv_terms += p.square().mT @ dout.square()
    terms = (dq_terms.sqrt(), dk_terms.sqrt(), dv_terms.sqrt())
    return HeadReference(batch, rows, keys, head_kv, (dq, dk, dv), terms)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A case's inputs, its reference, and the errors that PyTorch's own backward makes on it."""

    case: Case
    inputs: Inputs
    heads: tuple[HeadReference, ...]
    torch_errors: Errors


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
    return _Prepared(case, inputs, heads, _worst_errors(heads, inputs.forward.backward(inputs.dout)))


def _worst_errors(heads: tuple[HeadReference, ...], results: tuple[torch.Tensor, ...]) -> Errors:
    """The largest over the heads, each kind of error for itself: one wrong head must not vanish in an average."""
    by_head = [head.errors(results) for head in heads]
    return {
        name: (max(errors[name][0] for errors in by_head), max(errors[name][1] for errors in by_head))
        for name in GRADIENTS
    }


def _judge(kernel: Kernel, prepared: Iterable[_Prepared]) -> VerificationRecord:
    errors: dict[str, dict[str, float]] = {}
    reasons: list[str] = []
    for one in prepared:
        try:
            results = _run(kernel, one)
            if kernel.info.deterministic:
                for _ in range(_REPEATS):
                    _refuse_other_bits(results, _run(kernel, one))
            measured, torch_errors = _worst_errors(one.heads, results), one.torch_errors
            faults = list(_faults(results, measured, torch_errors))
            # At real sizes too many terms are summed up for chance.
            if faults and one.case.every_head and all(fault.excess < _NEAR for fault in faults):
                measured, torch_errors = _errors_over_draws(kernel, one, measured)
                faults = list(_faults(results, measured, torch_errors))
        except (KernelError, _Misbehaviour) as error:
            return VerificationRecord(False, math.inf, errors, f"{one.case.name}: {error}")
        errors[one.case.name] = {
            **{name: relative for name, (relative, _) in measured.items()},
            **{f"torch_{name}": relative for name, (relative, _) in torch_errors.items()},
        }
        reasons += (f"{one.case.name}: {fault.reason}" for fault in faults)
    max_error = max(case_errors[name] for case_errors in errors.values() for name in GRADIENTS)
    return VerificationRecord(not reasons, max_error, errors, reasons[0] if reasons else "")


@dataclass(frozen=True)
class _Fault:
    """What a gradient is refused for, and how many times its limit the error is."""

    reason: str
    excess: float


def _faults(results: tuple[torch.Tensor, ...], measured: Errors, torch_errors: Errors) -> Iterator[_Fault]:
    step = torch.finfo(results[0].dtype).eps / 2
    for name, result in zip(GRADIENTS, results, strict=True):
        bad = result.numel() - int(result.isfinite().sum())
        if bad:
            yield _Fault(f"{bad} of {result.numel()} elements of {name} were not written or are not finite", math.inf)
            continue
        # Where PyTorch itself overflows it is no yardstick.
        allowance = [error if math.isfinite(error) else 0.0 for error in torch_errors[name]]
        relative, worst = measured[name]
        limit = _ERROR_FACTOR * allowance[0] + _ERROR_FLOOR * step
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
        drawn.append((_worst_errors(again.heads, _run(kernel, again)), again.torch_errors))
    ours, theirs = (_root_mean_square(errors) for errors in zip(*drawn, strict=True))
    return ours, theirs


def _root_mean_square(drawn: Sequence[Errors]) -> Errors:
    def mean(name: str, kind: int) -> float:
        return math.sqrt(sum(errors[name][kind] ** 2 for errors in drawn) / len(drawn))

    return {name: (mean(name, 0), mean(name, 1)) for name in GRADIENTS}


class _Misbehaviour(Exception):
    """The kernel touched memory that is not its to write, or is not as repeatable as it says."""


def _refuse_other_bits(first: tuple[torch.Tensor, ...], again: tuple[torch.Tensor, ...]) -> None:
    for name, a, b in zip(GRADIENTS, first, again, strict=True):
        if not torch.equal(a.view(torch.int16), b.view(torch.int16)):
            raise _Misbehaviour(f"its {name} has other bits at another call, and it was to be deterministic")


def _run(kernel: Kernel, one: _Prepared) -> tuple[torch.Tensor, ...]:
    """Runs a kernel once into poisoned buffers and checks that it left everything else alone."""
    inputs = one.inputs
    kept = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
    kept |= {"o": inputs.forward.output, "lse": inputs.forward.lse}
    given = {name: tensor.clone() for name, tensor in kept.items()}  # the next candidate's inputs are out of reach
    outputs = {name: _Guarded.like(given[name[1:]]) for name in GRADIENTS}
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
    return tuple(output.tensor for output in outputs.values())


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
