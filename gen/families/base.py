"""What Python needs to know of a kernel family: its parameters, what they need and refuse, and the work of one tile.

A family is a subclass of `Config`; a configuration is an instance of it. The subclass declares each parameter once
(`parameter`): ids, stored JSON, the search space, the command line and the table in the docs follow from that
declaration. docs/recipes.md says how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..device import Device
from ..errors import UsageError
from ..problem import Problem

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    from ..emulation import Emulation
    from .context import KernelContext
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        """For type checkers only; Python 3.11 has it in `typing`."""
        return lambda decorator: decorator


MMA_M, MMA_N, MMA_K = 16, 8, 16  # of mma.m16n8k16
FRAGMENT_COLUMNS = 16  # ldmatrix.x4 reads two B fragments of 8 columns at a time
FRAGMENT_REGISTERS = 4  # a thread's fp32 values of an accumulator fragment; also an ldmatrix.x4
BARRIER_BYTES = 8  # of an mbarrier
INDEX_BYTES = 4  # of an item's or a block's index, which one thread takes and all read

Value = int | bool


@dataclass(frozen=True)
class Parameter:
    """A tuned parameter of a family.

    Attributes:
        name: The field's.
        short: Its letters in an id.
        choices: The values that are searched.
        meaning: For the docs: what it chooses, in one sentence.
        default: None where it has to be given.
        later: It came when configurations were already stored: at its default it is neither in an id nor stored. What
            was there before thus keeps its id, and with it its source, which states the id.
        affects_validity: Whether any arithmetic depends on it. Configurations that differ in others alone are valid
            together, unless their values contradict each other.
        stored: Its name in databases, studies and shipped tables, which stays when the field is renamed.
    """

    name: str
    short: str
    choices: tuple[Value, ...]
    meaning: str
    default: Value | None
    later: bool
    affects_validity: bool
    stored: str

    @property
    def is_flag(self) -> bool:
        return isinstance(self.choices[0], bool)

    def value_of(self, number: int) -> Value:
        """The value that a number in an id or on the command line stands for; it need not be one of the choices."""
        return bool(number) if self.is_flag and number in (0, 1) else number


def parameter(
    short: str,
    choices: tuple[Value, ...],
    meaning: str,
    *,
    default: Value | None = None,
    later: bool = False,
    affects_validity: bool = True,
    stored: str = "",
) -> Any:
    """Declares a field of a family; see `Parameter`. ``stored`` is the field's name where it is left out."""
    declared = {
        "short": short,
        "choices": choices,
        "meaning": meaning,
        "default": default,
        "later": later,
        "affects_validity": affects_validity,
        "stored": stored,
    }
    return field(default=MISSING if default is None else default, metadata=declared)


@dataclass(frozen=True)
class Contradiction:
    """Values of some parameters that do not go together, whatever the problem and the device.

    Attributes:
        parameters: Whose values.
        holds: Whether such values, in that order, contradict each other.
        reason: Why they do; a parameter's name in braces stands for its value.
    """

    parameters: tuple[str, ...]
    holds: Callable[..., bool]
    reason: str

    def among(self, values: Mapping[str, Any]) -> bool:
        """Whether it is found among the values of these parameters and perhaps others."""
        return self.holds(*(values[name] for name in self.parameters))


@dataclass(frozen=True)
class Estimate:
    """What one block of the main kernel needs.

    Attributes:
        threads: Threads a block.
        shared_memory_bytes: Dynamic shared memory a block; exact, the template computes the same.
        registers: Registers a thread, estimated from below: the accumulators and kept fragments that are alive
            together, and a bare minimum of everything else.
    """

    threads: int
    shared_memory_bytes: int
    registers: int

    def compiled(self, registers: int, static_shared_memory_bytes: int) -> Estimate:
        """The same with what ptxas says: its registers, and static shared memory beside the dynamic."""
        return Estimate(self.threads, self.shared_memory_bytes + static_shared_memory_bytes, registers)


