"""What was built, checked and timed, and which won.

Importing this loads no database library: `Store` comes with SQLAlchemy when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import DatabaseError
from .records import (
    Environment,
    GpuKey,
    MeasurementRecord,
    ProblemHistory,
    StoredMeasurement,
    VariantRecord,
    VerificationRecord,
    Winner,
)

if TYPE_CHECKING:
    from .store import Store

__all__ = [
    "DatabaseError",
    "Environment",
    "GpuKey",
    "MeasurementRecord",
    "ProblemHistory",
    "Store",
    "StoredMeasurement",
    "VariantRecord",
    "VerificationRecord",
    "Winner",
]


def __getattr__(name: str) -> Any:
    if name == "Store":
        from .store import Store

        return Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
