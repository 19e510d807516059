"""Lengths of packed sequences to time: drawn from a distribution, or given by the user."""

from __future__ import annotations

import functools
import math
import random
import re

from .errors import UsageError

HOW = "equal, lognormal:MEDIAN[:SIGMA[:SEED]], or the lengths themselves between commas"
"""What `lengths` takes, in words."""

_NUMBER = r"\d+(?:\.\d+)?"
_DRAWN = re.compile(rf"lognormal:({_NUMBER})(?::({_NUMBER})(?::(\d+))?)?", re.ASCII)
_LISTED = re.compile(r"\d+(?:,\d+)*", re.ASCII)


@functools.lru_cache(maxsize=16)
def lengths(how: str, count: int, longest: int) -> tuple[int, ...]:
    """The lengths of so many sequences; the same at each call, on every machine.

    Args:
        how: ``equal``: all are the longest. ``lognormal:600:1:7``: drawn with a median of 600, a sigma of 1 (as by
            default) and the seed 7 (0 by default). ``512,77,1``: these. Empty: the b-th of B has (b + 1) B-ths of the
            longest.
        count: How many.
        longest: What none exceeds; drawn ones are cut off there.

    Raises:
        UsageError: ``how`` is none of these, or does not go with the number or the longest.
    """
    if not how:
        return tuple(-(-longest * part // count) for part in range(1, count + 1))
    if how == "equal":
        return (longest,) * count
    if drawn := _DRAWN.fullmatch(how):
        median, sigma, seed = float(drawn[1]), float(drawn[2] or 1), int(drawn[3] or 0)
        if not median:
            raise UsageError(f"lengths {how!r}: the median must be positive")
        generator = random.Random(seed)
        values = (median * math.exp(sigma * generator.gauss(0, 1)) for _ in range(count))
        return tuple(min(max(round(value), 1), longest) for value in values)
    if _LISTED.fullmatch(how):
        listed = tuple(map(int, how.split(",")))
        if len(listed) != count or max(listed) > longest:
            raise UsageError(f"{len(listed)} lengths up to {max(listed)}: the shape says {count} up to {longest}")
        if not max(listed):
            raise UsageError("all lengths are 0: there is nothing to compute")
        return listed
    raise UsageError(f"unknown lengths {how!r}: use {HOW}")
