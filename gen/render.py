"""A problem and a configuration become CUDA source: text and content hash, the same on every machine."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

import jinja2

from .config import Config
from .problem import FLAGS, Problem

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
_HASH_DIGITS = 16


@dataclass(frozen=True)
class Source:
    """One generated `.cu` file: device code, launcher and C interface.

    Attributes:
        kind: What the text depends on of the problem, such as ``bf16_d128_causal``.
        config: The configuration it was rendered from.
        text: The file's content.
    """

    kind: str
    config: Config
    text: str

    @functools.cached_property
    def hash(self) -> str:
        """The first 16 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:_HASH_DIGITS]

    @property
    def name(self) -> str:
        """A name for files: configuration and kind."""
        return f"bwdtune_{self.config.id}_{self.kind}"


def render(problem: Problem, config: Config) -> Source:
    """The source of one kernel. Whether the configuration is valid for the problem is `space.refusal`'s to say.

    Depends on the problem's kind (`Problem.kind`) and on the configuration; on nothing else.
    """
    template = environment().get_template(f"backward_{config.family}.cu.j2")
    flags = {name: getattr(problem, name) for name in FLAGS}
    text = template.render(
        kind=problem.kind, dtype=problem.dtype, head_dim=problem.head_dim, mask=problem.mask, **flags, config=config
    )
    return Source(problem.kind, config, text)


@functools.cache
def template_hash() -> str:
    """A hash of all files that a kernel is rendered from: under another one, stored timings are of other kernels."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in ("*.j2", "*.cuh", "*.h") for path in TEMPLATES.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_HASH_DIGITS]


@functools.cache
def environment() -> jinja2.Environment:
    """Reads templates by their path below ``templates/``. An undefined name is an error."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    # Plain headers go in as they are: PTX's `{%0, ...}` is not Jinja's.
    found.globals["header"] = lambda name: (TEMPLATES / name).read_text(encoding="utf-8").rstrip()
    return found
