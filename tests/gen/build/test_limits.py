from __future__ import annotations

import os
from pathlib import Path

import pytest

from bwdtune.gen.build.limits import JOB_MEMORY_BYTES, job_limit
from bwdtune.gen.errors import UsageError

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The root of a machine with 64 cores and 256 GiB of free memory, without limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    _write(tmp_path / "proc/meminfo", f"MemTotal: 999999999 kB\nMemAvailable: {256 << 20} kB\n")
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _v2(root: Path, group: str, **files: str) -> None:
    for name, text in files.items():
        _write(root / "sys/fs/cgroup" / group / name.replace("_", "."), text)


@pytest.mark.parametrize("value", ["1", "2", " 3 ", "200"])
def test_max_jobs_is_honoured(machine: Path, value: str) -> None:
    assert job_limit({"MAX_JOBS": value}, root=machine) == int(value)


@pytest.mark.parametrize("value", ["0", "-1", "abc", "2.5", "1e3", "٣", "1 2", "9" * 5000])
def test_nonsense_in_max_jobs_is_refused(machine: Path, value: str) -> None:
    with pytest.raises(UsageError, match="MAX_JOBS") as caught:
        job_limit({"MAX_JOBS": value}, root=machine)
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("environ", [{}, {"MAX_JOBS": ""}])
def test_cores_bound_the_jobs(machine: Path, environ: dict[str, str]) -> None:
    assert job_limit(environ, root=machine) == 64


def test_only_cores_that_this_process_may_run_on_count(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert job_limit({}, root=machine) == 2


@pytest.mark.parametrize(("free", "jobs"), [(20 * GIB, 20 * GIB // JOB_MEMORY_BYTES), (GIB // 2, 1)])
def test_free_memory_bounds_the_jobs(machine: Path, free: int, jobs: int) -> None:
    _write(machine / "proc/meminfo", f"MemAvailable: {free // 1024} kB\n")
    assert job_limit({}, root=machine) == jobs


def test_a_control_group_bounds_the_memory(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/box/inner\n")
    _v2(machine, "box/inner", memory_max="max", memory_current=str(6 * GIB))
    _v2(machine, "box", memory_max=str(10 * GIB), memory_current=str(6 * GIB))
    _v2(machine, "box", memory_stat=f"anon 1\ninactive_file {2 * GIB}\n")
    assert job_limit({}, root=machine) == 6 * GIB // JOB_MEMORY_BYTES


def test_a_full_control_group_leaves_one_job(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/\n")
    _v2(machine, "", memory_max=str(2 * GIB), memory_current=str(3 * GIB))
    assert job_limit({}, root=machine) == 1


def test_a_container_that_sees_its_hosts_path_uses_its_own_mount(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "0::/docker/0123\n")
    _v2(machine, "", memory_max=str(8 * GIB), memory_current="0")
    assert job_limit({}, root=machine) == 8 * GIB // JOB_MEMORY_BYTES


@pytest.mark.parametrize(("quota", "jobs"), [("max 100000", 64), ("300000 100000", 3), ("50000 100000", 1)])
def test_a_control_group_bounds_the_cores(machine: Path, quota: str, jobs: int) -> None:
    _write(machine / "proc/self/cgroup", "0::/box\n")
    _v2(machine, "box", cpu_max=quota)
    assert job_limit({}, root=machine) == jobs


def test_control_groups_of_version_1(machine: Path) -> None:
    _write(machine / "proc/self/cgroup", "5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/\n")
    memory, cpu = (machine / "sys/fs/cgroup" / name / "box" for name in ("memory", "cpu"))
    _write(memory / "memory.limit_in_bytes", str(9 * GIB))
    _write(memory / "memory.usage_in_bytes", str(3 * GIB))
    _write(memory / "memory.stat", f"inactive_file 0\ntotal_inactive_file {GIB}\n")
    assert job_limit({}, root=machine) == 7 * GIB // JOB_MEMORY_BYTES
    _write(cpu / "cpu.cfs_quota_us", "200000")
    _write(cpu / "cpu.cfs_period_us", "100000")
    assert job_limit({}, root=machine) == 2


def test_this_machine_takes_at_least_one() -> None:
    assert 1 <= job_limit({}) <= (os.cpu_count() or 1)
