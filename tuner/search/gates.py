"""The bounds of the compiler gate."""

from __future__ import annotations

SPILL_BOUND_BYTES = 32
"""Spill stores and loads that the compiler gate lets pass: four registers, stored and loaded once. ptxas puts so few
outside the main loop, where their cost cannot be measured; more of them lie in it and are paid for with every tile."""

EMULATED_SPILL_BOUND_BYTES = 128
"""The same of an emulated build, whose dummy mma take eight registers that the kernel itself does not need: a few of a
kernel that uses all of them are then spilled, and take a hundredth of a slowed tile's time at most. The kernel itself
may not spill."""
