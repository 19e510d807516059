"""The hash of machine code: what leaves it alone, and what does not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bwdtune.gen.build.jobs import Variant, build_one
from bwdtune.gen.build.machine_code import MachineCodeError, machine_code
from bwdtune.gen.build.toolchain import ToolchainError, find_compiler, find_nvcc
from bwdtune.gen.families import PRESETS
from bwdtune.gen.render import Source

BASE = """
__constant__ float factors[4] = {1, 2, 3, 4};
__device__ float total;
struct Arguments { float* out; float scale; };
__global__ void __launch_bounds__(128) first(Arguments arguments) {
    __shared__ float sums[128];
    sums[threadIdx.x] = arguments.scale * factors[threadIdx.x % 4];
    __syncthreads();
    arguments.out[threadIdx.x] = sums[127 - threadIdx.x];
}
__global__ void second(float* out) { out[threadIdx.x] += 2.5f; atomicAdd(&total, 1.0f); }
"""
FIRST, SECOND = BASE[BASE.index("__global__") : BASE.index("__global__ void second")], BASE[BASE.rindex("__global__") :]

SAME = {
    "comments": BASE.replace("__syncthreads();", "// all sums are there\n    __syncthreads();"),
    "names of kernels, variables and types": BASE.replace("first", "aaa")
    .replace("second", "zzz_which_is_longer")
    .replace("total", "counter")
    .replace("factors", "coefficients")
    .replace("Arguments", "Parameters"),
    "order of kernels": BASE.replace(FIRST, "").replace(SECOND, SECOND + FIRST),
    "a branch that is decided by the compiler": BASE.replace("2.5f", "(sizeof(int) == 4 ? 2.5f : 3.5f)"),
}
OTHER = {
    "an instruction's operand": BASE.replace("2.5f", "2.75f"),
    "a parameter more": BASE.replace("float scale;", "float scale; long unused;"),
    "the layout of parameters": BASE.replace("float* out; float scale;", "float scale; float* out;"),
    "the bound of threads": BASE.replace("__launch_bounds__(128)", "__launch_bounds__(256)"),
    "shared memory": BASE.replace("sums[128]", "sums[192]"),
    "constants": BASE.replace("{1, 2, 3, 4}", "{1, 2, 3, 5}"),
    "a global variable's type": BASE.replace("float total", "float total[2]").replace("&total", "total"),
    "a kernel less": BASE.replace(SECOND, ""),
}


def _need_nvcc() -> None:
    try:
        find_compiler("sm_90a")
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The hash of each text's cubin. All are made by one shell, since starting nvcc takes most of the time."""
    _need_nvcc()
    folder = tmp_path_factory.mktemp("cubins")
    texts = {"": BASE, **SAME, **OTHER}
    commands = []
    for number, text in enumerate(texts.values()):
        (folder / f"k{number}.cu").write_text(text)
        commands.append(f"{find_nvcc().nvcc} -arch=sm_90a -cubin k{number}.cu -o k{number}.cubin")
    subprocess.run(["sh", "-ec", "\n".join(commands)], cwd=folder, check=True)
    return {name: machine_code(folder / f"k{number}.cubin") for number, name in enumerate(texts)}


@pytest.mark.slow
@pytest.mark.parametrize("what", SAME)
def test_what_does_not_matter(cubins: dict[str, str | None], what: str) -> None:
    assert cubins[what] == cubins[""]


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHER)
def test_what_matters(cubins: dict[str, str | None], what: str) -> None:
    assert cubins[what] not in (None, cubins[""])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Variant:
    _need_nvcc()
    return build_one(Source("kind", PRESETS["v1"], BASE), "sm_90a", cache=tmp_path_factory.mktemp("cache"))


def test_a_build_has_the_hash_of_its_cubin(built: Variant, tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text(BASE)
    flags = [word for word in find_nvcc().flags("sm_90a") if word != "-shared"]
    command = [str(find_nvcc().nvcc), *flags, "-cubin", "kernel.cu", "-o", "kernel.cubin"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert built.machine_code is not None
    assert built.machine_code == machine_code(tmp_path / "kernel.cubin")


def test_a_build_for_the_host_has_none(tmp_path: Path) -> None:
    try:
        find_compiler("host")
    except ToolchainError as error:
        pytest.skip(str(error))
    source = Source("kind", PRESETS["v1"], 'extern "C" int answer() { return 42; }')
    assert build_one(source, "host", cache=tmp_path).machine_code is None


def test_what_was_not_compiled_has_none() -> None:
    source = Source("kind", PRESETS["v1"], "")
    variant = Variant(source, "sm_90a", None, "key", "13.0.88", None, "failed", "an error", None, 1.0, False)
    assert variant.machine_code is None


@pytest.mark.parametrize("content", [b"", b"library\n", b"\x7fELF" + b"\x02\x01\x01" + b"\xff" * 200, None])
def test_a_damaged_library_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    library = tmp_path / "kernel.so"
    if content is not None:
        library.write_bytes(content)
    with pytest.raises(MachineCodeError, match=str(library)) as caught:
        machine_code(library)
    assert "\n" not in str(caught.value)


def test_a_library_that_was_cut_off_is_one_line(built: Variant, tmp_path: Path) -> None:
    assert built.library
    whole = built.library.read_bytes()
    for size in (len(whole) // 4, len(whole) - 100):
        (tmp_path / "part.so").write_bytes(whole[:size])
        with pytest.raises(MachineCodeError):
            machine_code(tmp_path / "part.so")
