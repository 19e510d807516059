"""Which library is the kernel that was verified and timed, and what becomes of one that another compiler made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stub_kernels import stub_library

from bwdtune.gen.build.jobs import Variant
from bwdtune.gen.device import H200, Device
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render
from bwdtune.runtime import gpu
from bwdtune.runtime.dispatch import builds
from bwdtune.runtime.dispatch.builds import Build
from bwdtune.runtime.dispatch.identity import Identity, Standing
from bwdtune.runtime.kernel import Kernel
from bwdtune.runtime.verification import verdicts
from bwdtune.runtime.verification.verdicts import UnverifiedError, Verdict

PROBLEM = Problem.parse("1_1_1_64")
TEXT = Source("kind", PRESETS["v1"], "text")


class Library(Variant):
    """A library whose machine code a test says."""

    machine_code = ""


def library(code: str | None, toolchain: str = "13.0.88", source: Source = TEXT, arch: str = "sm_90a") -> Variant:
    variant = Library(source, arch, stub_library(), "key", toolchain, None, "ok", "", None, 1.0, True)
    object.__setattr__(variant, "machine_code", code)
    return variant


@pytest.mark.parametrize(
    ("known", "text", "code", "toolchain", "standing"),
    [
        ("a", "text", "a", "13.0.88", Standing.SAME),
        ("a", "other", "a", "13.0.88", Standing.SAME),  # a comment has changed
        ("a", "other", "a", "13.1.4", Standing.SAME),  # another compiler makes the same
        ("a", "text", "b", "13.1.4", Standing.UNPROVEN),
        ("a", "text", "b", "13.0.88", Standing.OTHER),
        ("a", "other", "b", "13.0.88", Standing.OTHER),
        (None, "text", "a", "13.0.88", Standing.SAME),  # stored before there was such a hash
        (None, "text", "a", "13.1.4", Standing.UNPROVEN),
        (None, "other", "a", "13.0.88", Standing.OTHER),
        (None, "other", "a", "13.1.4", Standing.OTHER),
        ("a", "text", None, "13.0.88", Standing.SAME),  # its cubin is compressed
        ("a", "other", None, "13.0.88", Standing.OTHER),
    ],
)
def test_machine_code_tells_and_where_there_is_none_the_text(
    known: str | None, text: str, code: str | None, toolchain: str, standing: Standing
) -> None:
    identity = Identity(Source("kind", PRESETS["v1"], text).hash, known, "13.0.88", "sm_90a")
    assert identity.standing(library(code, toolchain)) is standing


@pytest.mark.parametrize(
    ("known", "text", "code", "standing"),
    [
        ("a", "text", "a", Standing.SAME),
        ("a", "text", "b", Standing.UNPROVEN),
        (None, "text", "b", Standing.UNPROVEN),
        (None, "other", "b", Standing.OTHER),
    ],
)
def test_code_for_another_target_is_verified_where_it_differs(
    known: str | None, text: str, code: str, standing: Standing
) -> None:
    """A GB10 is given what is shipped for an RTX 5090, by the same nvcc."""
    identity = Identity(Source("kind", PRESETS["v1"], text).hash, known, "13.0.88", "sm_120a")
    assert identity.standing(library(code, arch="sm_121a")) is standing


def test_a_build_for_the_cpu_is_known_by_its_text() -> None:
    variant = library(None, "g++ 12.2.0", arch="host")
    assert Identity(TEXT.hash, None, "13.0.88", "sm_90a").standing(variant) is Standing.SAME
    assert Identity("other", None, "13.0.88", "sm_90a").standing(variant) is Standing.OTHER


def test_what_has_more_before_its_main_kernel_is_never_known_already() -> None:
    for variant in (library("a", "13.0.88"), library(None, "g++ 12.2.0", arch="host")):
        assert Identity(TEXT.hash, "a", "13.0.88", "sm_90a", stands_in=True).standing(variant) is Standing.UNPROVEN


class TestAnotherCompiler:
    """Its code is verified once, and never by `find`, which others wait for."""

    SOURCE = render(PROBLEM, PRESETS["v1"])
    WANTED = Build(PROBLEM, PRESETS["v1"], Identity(SOURCE.hash, "a", "13.0.88", "sm_90a"), "sm_90a")

    @pytest.fixture(autouse=True)
    def _cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is in the cache, and what a compile would make: code of another nvcc."""
        variant = library("b", "13.1.4", self.SOURCE)
        monkeypatch.setattr(builds, "find_built", lambda *_, **__: [variant])
        monkeypatch.setattr(builds, "build", lambda *_, **__: [variant])
        monkeypatch.setattr(verdicts, "known", lambda library, device: self.verdict)
        monkeypatch.setattr(verdicts, "verify", self.verify)
        monkeypatch.setattr(gpu, "current_device", self.device)
        self.verdict: Verdict | None = None
        self.will_be = Verdict(True)
        self.verified: list[tuple[Path, int]] = []
        self.gpus = [H200]

    def device(self, index: int) -> Device:
        if index >= len(self.gpus):
            raise gpu.NoGpuError(f"there is no GPU {index}")
        return self.gpus[index]

    def verify(self, library: Path, problem: Problem, device: Device, index: int) -> Verdict:
        self.verified.append((library, index))
        return self.will_be

    def test_it_is_used_after_it_has_passed(self) -> None:
        assert builds.find(self.WANTED) is None
        assert not self.verified
        assert isinstance(builds.make([self.WANTED])[self.WANTED].kernel, Kernel)
        assert self.verified == [(stub_library(), 0)]

    def test_what_has_passed_before_is_used_at_once(self) -> None:
        self.verdict = Verdict(True)
        assert isinstance(builds.find(self.WANTED), Kernel)
        assert isinstance(builds.make([self.WANTED])[self.WANTED].kernel, Kernel)
        assert not self.verified

    def test_what_stands_in_for_another_is_verified_too(self) -> None:
        """With gradients of the log-sum-exp and sinks; what it was measured by says nothing of its text."""
        problem = replace(PROBLEM, lse_grad=True, sink=True)
        identity = Identity("a plain problem's", None, "13.1.4", "sm_90a", stands_in=True)
        wanted = Build(problem, PRESETS["v1"], identity, "sm_90a")
        assert builds.find(wanted) is None
        self.will_be = Verdict(False, "dsink is wrong")
        assert builds.make([wanted])[wanted].kernel == (
            "it was timed without the gradient of the log-sum-exp or the sinks, and is wrong: dsink is wrong"
        )
        self.will_be = Verdict(True)
        assert isinstance(builds.make([wanted])[wanted].kernel, Kernel)

    @pytest.mark.parametrize("before", [False, True])
    def test_it_is_not_used_where_it_is_wrong(self, before: bool) -> None:
        self.will_be = Verdict(False, "dq is off")
        self.verdict = self.will_be if before else None
        said = builds.make([self.WANTED])[self.WANTED].kernel
        assert said == (
            "nvcc 13.1.4 compiles it to other code than nvcc 13.0.88, with which it was timed, and is wrong: dq is off"
        )

    def test_it_is_verified_on_a_gpu_of_its_target(self) -> None:
        self.gpus = [Device(**{**vars(H200), "arch": "sm_120a"}), H200]
        builds.make([self.WANTED])
        assert self.verified == [(stub_library(), 1)]

    def test_without_a_gpu_it_is_not_used(self) -> None:
        self.gpus = []
        said = builds.make([self.WANTED])[self.WANTED].kernel
        assert isinstance(said, str)
        assert said.endswith("it is verified once, on a GPU, before it is used")

    def test_what_keeps_it_from_being_verified_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> Verdict:
            raise UnverifiedError("the GPU has no memory to spare")

        monkeypatch.setattr(verdicts, "verify", fail)
        assert builds.make([self.WANTED])[self.WANTED].kernel == "the GPU has no memory to spare"
