"""The set-up's installer: uv with pip's settings, and pip where that cannot be."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import bwdtune

SCRIPT = Path(bwdtune.__file__).resolve().parent / "tools" / "install.py"


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Programs:
    """What is run, and what answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, listing: str = "", uv: int | None = 0) -> None:
        self.run: list[list[str]] = []
        self.environments: list[dict[str, str] | None] = []
        self.listing, self.uv = listing, uv
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if uv is None else object())
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], env: dict[str, str] | None = None, **_: object) -> SimpleNamespace:
        assert command[:2] == [sys.executable, "-m"]
        if command[-2:] == ["config", "list"]:
            return SimpleNamespace(stdout=self.listing)
        self.run.append(command[2:])
        self.environments.append(env)
        return SimpleNamespace(returncode=(self.uv or 0) if command[2] == "uv" else 0)

    @property
    def names(self) -> list[str]:
        return [command[0] for command in self.run]


def test_uv_looks_where_pip_would(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = (
        ":env:.find-links='/a/folder'\n"
        "global.cert='/etc/certificates.pem'\n"
        "global.extra-index-url='\\nhttps://one/simple\\nhttps://two/simple'\n"
        "global.find-links='/another'\n"
        "global.timeout='60'\n"
        "download.no-binary=':all:'\n"
    )
    programs = Programs(monkeypatch, listing=listing)
    assert install.main(["--quiet", "numpy"]) == 0
    (command,) = programs.run
    assert command[:3] == ["uv", "pip", "install"]
    assert command[-2:] == ["--quiet", "numpy"]
    given = " ".join(command)
    assert "--extra-index-url https://one/simple --extra-index-url https://two/simple" in given
    assert "--find-links /a/folder" in given
    assert "/another" not in given
    assert programs.environments[0]
    assert programs.environments[0]["SSL_CERT_FILE"] == "/etc/certificates.pem"


@pytest.mark.parametrize(
    ("answers", "names"),
    [
        ({"uv": None}, ["pip"]),
        ({"uv": 2}, ["uv", "pip"]),
        ({"listing": "global.no-binary=':all:'\n"}, ["pip"]),
        ({"listing": ":env:.proxy='http://here'\n"}, ["pip"]),
    ],
    ids=["no uv", "uv fails", "a setting that uv is not told", "a variable that uv is not told"],
)
def test_pip_serves_where_uv_cannot(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, answers: dict, names: list[str]
) -> None:
    programs = Programs(monkeypatch, **answers)
    assert install.main(["numpy"]) == 0
    assert programs.names == names
    assert programs.run[-1][-1] == "numpy"
