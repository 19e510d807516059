"""Databases to report, made with stand-ins for compiler and GPU."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from search_fakes import PROBLEM, FakeBench, FakeBuilder, parameter, run_search

from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.families import PRESETS

OTHER_PROBLEM = replace(PROBLEM, head_dim=64)

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'{{ 7*7 }}&amp;"
"""Text that would do something if it were taken for HTML, a script or a template."""


def search_all_ways(database: Path) -> None:
    """Two problems; of the first also an emulated search, and a survey without a GPU."""
    builder = FakeBuilder(
        broken=lambda config: parameter(config, "stages") == 3,
        spills=lambda config, arch: 400 if parameter(config, "stages") == 1 else 0,
    )
    bench = FakeBench(
        wrong=lambda config: config == PRESETS["t64"],
        crashing=lambda config: config == PRESETS["t128"],
    )
    run_search(database, trials=30, builder=builder, bench=bench, sampler="random")
    run_search(database, trials=6, problem=OTHER_PROBLEM)
    run_search(database, trials=6, emulate="sm_120")
    run_search(database, trials=6, device=RTX_5090, bench=FakeBench(), measured=False)


def search_on_a_hostile_card(database: Path) -> None:
    """A search on a card of a hostile name, with hostile verdicts."""

    class Bench(FakeBench):
        def verify(self, problem, variant):
            verdict = super().verify(problem, variant)
            return verdict if verdict.passed else replace(verdict, reason=HOSTILE)

    bench = Bench(wrong=lambda config: config in (PRESETS["t64"], PRESETS["t128"]))
    run_search(database, trials=16, device=replace(H200, name=f"NVIDIA {HOSTILE}"), bench=bench, sampler="random")


def make_hostile(database: Path) -> None:
    """Puts hostile texts wherever the database takes a text, and where SQLite takes one in place of a number."""
    texts = {
        "variants": ("error",),
        "verifications": ("reason",),
        "measurements": ("driver", "toolkit", "torch"),
        "searches": ("sampler", "host", "gpu_uuid", "driver", "bwdtune", "toolkit", "torch", "optuna", "error"),
    }
    numbers = {"variants": ("registers", "spill_bytes"), "searches": ("power_limit_w", "decided")}
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for columns_of in (texts, numbers):
            for table, columns in columns_of.items():
                for column in columns:
                    connection.execute(f"UPDATE {table} SET {column} = ?", (HOSTILE,))
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE key IN ('reason', 'kind', 'conditions')",
            (json.dumps(HOSTILE),),
        )
        query = "SELECT study_id, value_json FROM study_user_attributes WHERE key = 'races'"
        ((study, races),) = connection.execute(query).fetchall()
        (race,) = json.loads(races)
        race |= {"date": f"3000 {HOSTILE}", "policy": HOSTILE, "default_kernel": HOSTILE}
        race["median_ms"] |= {HOSTILE: 1.0, "v3": HOSTILE, "cudnn": -1.0}
        race["interval_ms"] |= {"fa": [HOSTILE, 1.0], "default": HOSTILE}
        race["ratio_to_winner"] |= {"fa": HOSTILE}
        broken = [HOSTILE, {"winner": HOSTILE, "median_ms": {HOSTILE: 1.0}}, {"median_ms": [HOSTILE]}, [race]]
        connection.execute(
            "UPDATE study_user_attributes SET value_json = ? WHERE study_id = ?", (json.dumps([*broken, race]), study)
        )
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # Optuna's connections are still open