@dataclass(frozen=True)
class Phase:
    """What the units of an SM do for a tile of scores between two barriers of the block.

    Attributes:
        products: Columns of head_dim that products multiply: times ``block_q`` and ``block_kv``, multiply-adds.
        fragments: ``ldmatrix.x4`` and ``stmatrix.x4`` of all warps.
        shared_bytes: Other traffic with shared memory.
        copied_rows: Rows of a panel that copies from global memory write, each at once.
        computes_scores: P and dS are made of S and dP here.
    """

    products: int = 0
    fragments: int = 0
    shared_bytes: int = 0
    copied_rows: int = 0
    computes_scores: bool = False


@dataclass(frozen=True)
class TileWork:
    """The work of one tile of scores, ``block_q`` x ``block_kv``: what a cost model needs to know of a family.

    Attributes:
        phases: What barriers of the whole block keep apart.
        block_barriers: Barriers of all warps, at which all units fall idle.
        warpgroup_barriers: Barriers of two warpgroups, whose wgmma go on meanwhile.
        asynchronous: The products are wgmma, which read shared memory themselves and run behind the threads.
        tiles_ahead: How many tiles ahead the load of Q and dO is issued; None where it is never waited for.
        in_step: The two warps of a scheduler do the same at the same time.
        statistics_rows: Rows whose log-sum-exp and delta the threads of wgmma read and add themselves.
        added_rows: Rows of dQ that the threads of wgmma add themselves.
        dq_vector: Floats of dQ that a thread adds by one ``red.global``; None where bulk copies add it.
        converts_dq: The main kernel also converts dQ, and no pass clears it.
        one_warp_converts: A warp of each block does, which is slow.
        computes_delta: A warp of each block computes delta, and no pass before does.
        preprocess_rows: Rows of O and dO whose loads a thread of the pass before has in flight.
        skipped_tiles: What a block saves of its first tile, half of which a mask hides.
        blocks: How many blocks compute it together, each on an SM of its own; phases are those of one.
    """

    phases: tuple[Phase, ...]
    block_barriers: int = 0
    warpgroup_barriers: int = 0
    asynchronous: bool = False
    tiles_ahead: float | None = None
    in_step: bool = False
    statistics_rows: int = 0
    added_rows: int = 0
    dq_vector: int | None = None
    converts_dq: bool = False
    one_warp_converts: bool = False
    computes_delta: bool = False
    preprocess_rows: int = 1
    skipped_tiles: float = 0.0
    blocks: int = 1


