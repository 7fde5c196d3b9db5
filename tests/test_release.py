"""A release: the wheel and the sdist install in a clean environment, and what they install works elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EPSILON = "epsilon --noise-multiplier 1.1 --population 60000 --batch-size 256 --steps 5000 --delta 1e-7 --json"
TRAIN = "train --steps 2 --batch-size 8 --microbatch 4 --context 16 --out run"


def test_versions_agree() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == PROJECT["version"]


def test_the_changelog_keeps_the_form() -> None:
    """Keep a Changelog: newest first, ``## [version] - date``, and known kinds of change under each."""
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def run(*words: object, at: Path) -> str:
    """Run a command outside the repository and return what it prints."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, words)], cwd=at, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, without the network."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, at=folder)
    return folder


@pytest.mark.slow
def test_the_archives_hold_what_they_should(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "fdp").rglob("*.py")}
    sources |= {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels" / "fdp_kernels").rglob("*.py")}
    assert sources | {"fdp/py.typed", "fdp_kernels/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"fdp", "fdp_kernels", f"fdp-{PROJECT['version']}.dist-info"}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "CITATION.cff", "SECURITY.md", "CHANGELOG.md", "constraints.txt", "mkdocs.yml"} <= held
    assert not [name for name in held if name.startswith((".venv", "runs", "build", ".git/"))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_an_installed_release_works_outside_the_repository(kind: str, built: Path, tmp_path: Path) -> None:
    """The environment is new; torch and other dependencies are read from this one, so that nothing is downloaded."""
    (archive,) = built.glob(kind)
    venv.create(tmp_path / "venv", with_pip=True)
    python, fdp = (tmp_path / "venv" / "bin" / name for name in ("python", "fdp"))
    folder = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", at=tmp_path).strip()
    Path(folder, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", archive, at=tmp_path)

    where = run(python, "-c", "import fdp, fdp_kernels; print(fdp.__file__, fdp_kernels.__file__)", at=tmp_path)
    assert all(path.startswith(folder) for path in where.split())
    assert run(fdp, "--version", at=tmp_path).strip() == f"fdp {PROJECT['version']}"
    epsilon = json.loads(run(fdp, *EPSILON.split(), at=tmp_path).splitlines()[-1])
    assert 1 < epsilon["epsilon"] < 3
    run(fdp, *TRAIN.split(), at=tmp_path)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
