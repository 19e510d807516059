"""Renders a problem and a configuration to CUDA source: text and content hash, the same on every machine."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cached import cached_property
from .device import H200, Device
from .emulation import emulation
from .errors import UsageError
from .families import Config
from .problem import Problem

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class Source:
    """One generated `.cu` file: device code, launcher and C interface.

    Attributes:
        kernel_spec: What the text depends on of the problem, such as ``bf16_d128_causal``.
        config: The configuration it was rendered from.
        text: The file's content.
        emulate: The card whose pace it keeps to (``sm_120``), or None: then it keeps to none but its own.
        probed: Whether it counts its cycles, which an emulated one does.
    """

    kernel_spec: str
    config: Config
    text: str
    emulate: str | None = None
    probed: bool = False

    @cached_property
    def hash(self) -> str:
        """The first 16 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:_HASH_DIGITS]

    @property
    def name(self) -> str:
        """A name for files: configuration and kind, and what makes it another build than the one that is used."""
        build = f"_emulating_{self.emulate}" if self.emulate else "_probed" if self.probed else ""
        return f"bwdtune_{self.config.id}_{self.kernel_spec}{build}"


def render(
    problem: Problem, config: Config, *, emulate: str | None = None, card: Device = H200, cycles: bool = False
) -> Source:
    """The source of one kernel. Whether the configuration is valid for the problem is `space.refusal`'s to say.

    Depends on `Problem.kernel_spec` and on the configuration; on nothing else, unless asked for a build that is only
    measured, never used:

    Args:
        problem: The problem.
        config: The configuration.
        emulate: Another card whose mma rate it keeps to: a key of `emulation.EMULATED_CARDS`. Such a build counts its
            cycles.
        card: The card that then runs it.
        cycles: Have it count its cycles: from the first start to the last end of a block of the main kernel on each SM.

    Raises:
        UsageError: ``card`` cannot emulate that.
    """
    template = environment().get_template(_main_template(config.family))
    probed = cycles or emulate is not None
    if probed and not config.has_probe:
        raise UsageError(f"{config.group} kernels do not count their cycles, and keep to no other card's pace")
    pace = emulation(emulate, card) if emulate else None
    text = template.render(kernel=config.context(problem, pace, probed))
    return Source(problem.kernel_spec, config, text, emulate, probed)


@functools.cache
def template_hash(family: str) -> str:
    """A hash of all files that a family's kernels are rendered from: what was tried under another one may be other now.

    Not a kernel's identity, which is its machine code (`build.machine_code`).
    """
    digest = hashlib.sha256()
    for name in sorted(template_files(family)):
        digest.update(name.encode() + b"\0" + (TEMPLATES / name).read_bytes() + b"\0")
    return digest.hexdigest()[:_HASH_DIGITS]


def template_files(family: str) -> frozenset[str]:
    """The files that a family's kernels are rendered from, below ``templates/``: what a template names, and so on."""
    found: set[str] = set()
    left = [_main_template(family)]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _named_in(name)
    return frozenset(found)


def _main_template(family: str) -> str:
    return f"{family}/backward.cu.j2"


@functools.cache
def _named_in(name: str) -> list[str]:
    """The templates that a template includes or imports, and the headers that it reads."""
    if not name.endswith(".j2"):
        return []  # a plain header goes in as it is
    from jinja2 import meta, nodes

    tree = environment().parse((TEMPLATES / name).read_text(encoding="utf-8"))
    named = list(meta.find_referenced_templates(tree))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "header":
            (argument,) = call.args
            named.append(argument.value if isinstance(argument, nodes.Const) else None)
    constant = [other for other in named if other is not None]
    assert len(constant) == len(named), f"{name} names a file by an expression: nothing can say which it is made of"
    return constant


@functools.cache
def environment() -> jinja2.Environment:
    """Reads templates by their path below ``templates/``. An undefined name is an error."""
    import jinja2  # here: what only names a source, such as a command's help, does not wait for it

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    # Plain headers go in as they are: PTX's `{%0, ...}` is not Jinja's.
    found.filters["cpp"] = lambda value: str(value).lower() if isinstance(value, bool) else str(value)
    found.globals["header"] = lambda name: (TEMPLATES / name).read_text(encoding="utf-8").rstrip()
    return found