@dataclass(frozen=True, order=True)
class Config(ABC):
    """One point of a family's space: values of its parameters.

    Attributes:
        family: The family's name, which is that of its folder of templates.
        group: What people call it together with its kin.
        features: What of `Problem.required_features` its template has.
        contradictions: What does not go together.
        has_probe: Its kernel can count its cycles and keep to another card's pace.
        parameters: The declared parameters, by name.
        choices: Their values, by name.
    """

    family: ClassVar[str]
    group: ClassVar[str]
    features: ClassVar[frozenset[str]]
    contradictions: ClassVar[tuple[Contradiction, ...]] = ()
    has_probe: ClassVar[bool] = False
    parameters: ClassVar[dict[str, Parameter]]
    choices: ClassVar[dict[str, tuple[Value, ...]]]

    if TYPE_CHECKING:  # parameters in one family, constants in another

        @property
        def block_q(self) -> int:
            """Rows of a Q/dO tile (B_r)."""

        @property
        def block_kv(self) -> int:
            """Rows of a K/V tile (B_c)."""

        @property
        def min_blocks_per_sm(self) -> int:
            """Blocks that shall fit on an SM at a time."""

        @property
        def threads(self) -> int:
            """Threads of a block."""

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise UsageError(f"{name} is {value!r}: it must be one of {', '.join(map(str, allowed))}")

    @classmethod
    def of(cls: type[C], values: Mapping[str, Any]) -> C:
        """The configuration of these values.

        Raises:
            UsageError: A value is none of its parameter's choices.
        """
        return cls(**values)

    @classmethod
    def of_choices(cls: type[C], values: dict[str, Any]) -> C:
        """The same of values that were taken from `choices`: a whole space of them need not be checked again."""
        config = object.__new__(cls)
        config.__dict__.update(values)
        return config

    @property
    def contradiction(self) -> str | None:
        """Why its values do not go together, whatever the problem and the device; None where they do."""
        values = vars(self)
        found = next((one for one in self.contradictions if one.among(values)), None)
        return found.reason.format(**values) if found else None

    @abstractmethod
    def refusal(self, problem: Problem, device: Device) -> str | None:
        """Why the family cannot serve a problem so configured, in words; None where it can. Resources aside."""

    @abstractmethod
    def shared_memory_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block, as the template lays it out."""

    @abstractmethod
    def registers(self, problem: Problem) -> int:
        """Registers of a thread, estimated from below."""

    @abstractmethod
    def product_columns(self, problem: Problem) -> int:
        """Columns that the five products of a tile have in all, with those that fill up a warp's or a panel's."""

    @abstractmethod
    def tile_work(self, problem: Problem) -> TileWork:
        """The work of one tile of scores."""

    @abstractmethod
    def context(self, problem: Problem, pace: Emulation | None, probed: bool) -> KernelContext:
        """What the family's templates see for a problem; see `KernelContext` for the arguments."""

    @property
    def divides_registers(self) -> bool:
        """Whether its warpgroups divide an SM's registers among themselves (``setmaxnreg``).

        There is then one block an SM, and an equal share is no limit.
        """
        return False

    def register_limit(self, device: Device) -> int:
        """Registers that a thread can have, if as many blocks are to fit on an SM as are asked for."""
        return device.registers_per_thread(threads=self.threads, blocks=self.min_blocks_per_sm)

    def estimate(self, problem: Problem) -> Estimate:
        """What a block needs. Whether the problem divides as configured is not checked here but by `refusal`."""
        return Estimate(self.threads, self.shared_memory_bytes(problem), self.registers(problem))

    @property
    def id(self) -> str:
        """A readable name that `parse_config` takes back, such as ``mma_q64_kv64_w4_s1_sw128_k1_v1_b1_r2_u1``."""
        return "_".join([self.family, *(f"{one.short}{int(value)}" for one, value in self._stated())])

    def to_dict(self) -> dict[str, Any]:
        """The parameters by name, with the family."""
        return {"family": self.family, **vars(self)}

    def to_stored(self) -> dict[str, Any]:
        """The parameters by the names under which they are stored, with the family and without what an id leaves out.

        `config_from_dict` takes this back, and what `to_dict` gives.
        """
        return {"family": self.family, **{one.stored: value for one, value in self._stated()}}

    def _stated(self) -> Iterator[tuple[Parameter, Value]]:
        """The parameters with their values, but for later ones at their default."""
        for name, one in self.parameters.items():
            value = getattr(self, name)
            if not one.later or value != one.default:
                yield one, value


C = TypeVar("C", bound=Config)


@dataclass_transform(frozen_default=True, order_default=True, field_specifiers=(parameter,))
def family(config_type: type[C]) -> type[C]:
    """Makes a class of declared parameters a family."""
    made = dataclass(frozen=True, order=True)(config_type)
    made.parameters = {
        one.name: Parameter(**{**one.metadata, "name": one.name, "stored": one.metadata["stored"] or one.name})
        for one in fields(made)
    }
    made.choices = {name: one.choices for name, one in made.parameters.items()}
    return made


def bias_registers(problem: Problem) -> int:
    """What a thread of ``mma.sync`` holds of a bias, an address of its gradient, and a slope, at least.

    Measured: kernels with room to spare take 18 to 42 more with a bias, those at the limit spill.
    """
    return 16 * bool(problem.bias) + 4 * problem.bias_grad + problem.alibi


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
