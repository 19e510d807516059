from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvcc_shim import ODD_NAMES, NvccShim, without_wheels

from bwdtune.gen.build import toolchain
from bwdtune.gen.build.toolchain import ToolchainError, find_compiler, find_host_compiler, find_nvcc


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolkit and no choice of the user's: each test puts in place what is to be found."""
    for name in ("CUDA_HOME", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    without_wheels(monkeypatch)
    toolchain._warn_once.cache_clear()
    if shutil.which("nvcc"):
        pytest.skip("this machine has an nvcc in /usr/bin")


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _wheel(monkeypatch: pytest.MonkeyPatch, site_packages: Path, *, folder: str = "cu13") -> NvccShim:
    shim = NvccShim(site_packages / "nvidia" / folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site_packages)])
    return shim


def test_cuda_home_comes_before_path_and_path_before_the_wheels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = _wheel(monkeypatch, tmp_path / "site-packages")
    assert find_nvcc().nvcc == wheel.nvcc
    on_path = NvccShim(tmp_path / "path")
    monkeypatch.setenv("PATH", f"{on_path.nvcc.parent}:/usr/bin:/bin")
    assert find_nvcc().nvcc == on_path.nvcc
    home = NvccShim(tmp_path / "home")
    monkeypatch.setenv("CUDA_HOME", str(home.home))
    assert find_nvcc().nvcc == home.nvcc


def test_nvcc_itself_is_asked_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shim = NvccShim(tmp_path / "cuda-99.9", version="13.1.7", archs=(90, 120, 121))
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    found = find_nvcc()
    assert (found.version, found.release, found.root) == ("13.1.7", (13, 1), shim.home)
    assert found.archs == {"sm_90", "sm_120", "sm_121"}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_toolkit_may_have_an_odd_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    shim = NvccShim(tmp_path / name)
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    assert find_nvcc().version == "13.0.88"


def test_a_toolkit_that_takes_the_place_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shim = NvccShim(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    assert find_nvcc().version == "13.0.88"
    shutil.rmtree(shim.home)
    NvccShim(tmp_path / "cuda", version="13.1.2")
    assert find_nvcc().version == "13.1.2"


def test_the_newest_wheels_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _wheel(monkeypatch, tmp_path, folder="cu9")
    newer = _wheel(monkeypatch, tmp_path, folder="cu13")
    assert find_nvcc().nvcc == newer.nvcc


def test_a_cuda_home_without_nvcc_is_told_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wheel = _wheel(monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with caplog.at_level(logging.WARNING):
        assert find_nvcc().nvcc == wheel.nvcc
        find_nvcc()
    assert len(caplog.records) == 1
    assert "CUDA_HOME is /nowhere" in caplog.text


def test_a_too_old_nvcc_on_path_gives_way_to_the_wheels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = NvccShim(tmp_path / "old", version="11.8.89")
    monkeypatch.setenv("PATH", f"{old.nvcc.parent}:/usr/bin:/bin")
    wheel = _wheel(monkeypatch, tmp_path / "site-packages")
    assert find_nvcc().nvcc == wheel.nvcc
    assert "11.8.89" in caplog.text


def test_what_cuda_home_holds_is_never_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _wheel(monkeypatch, tmp_path / "site-packages")
    old = NvccShim(tmp_path / "old", version="12.4.131")
    monkeypatch.setenv("CUDA_HOME", str(old.home))
    with pytest.raises(ToolchainError, match=r"nvcc 12\.4\.131 .* is too old"):
        find_nvcc()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "not found"),
        ("exit 3", "exit status 3"),
        ("echo nonsense", "does not say its version"),
        ("echo 'unsupported ELF header' >&2; exit 1", "unsupported ELF header"),
        ('echo "release 12.0, V12.0.140"', "too old"),
    ],
)
def test_without_a_usable_nvcc_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, reason: str
) -> None:
    if script:
        monkeypatch.setenv("PATH", f"{_script(tmp_path / 'nvcc', script).parent}:/usr/bin:/bin")
    with pytest.raises(ToolchainError, match=reason) as caught:
        find_nvcc()
    assert caught.value.exit_status == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arch", ["sm_70", "sm_130a", "sm_", "compute_90", "sm_90a; rm", "host"])
def test_a_target_that_nvcc_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(NvccShim(tmp_path / "cuda").home))
    with pytest.raises(ToolchainError, match=r"nvcc 13\.0\.88 .*only for sm_90, sm_120") as caught:
        find_nvcc().check_arch(arch)
    assert "\n" not in str(caught.value)


def test_the_wheels_libraries_are_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = _wheel(monkeypatch, tmp_path)
    assert not [word for word in find_nvcc().command("sm_90a", "k.cu", "k.so") if word.startswith("-L")]
    (wheel.home / "lib").mkdir()
    (wheel.home / "lib" / "libcudart_static.a").touch()
    assert f"-L{wheel.home}/lib" in find_nvcc().command("sm_90a", "k.cu", "k.so")


def test_the_flags_name_the_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(NvccShim(tmp_path / "cuda").home))
    flags = find_nvcc().flags("sm_120a")
    assert flags[flags.index("-gencode") + 1] == "arch=compute_120a,code=sm_120a"


