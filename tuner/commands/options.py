"""What people type for more than one command: the options of a problem, of a card and of where things are kept."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ...gen.emulation import EMULATED_CARDS
from ...gen.errors import UsageError
from ...gen.families import PRESETS
from ...gen.lengths import HOW
from ...gen.problem import BOTTOM_RIGHT, TOP_LEFT, UNLIMITED, Problem, bias_pattern
from ..lab.timing import TIMING_STYLES

_R = TypeVar("_R")

EXAMPLE_SHAPE = "8_16_4096_128"
NAMED_KERNEL = (
    f"best (the stored winner), a preset ({', '.join(PRESETS)}), a preset and what differs from it ('v3 stages=3'), "
    "or a configuration's id"
)
"""What ``--kernel`` takes."""

DatabaseOption = Annotated[
    str | None,
    typer.Option("--db", help="Database file or URL. Default: BWDTUNE_DB, else a file in the user's data folder."),
]
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", help="Where compiled kernels are kept. Default: BWDTUNE_CACHE, else in ~/.cache."),
]
LimitsOption = Annotated[
    str | None, typer.Option("--limits", help=f"Keep to another card's limits: {', '.join(EMULATED_CARDS)}.")
]
EmulateOption = Annotated[
    str | None,
    typer.Option(
        "--emulate", help=f"Slow the GPU to another card's mma rate and rank by cycles: {', '.join(EMULATED_CARDS)}."
    ),
]
TimingOption = Annotated[
    str,
    typer.Option(
        "--timing",
        help=f"How kernels are timed, words between commas: {'; '.join(map(' or '.join, TIMING_STYLES.values()))}.",
    ),
]
MinGainOption = Annotated[
    float,
    typer.Option(
        "--min-gain",
        help="End when the remaining trials are expected to gain less than this (0.001: 0.1 %); 0 tries them all.",
    ),
]
ArchOption = Annotated[str | None, typer.Option("--arch", help="Compile target, such as sm_120a. Default: the GPU's.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
KernelOption = Annotated[str, typer.Option("--kernel", "--config", help=f"{NAMED_KERNEL}.")]


def for_problem(default_shape: str | None = None) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Has a command take the options that describe a problem, in place of its first parameter, the `Problem`.

    Args:
        default_shape: Of a command that can do without a shape.
    """

    def decorate(command: Callable[..., _R]) -> Callable[..., _R]:
        described = dict(inspect.signature(_problem, eval_str=True).parameters)
        if default_shape is not None:
            described["shape"] = described["shape"].replace(default=default_shape)
        return _with_options(command, described, lambda options: _problem(**options))

    return decorate


def for_shapes(command: Callable[..., _R]) -> Callable[..., _R]:
    """Has a command take the options that describe problems but for a shape, in place of its first parameter.

    That parameter is a function from a shape to the `Problem` that it and the options describe.
    """
    described = dict(inspect.signature(_problem, eval_str=True).parameters)
    del described["shape"]
    return _with_options(command, described, lambda options: functools.partial(_problem, **options))


def _with_options(
    command: Callable[..., _R],
    described: dict[str, inspect.Parameter],
    first: Callable[[dict[str, Any]], Any],
) -> Callable[..., _R]:
    """A command whose first parameter is made of options."""
    _, *others = inspect.signature(command, eval_str=True).parameters.values()

    def with_options(**given: Any) -> _R:
        return command(first({name: given.pop(name) for name in described}), **given)

    # All that typer looks at; only keywords may follow in any order, with defaults or without.
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (*described.values(), *others)]
    )
    return with_options


