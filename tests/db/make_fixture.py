"""Makes `fixtures/schema_N.sqlite`, a database of this version's schema N.

Run it once when the schema has changed, and commit the file:

    python tests/db/make_fixture.py

The files of past schemas are never made anew: they are what older versions have written.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import optuna

from bwdtune.db.models import SCHEMA
from bwdtune.db.records import (
    EMULATED,
    NO_FUSED_BACKWARD,
    Environment,
    GpuKey,
    Holder,
    MeasurementRecord,
    SearchRecord,
    VariantRecord,
    VerificationRecord,
)
from bwdtune.db.store import Store
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem


def main() -> None:
    path = Path(__file__).parent / "fixtures" / f"schema_{int(SCHEMA)}.sqlite"
    if path.exists():
        raise SystemExit(f"{path} is there already, and is never changed")
    store = Store.open(path)
    environment = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.13.0")
    square = Problem.parse("8_16_4096_128", causal=True)
    other = replace(square, heads_kv=4, seqlen_kv=8192, dtype="fp16", causal=False)
    featured = replace(square, window_left=512, bottom_right=True, softcap=True, varlen=True, deterministic=True)
    featured = replace(featured, lse_grad=True, sink=True, alibi=True)
    other = replace(other, value_head_dim=64, bias="1_H_S", bias_dtype="fp32", bias_grad=True)
    for problem in (square, other, featured):
        search = store.begin_search(
            SearchRecord(
                problem=problem,
                study="a study",
                arch="sm_90a",
                sampler="tpe",
                seed=2**32 - 1,
                options={"trials": 60, "time_s": None, "limits": None, "emulate": None},
                host="a host",
                gpu=environment.gpu,
                gpu_uuid="GPU-01234567-89ab-cdef-0123-456789abcdef",
                driver=environment.driver,
                power_limit_w=700.0,
                bwdtune="0.1.0",
                toolkit=environment.toolkit,
                torch=environment.torch,
                optuna="4.0.0",
            )
        )
        for time_ms, name in ((6, "v3"), (5, "v2"), (4, "v1")):  # their sources are nobody's: the last one wins
            variant = store.record_variant(
                problem,
                VariantRecord(
                    PRESETS[name],
                    f"source of {name}",
                    "templates",
                    "sm_90a",
                    "13.0.88",
                    registers=168,
                    threads=256,
                    machine_code=f"machine code of {name}",
                ),
            )
            verification = store.record_verification(
                problem, variant, VerificationRecord(True, 2e-3, {"normal": {"dq": 2e-3}})
            )
            measurement = store.record_measurement(
                problem,
                variant,
                MeasurementRecord(
                    environment,
                    "search-1",
                    time_ms,
                    time_ms - 0.1,
                    time_ms + 0.1,
                    20,
                    default_ms=None if problem.softcap else 4.5,
                    default_kernel=NO_FUSED_BACKWARD if problem.softcap else "cudnn",
                ),
                search,
            )
            store.set_winner(problem, environment, None, measurement, verification)
        if problem != featured:  # which is as a search that was killed leaves it
            store.end_search(search, status="complete", decided=3)
    emulated = replace(square, batch=1)
    variant = store.record_variant(
        emulated, VariantRecord(PRESETS["v3"], "with dummies", "templates", "sm_90a", "13.0.88")
    )
    verification = store.record_verification(emulated, variant, VerificationRecord(True, 2e-3))
    record = MeasurementRecord(
        environment, "race-1", 14.0, 13.9, 14.1, 30, limits="sm_120", kind=EMULATED, cycles=25.5e6
    )
    measurement = store.record_measurement(emulated, variant, record)
    store.set_emulated_best(emulated, environment, "sm_120", measurement, verification)
    failed = VariantRecord(
        replace(PRESETS["v1"], stages=3), "source", "templates", "sm_90a", "13.0.88", "failed", "ptxas died"
    )
    store.record_variant(square, failed)
    wrong = store.record_variant(square, replace(failed, source_hash="another", status="ok", error=""))
    store.record_verification(
        square, wrong, VerificationRecord(False, float("nan"), {"normal": {"dq": float("nan")}}, "NaN in dq")
    )
    assert store.claim("a study", "a configuration", Holder("a search", "a host", 1), lifetime_s=600.0)
    storage = store.optuna_storage()
    study = optuna.create_study(storage=storage, study_name="a study")
    study.tell(study.ask({"block_q": optuna.distributions.CategoricalDistribution([32, 64])}), 4.0)
    storage.remove_session()
    storage.engine.dispose()
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # all of it in the one file


if __name__ == "__main__":
    main()
