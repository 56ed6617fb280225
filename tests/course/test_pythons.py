"""Which Python versions can install the course: every pinned package resolves to wheels, on Linux and on macOS."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.specifiers import SpecifierSet

from shared.course.paths import CHECKOUT

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [f"3.{minor}" for minor in range(30) if SpecifierSet(PROJECT["requires-python"]).contains(f"3.{minor}.0")]
SYSTEMS = ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin"]
SOURCE_ONLY = "yattag"  # of cosmic-ray, a tool of the tests; everything else comes as a wheel


def test_the_four_newest_pythons_are_let_in():
    assert PYTHONS == ["3.11", "3.12", "3.13", "3.14"]


def test_every_place_that_names_pythons_names_these():
    install = (CHECKOUT / ".ci" / "install.sh").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"python(3\.\d+)", install))) == PYTHONS
    lowest, highest = (tuple(map(int, version.split("."))) for version in (PYTHONS[0], PYTHONS[-1]))
    assert f"not {lowest} <= sys.version_info[:2] <= {highest}" in install
    assert "3.11, 3.12, 3.13 or 3.14" in install and "3.11, 3.12, 3.13 or 3.14" in (CHECKOUT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_every_pin_has_wheels(python, system, tmp_path):
    """uv resolves all of pyproject.toml for that Python and system, without building or installing anything."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--extra",
        "test",
        "--quiet",
        "--output-file",
        str(tmp_path / "pins.txt"),
    ]
    command += ["--python-version", python, "--python-platform", system, "--only-binary", ":all:", "--no-binary", SOURCE_ONLY]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_NATIVE_TLS": "true"}  # certificates of this machine
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    [torch] = [each for each in PROJECT["dependencies"] if each.startswith("torch==")]
    assert torch in (tmp_path / "pins.txt").read_text(encoding="utf-8")