def _problem(
    shape: Annotated[
        str, typer.Option("--shape", help="B_H_S_D, or B_HQ_HKV_S_D for grouped queries; S may be SQxSKV, D DxDV.")
    ],
    causal: Annotated[bool, typer.Option("--causal", help="A query sees no key past its diagonal.")] = False,
    window: Annotated[
        str | None,
        typer.Option(
            "--window", help="LEFT,RIGHT: how many keys before and after its diagonal a query sees; -1 for all."
        ),
    ] = None,
    alignment: Annotated[
        str,
        typer.Option("--alignment", help="Where the diagonal lies if Sq and Skv differ: top-left or bottom-right."),
    ] = TOP_LEFT,
    softcap: Annotated[bool, typer.Option("--softcap", help="Scores are capped: c * tanh(score / c).")] = False,
    varlen: Annotated[
        bool, typer.Option("--varlen", help="Packed sequences of different lengths: B of them, none longer than S.")
    ] = False,
    lengths: Annotated[
        str,
        typer.Option(
            "--lengths",
            help=f"With --varlen, lengths to time: {HOW}; @FILE reads them. S is a bound. Default: b/B of S each.",
        ),
    ] = "",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Gradients have the same bits on every run.")
    ] = False,
    lse_grad: Annotated[
        bool, typer.Option("--lse-grad", help="The log-sum-exp is a second output, into which a gradient flows.")
    ] = False,
    sink: Annotated[
        bool,
        typer.Option(
            "--sink", help="Each query head has a learnable sink: one more score in its softmaxes, without a value."
        ),
    ] = False,
    alibi: Annotated[
        bool, typer.Option("--alibi", help="Scores have ALiBi's linear bias, with one slope for each head.")
    ] = False,
    bias: Annotated[
        str,
        typer.Option(
            "--bias", help="B_H_SQ_SKV: shape of a bias that is added to the scores, with 1 where it is broadcast."
        ),
    ] = "",
    bias_dtype: Annotated[
        str, typer.Option("--bias-dtype", help="With --bias: bf16, fp16 or fp32. Default: that of q.")
    ] = "",
    bias_grad: Annotated[bool, typer.Option("--bias-grad", help="With --bias: compute its gradient too.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")] = "bf16",
) -> Problem:
    """The problem that these options describe."""
    left, right = UNLIMITED, UNLIMITED
    if window is not None:
        limits = re.fullmatch(r"(-1|\d+),(-1|\d+)", window, re.ASCII)
        if not limits:
            raise UsageError(f"malformed window {window!r}: write LEFT,RIGHT, such as 1024,0 or -1,128")
        left, right = int(limits[1]), int(limits[2])
    if alignment not in (TOP_LEFT, BOTTOM_RIGHT):
        raise UsageError(f"unknown alignment {alignment!r}: use {TOP_LEFT} or {BOTTOM_RIGHT}")
    problem = Problem.parse(
        shape,
        dtype=dtype,
        causal=causal,
        window_left=left,
        window_right=right,
        bottom_right=alignment == BOTTOM_RIGHT,
        softcap=softcap,
        varlen=varlen,
        deterministic=deterministic,
        lse_grad=lse_grad,
        sink=sink,
        alibi=alibi,
        lengths_as=_read_lengths(lengths),
    )
    if bias or bias_dtype or bias_grad:
        pattern = _read_bias(bias, problem) if bias else ""
        problem = replace(problem, bias=pattern, bias_dtype=bias_dtype, bias_grad=bias_grad)
    if not lengths:
        return problem
    # The longest is known: it is what a caller would give.
    longest_q, longest_kv = (max(part) for part in zip(*problem.lengths, strict=True))
    return replace(problem, seqlen_q=longest_q, seqlen_kv=longest_kv)


def _read_bias(given: str, problem: Problem) -> str:
    """Which bias a shape is: `gen.problem.Problem.bias`."""
    if not re.fullmatch(r"\d+(_\d+){3}", given, re.ASCII):
        raise UsageError(f"malformed bias {given!r}: write B_H_SQ_SKV, such as 1_16_2048_2048")
    shape = [int(size) for size in given.split("_")]
    return bias_pattern(shape, problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv)


def _read_lengths(given: str) -> str:
    """With what is in the file, where one is named."""
    if not given.startswith("@"):
        return given
    try:
        return ",".join(re.split(r"[\s,]+", Path(given[1:]).read_text(encoding="utf-8").strip()))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read lengths from {given[1:]}: {error}") from None
