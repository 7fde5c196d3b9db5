"""The error for a missing package names an extra that brings it, wherever fdp imports one."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdp.data.datasets import digits
from fdp.data.text import load_tokenizer
from fdp.extras import EXTRA_OF, missing_package
from fdp.types import FdpError

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DISTRIBUTION_OF = {"sklearn": "scikit-learn"}


@pytest.mark.parametrize("package", EXTRA_OF)
def test_the_extra_that_an_error_names_brings_the_package(package: str) -> None:
    name = DISTRIBUTION_OF.get(package, package)
    assert [line for line in EXTRAS[EXTRA_OF[package]] if re.match(rf"{name}\b", line)]
    assert f"pip install 'fdp[{EXTRA_OF[package]}]'" in str(missing_package(package, purpose="to test"))


def test_all_brings_every_extra_that_an_error_names() -> None:
    (brought,) = EXTRAS["all"]
    assert set(EXTRA_OF.values()) == set(re.findall(r"\w+", brought.removeprefix("fdp")))


def optional_imports(source: str) -> Iterator[ast.ExceptHandler]:
    """Yield every handler of a failed import."""
    handlers = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler))
    for handler in handlers:
        if handler.type is not None and re.search(r"ImportError|ModuleNotFoundError", ast.unparse(handler.type)):
            yield handler


@pytest.mark.parametrize("path", sorted((ROOT / "fdp").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_failed_import_raises_the_error_that_names_the_extra(path: Path) -> None:
    for handler in optional_imports(path.read_text()):
        text = ast.unparse(handler)
        assert "missing_package(" in text, f"{path.name}, line {handler.lineno}: raise missing_package(...) from None"


def test_a_missing_package_is_reported_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("sklearn", "sklearn.datasets", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FdpError, match=r"sklearn is needed for the data 'digits'.*pip install 'fdp\[examples\]'"):
        digits()
    with pytest.raises(FdpError, match=r"transformers is needed to read the folder of a tokenizer.*'fdp\[hf\]'"):
        load_tokenizer(tmp_path)
