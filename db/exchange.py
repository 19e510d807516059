"""A database as JSON, to be read, compared and handed on: docs/database.md has the format.

Whoever reads a file trusts nothing of it. Its schema is strict: a field too many, a number that is none, a text with
markup in it refuses the file. A configuration goes through the families' own parser, so what comes out of a file is
one that a search could have proposed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    create_model,
)

from ..gen.errors import BwdtuneError
from ..gen.families import Config, config_from_dict
from ..gen.problem import Problem
from .blocks import Block, Kernel, Timed
from .errors import InvalidRecord
from .records import (
    SEARCH_STATUSES,
    Environment,
    GpuKey,
    MeasurementRecord,
    SearchRecord,
    StoredSearch,
    VariantRecord,
    VerificationRecord,
)

FORMAT = "bwdtune database"
VERSION = 1
LARGEST_FILE_BYTES = 2**28

_LONGEST_REASON = 200
_LONGEST_PROSE = 2000
_MOST_SEQUENCES, _MOST_ELEMENTS = 2**17, 2**38  # of a tensor: half a TiB in 16 bits
_MARKUP = re.compile(r"[^\w .,:;()+\-/=#@%*|\[\]?!…]")
_T = TypeVar("_T")


class InvalidExport(BwdtuneError):
    """A file that is no export of a database, or holds what no database of this program would."""

    exit_status = 2


def write_export(blocks: Iterable[Block]) -> str:
    """Blocks as JSON: the same text for the same blocks, with a line for each search, kernel and measurement."""
    document = {"format": FORMAT, "version": VERSION, "problems": [_block_to_dict(block) for block in blocks]}
    return "".join(_lines(document, "")) + "\n"


def read_export(text: str | bytes) -> list[Block]:
    """What `write_export` wrote. Nothing of it is trusted.

    Raises:
        InvalidExport: One line: where, and what is wrong.
    """
    try:
        data = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_number)
    except RecursionError:
        raise InvalidExport("it is nested too deeply") from None
    except ValueError as error:
        raise InvalidExport(f"it is not JSON that an export has: {_clipped(str(error))}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidExport(f'it is not an export of a database: its "format" is not "{FORMAT}"')
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        raise InvalidExport(
            f"its version is {_clipped(repr(data.get('version')))}, and this bwdtune reads {VERSION}: "
            "export it again with the same version of bwdtune"
        )
    try:
        document = _Document.model_validate_json(text)
    except ValidationError as error:
        raise InvalidExport(_first_fault(error)) from None
    return [_block(found, f"problems[{index}]") for index, found in enumerate(document.problems)]


# The schema


def _without_markup(text: str) -> str:
    return _MARKUP.sub("?", text)


_OLDEST, _NEWEST = datetime(2000, 1, 1, tzinfo=timezone.utc), datetime(2200, 1, 1, tzinfo=timezone.utc)
_MOST = 2**31 - 1  # of a database's integers
_Name = Annotated[str, Field(max_length=255, pattern=r"^[\w .,:;()+\-/=#@%*|\[\]]*$")]
"""Of a card, a host, a version, a policy: no quotes, no markup, no control characters."""
_Short = Annotated[str, Field(max_length=64, pattern=r"^[\w .,:()+\-]+$")]
_OrNone = Literal[""] | _Short
_Prose = Annotated[str, Field(max_length=_LONGEST_PROSE), AfterValidator(_without_markup)]
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Positive = Annotated[float, Field(gt=0, lt=1e30)]
_Number = Annotated[int, Field(ge=-_MOST, le=_MOST)]
_Moment = Annotated[AwareDatetime, Field(ge=_OLDEST, lt=_NEWEST)]
_Scalar: TypeAlias = StrictBool | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | _Name | None
_Option: TypeAlias = _Scalar | list[_Scalar] | dict[_Name, _Scalar]

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Strict(BaseModel):
    model_config = _STRICT


class _Gpu(_Strict):
    name: Annotated[_Name, Field(min_length=1)]
    capability: Annotated[str, Field(pattern=r"^\d{1,3}\.\d$")]


class _Search(_Strict):
    uid: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    started_at: _Moment
    ended_at: _Moment | None
    status: Literal[SEARCH_STATUSES]  # type: ignore[valid-type]
    decided: _Count
    error: _Prose
    sampler: Annotated[_Name, Field(max_length=32)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    options: Annotated[dict[_Name, _Option], Field(max_length=64)]
    arch: Annotated[_Short, Field(max_length=32)]
    host: _Name
    gpu: _Gpu | None
    gpu_uuid: Annotated[str, Field(max_length=_LONGEST_PROSE, pattern=r"^[\w .,\-]+$")] | None
    driver: _Short | None
    power_limit_w: _Positive | None
    bwdtune: Annotated[_Name, Field(max_length=64)]
    nvcc: Annotated[_Name, Field(max_length=64)]
    torch: Annotated[_Name, Field(max_length=64)]
    optuna: Annotated[_Name, Field(max_length=64)]


class _Measurement(_Strict):
    at: _Moment
    gpu: _Gpu
    driver: _Short
    nvcc: _Short
    torch: _Short
    policy: Annotated[_Name, Field(min_length=1)]
    limits: Annotated[_Short, Field(max_length=32)] | None
    kind: Literal["measured", "emulated"]
    median_ms: _Positive
    low_ms: _Positive
    high_ms: _Positive
    samples: Annotated[int, Field(ge=1, le=_MOST)]
    clock_mhz: _Positive | None
    cycles: _Positive | None
    default_ms: _Positive | None
    default_kernel: _Short | None
    search: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None
    wins: Literal["whole", "partial"] | None


class _Built(_Strict):
    source_hash: _Short
    template_hash: _Short
    machine_code: _Short | None
    arch: Annotated[_Short, Field(max_length=32)]
    nvcc: _Short
    registers: _Count | None
    spill_bytes: _Count | None
    stack_bytes: _Count | None
    shared_memory_bytes: _Count | None
    threads: _Count | None
    compile_seconds: Annotated[float, Field(ge=0, lt=1e30)] | None


class _Verification(_Strict):
    max_error: Annotated[float, Field(ge=0, lt=1e30)]


class _Kernel(_Strict):
    config: Annotated[dict[_Name, StrictBool | _Number | _Name], Field(max_length=100)]
    built: _Built
    verification: _Verification | None
    measurements: list[_Measurement]


def _problem_model() -> type[BaseModel]:
    """Of `Problem`, whatever features it has: those with a default may be missing, as in a file of before."""
    types = get_type_hints(Problem)
    bounded = {int: _Number, str: _Short}
    columns: dict[str, Any] = {
        one.name: (bounded.get(types[one.name], types[one.name]), ...)
        if one.default is MISSING
        else (_OrNone if types[one.name] is str else bounded.get(types[one.name], types[one.name]), one.default)
        for one in fields(Problem)
        if one.name in Problem.stored_names()
    }
    return create_model("_Problem", __config__=_STRICT, **columns)


_Problem = _problem_model()


class _Block(_Strict):
    problem: _Problem  # type: ignore[valid-type]
    searches: list[_Search]
    kernels: list[_Kernel]


class _Document(_Strict):
    format: Literal["bwdtune database"]
    version: Literal[1]
    problems: list[_Block]


# From a file


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _first_fault(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    place = ""
    for part in first["loc"]:
        named = isinstance(part, str) and re.fullmatch(r"\w{1,40}", part)
        place += f".{part}" if named else f"[{_clipped(repr(part))}]"
    more = f", and {len(others)} more" if others else ""
    return _clipped(f"{place.removeprefix('.')}: {first['msg']}{more}")


def _clipped(text: str) -> str:
    plain = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return plain if len(plain) <= _LONGEST_REASON else plain[: _LONGEST_REASON - 1] + "…"


def _block(found: Any, place: str) -> Block:
    problem = _at(f"{place}.problem", partial(_problem, found.problem))
    searches = tuple(
        _at(f"{place}.searches[{index}]", partial(_search, one, problem)) for index, one in enumerate(found.searches)
    )
    known = {search.uid for search in searches}
    kernels = tuple(_kernel(one, known, f"{place}.kernels[{index}]") for index, one in enumerate(found.kernels))
    return Block(problem, searches, kernels)


def _problem(found: BaseModel) -> Problem:
    problem = Problem(**found.model_dump())
    columns = max(problem.head_dim, problem.head_dim_v)
    elements = problem.batch * problem.heads_q * max(problem.seqlen_q, problem.seqlen_kv) * columns
    if problem.batch > _MOST_SEQUENCES or elements > _MOST_ELEMENTS:
        raise InvalidRecord(f"{problem.label} is larger than what a GPU holds")
    return problem


def _at(place: str, make: Callable[[], _T]) -> _T:
    """What is made of a part of a file.

    Raises:
        InvalidExport: With the place, where it cannot be made.
    """
    try:
        return make()
    except InvalidExport:
        raise
    except (BwdtuneError, TypeError, ValueError) as error:
        raise InvalidExport(f"{place}: {_clipped(str(error))}") from None


def _search(found: _Search, problem: Problem) -> StoredSearch:
    if (found.status == "running") != (found.ended_at is None):
        raise InvalidRecord("a search that runs has no end, and any other has one")
    record = SearchRecord(
        problem=problem,
        study="",
        arch=found.arch,
        sampler=found.sampler,
        seed=found.seed,
        options=found.options,
        host=found.host,
        gpu=_gpu(found.gpu) if found.gpu else None,
        gpu_uuid=found.gpu_uuid,
        driver=found.driver,
        power_limit_w=found.power_limit_w,
        bwdtune=found.bwdtune,
        toolkit=found.nvcc,
        torch=found.torch,
        optuna=found.optuna,
    )
    ended_at = _utc(found.ended_at) if found.ended_at else None
    return StoredSearch(
        0, found.uid, record, _utc(found.started_at), ended_at, found.status, found.decided, found.error
    )


def _kernel(found: _Kernel, searches: set[str], place: str) -> Kernel:
    config: Config = _at(f"{place}.config", partial(config_from_dict, dict(found.config)))
    built = found.built
    variant = VariantRecord(
        config=config,
        source_hash=built.source_hash,
        template_hash=built.template_hash,
        arch=built.arch,
        toolchain=built.nvcc,
        registers=built.registers,
        spill_bytes=built.spill_bytes,
        stack_bytes=built.stack_bytes,
        shared_memory_bytes=built.shared_memory_bytes,
        threads=built.threads,
        compile_seconds=built.compile_seconds,
        machine_code=built.machine_code,
    )
    verification = VerificationRecord(True, found.verification.max_error) if found.verification else None
    timed = tuple(
        _at(f"{place}.measurements[{index}]", partial(_timed, one, built.arch, searches))
        for index, one in enumerate(found.measurements)
    )
    return Kernel(variant, verification, timed)


def _timed(found: _Measurement, arch: str, searches: set[str]) -> Timed:
    if found.search is not None and found.search not in searches:
        raise InvalidRecord(f"its search {found.search} is none of this problem's")
    record = MeasurementRecord(
        environment=Environment(_gpu(found.gpu), arch, found.driver, found.nvcc, found.torch),
        policy=found.policy,
        median_ms=found.median_ms,
        low_ms=found.low_ms,
        high_ms=found.high_ms,
        samples=found.samples,
        clock_mhz=found.clock_mhz,
        limits=found.limits,
        kind=found.kind,
        cycles=found.cycles,
        default_ms=found.default_ms,
        default_kernel=found.default_kernel,
    )
    return Timed(record, _utc(found.at), found.search, found.wins)


def _gpu(found: _Gpu) -> GpuKey:
    return GpuKey(found.name, found.capability)


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(timezone.utc)


# To a file


def _block_to_dict(block: Block) -> dict[str, Any]:
    return {
        "problem": block.problem.to_stored(),
        "searches": [_search_to_dict(search) for search in block.searches],
        "kernels": [_kernel_to_dict(kernel) for kernel in block.kernels],
    }


def _search_to_dict(search: StoredSearch) -> dict[str, Any]:
    record = search.record
    return {
        "uid": search.uid,
        "started_at": search.started_at.isoformat(),
        "ended_at": search.ended_at.isoformat() if search.ended_at else None,
        "status": search.status,
        "decided": search.decided,
        "error": search.error[:_LONGEST_PROSE],
        "sampler": record.sampler,
        "seed": record.seed,
        "options": dict(record.options),
        "arch": record.arch,
        "host": record.host,
        "gpu": asdict(record.gpu) if record.gpu else None,
        "gpu_uuid": record.gpu_uuid,
        "driver": record.driver,
        "power_limit_w": record.power_limit_w,
        "bwdtune": record.bwdtune,
        "nvcc": record.toolkit,
        "torch": record.torch,
        "optuna": record.optuna,
    }


def _kernel_to_dict(kernel: Kernel) -> dict[str, Any]:
    variant = kernel.variant
    return {
        "config": variant.config.to_stored(),
        "built": {
            "source_hash": variant.source_hash,
            "template_hash": variant.template_hash,
            "machine_code": variant.machine_code,
            "arch": variant.arch,
            "nvcc": variant.toolchain,
            "registers": variant.registers,
            "spill_bytes": variant.spill_bytes,
            "stack_bytes": variant.stack_bytes,
            "shared_memory_bytes": variant.shared_memory_bytes,
            "threads": variant.threads,
            "compile_seconds": variant.compile_seconds,
        },
        "verification": {"max_error": kernel.verification.max_error} if kernel.verification else None,
        "measurements": [_timed_to_dict(timed) for timed in kernel.timed],
    }


def _timed_to_dict(timed: Timed) -> dict[str, Any]:
    record, environment = timed.record, timed.record.environment
    return {
        "at": timed.created_at.isoformat(),
        "gpu": asdict(environment.gpu),
        "driver": environment.driver,
        "nvcc": environment.toolkit,
        "torch": environment.torch,
        "policy": record.policy,
        "limits": record.limits,
        "kind": record.kind,
        "median_ms": record.median_ms,
        "low_ms": record.low_ms,
        "high_ms": record.high_ms,
        "samples": record.samples,
        "clock_mhz": record.clock_mhz,
        "cycles": record.cycles,
        "default_ms": record.default_ms,
        "default_kernel": record.default_kernel,
        "search": timed.search,
        "wins": timed.wins,
    }


def _lines(value: Any, indent: str) -> Iterator[str]:
    """JSON in which what holds no list of objects is one line."""
    if not _has_rows(value):
        yield json.dumps(value, allow_nan=False)
        return
    inner = indent + "  "
    items: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        brackets, items = "{}", [(f"{json.dumps(name)}: ", one) for name, one in value.items()]
    else:
        brackets, items = "[]", [("", one) for one in value]
    yield brackets[0]
    for number, (name, one) in enumerate(items):
        yield ",\n" if number else "\n"
        yield inner + name
        yield from _lines(one, inner)
    yield f"\n{indent}{brackets[1]}"


def _has_rows(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_rows(one) for one in value.values())
    return isinstance(value, list) and any(isinstance(one, Mapping) for one in value)