def test_nvcc_without_a_host_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(NvccShim(tmp_path / "cuda").home))
    # The shim itself needs no more than a shell; with an absolute path it is found without PATH.
    for program in ("sh", "printf", "echo"):
        (tmp_path / program).symlink_to(f"/bin/{program}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="NVCC_CCBIN"):
        find_compiler("sm_90a")
    monkeypatch.setenv("NVCC_CCBIN", "/opt/g++")
    find_compiler("sm_90a")


def test_nvcc_whose_host_compiler_is_broken_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = NvccShim(tmp_path / "cuda").home
    asks = "[ \"$1\" = --dryrun ] && ! g++ -E && { echo 'nvcc fatal : no host compiler properties'; exit 1; }"
    _script(home / "wrapper" / "bin" / "nvcc", f'{asks}\nexec "{home}/bin/nvcc" "$@"')
    monkeypatch.setenv("CUDA_HOME", str(home / "wrapper"))
    program = _script(tmp_path / "path" / "g++", "exit 1")
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    with pytest.raises(ToolchainError, match=r"C\+\+ compiler \(.*no host compiler properties.*NVCC_CCBIN"):
        find_compiler("sm_90a")
    assert find_nvcc(), "what needs none of it, such as cuobjdump, is found"
    _script(program, "exit 0")
    monkeypatch.setenv("PATH", f"{program.parent}:/bin")
    find_compiler("sm_90a")


class TestHostCompiler:
    def test_cxx_may_hold_arguments(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        program = _script(tmp_path / "my compiler", 'echo "g++ (Some Linux) 14.2.0 -- $1"')
        monkeypatch.setenv("CXX", f"'{program}' -fancy")
        found = find_host_compiler()
        assert found.program == (str(program), "-fancy")
        assert found.version == "g++ 14.2.0"
        assert found.command("host", "k.cu", "k.so")[:2] == [str(program), "-fancy"]

    def test_a_cxx_that_is_no_command_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", 'g++ "')
        with pytest.raises(ToolchainError, match="CXX is 'g\\+\\+ \"', which is no command"):
            find_host_compiler()

    def test_clang_is_used_without_gcc(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        _script(tmp_path / "clang++", "echo 'Debian clang version 14.0.6'")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_host_compiler().version == "clang 14.0.6"

    @pytest.mark.parametrize(("chosen", "reason"), [("", "install g\\+\\+"), ("/no/such", "'/no/such' that CXX names")])
    def test_without_one_there_is_one_line(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str, reason: str
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CXX", chosen)
        with pytest.raises(ToolchainError, match=reason):
            find_compiler("host")


@pytest.mark.parametrize(("driver", "warned"), [((12, 8), True), ((13, 0), False), ((14, 1), False), (None, False)])
def test_a_driver_that_is_too_old_for_nvcc_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    driver: tuple[int, int] | None,
    warned: bool,
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(NvccShim(tmp_path / "cuda").home))
    monkeypatch.setenv("NVCC_CCBIN", "g++")
    monkeypatch.setattr(toolchain, "driver_release", lambda: driver)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda="12.6")))
    for _ in range(2):
        find_compiler("sm_90a")
    assert len(caplog.records) == warned
    if warned:
        assert all(version in caplog.text for version in ("nvcc 13.0.88", "CUDA 12.8", "PyTorch is for 12.6"))


def test_cuobjdump_is_beside_nvcc_else_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toolchain.cuobjdump() is None
    on_path = _script(tmp_path / "path" / "cuobjdump", "")
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert toolchain.cuobjdump() == on_path
    shim = NvccShim(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    assert toolchain.cuobjdump() == on_path
    beside = _script(shim.home / "bin" / "cuobjdump", "")
    assert toolchain.cuobjdump() == beside


def test_the_toolkit_behind_a_wrapper_script_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolkit = NvccShim(tmp_path / "toolkit")
    wrapper = _script(
        tmp_path / "bin" / "nvcc",
        f'[ "$1" = --dryrun ] && echo "#\\$ TOP={toolkit.home}/bin/.." >&2\nexec {toolkit.nvcc} "$@"',
    )
    monkeypatch.setenv("PATH", f"{wrapper.parent}:/usr/bin:/bin")
    assert find_nvcc().nvcc == wrapper
    assert find_nvcc().root == toolkit.home


@pytest.mark.parametrize(("present", "status"), [(True, 0), (False, 1)])
def test_the_set_up_can_ask_whether_there_is_an_nvcc(tmp_path: Path, present: bool, status: int) -> None:
    home = NvccShim(tmp_path / "cuda").home if present else tmp_path
    # -I -S with a path of our own: this Python's wheels are not to be found.
    code = (
        f"import sys, runpy; sys.path[:] = [p for p in sys.path if 'site-packages' not in p];"
        f"sys.path.insert(0, {str(_package_parent(tmp_path))!r});"
        "runpy.run_module('bwdtune.gen.build.toolchain', run_name='__main__')"
    )
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env={"PATH": "/usr/bin:/bin", "CUDA_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == status
    assert len(answer.stdout.splitlines()) == 1


def _package_parent(tmp_path: Path) -> Path:
    parent = tmp_path / "packages"
    parent.mkdir()
    (parent / "bwdtune").symlink_to(Path(toolchain.__file__).resolve().parents[2])
    return parent
