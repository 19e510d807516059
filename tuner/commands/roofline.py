"""``tuner roofline``: the speed of light of a problem."""

from __future__ import annotations

from ...gen.problem import Problem
from ..roofline import roofline
from .cards import described_card
from .options import ArchOption, JsonOption, for_problem
from .output import print_result


@for_problem()
def command(problem: Problem, arch: ArchOption = None, as_json: JsonOption = False) -> None:
    """Print what a shape costs at the card's peak rates: operations, bytes, and the least time of each."""
    found = roofline(problem, described_card(arch))
    print_result(found.to_dict(), [found.table()], as_json)
