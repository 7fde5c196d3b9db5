"""The site of ``make docs``: it builds without a warning, every module has a page, and docstrings read as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_layers import ORDER

ROOT = Path(__file__).parents[1]
pytest.importorskip("mkdocs", reason="the site needs mkdocs: pip install 'fdp[docs]'")
pytest.importorskip("griffe")

from docs.site import pages  # noqa: E402
from docs.site.docstrings import as_markdown  # noqa: E402

NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def test_the_reference_has_every_module() -> None:
    assert set(pages.PACKAGES) | set(pages.CORE) == {name for name in ORDER if not name.startswith("__")}
    text = "".join(content for path, content in pages.reference_pages())
    for path in (ROOT / "fdp").rglob("*.py"):
        name = pages.dotted(path)
        assert name in ("fdp", "fdp.__main__") or re.search(rf"^::: {re.escape(name)}$", text, re.MULTILINE), name


def test_the_navigation_has_every_page() -> None:
    listed = set(re.findall(r"[\w/]+\.md$", NAVIGATION, re.MULTILINE))
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    generated = {
        path for path, _ in pages.generated_pages() if path.endswith(".md") and not path.startswith("results/")
    }
    packages = {f"reference/{package}.md" for package in pages.PACKAGES}  # added by themselves
    assert generated - packages <= listed <= written | generated


def test_packages_and_pages_that_the_navigation_does_not_name_are_added() -> None:
    named = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    config = SimpleNamespace(nav=[{"How to": named[1:]}, {"Reference": []}])
    how_to, reference = pages.on_config(config).nav
    assert how_to == {"How to": [*named[1:], named[0]]}
    assert {"fdp.privacy": "reference/privacy.md"} in reference["Reference"]


def test_links_into_the_repository_lead_to_pages_of_the_site() -> None:
    text = "[a](../CONTRIBUTING.md#style) [b](../benchmarks/results/x.json) [c](../examples/logistic.py) [d](data.md)"
    there = "[a](contributing.md#style) [b](results/x.json) [c](examples/logistic.md) [d](data.md)"
    assert pages.with_links(text, "docs/kfac.md") == there
    assert pages.with_links("[a](docs/data.md) [b](LICENSE)", "README.md") == "[a](data.md) [b](LICENSE)"
    assert pages.with_links("[a](zoo.json)", "benchmarks/results/zoo.md") == "[a](zoo.json)"
    assert pages.with_links("[a](../../docs/kfac.md)", "benchmarks/results/zoo.md") == "[a](../kfac.md)"


DOCSTRING = """Do a thing (:func:`other`).

Text.

    y = x + 1

    >>> f(1)

name     what it is, or ``other``
longer   what that is

>>> g(2)
3

Guarantees:
  - it holds;
  - it stays.
"""
SHOWN = """Do a thing (`other`).

Text.

```text
y = x + 1

>>> f(1)
```


```text
name     what it is, or other
longer   what that is
```


```pycon
>>> g(2)
3
```


Guarantees:
  - it holds;
  - it stays.
"""


def test_equations_examples_and_lists_of_files_are_code_blocks() -> None:
    assert as_markdown(DOCSTRING) == SHOWN


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, strictly: a broken link, a missing anchor or an unlisted page is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_the_network(site: Path) -> None:
    html = {page: page.read_text() for page in site.rglob("*.html")}
    assert len(html) > 40
    loaded: list[Any] = [
        (page.name, match)
        for page, text in html.items()
        for match in re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*"', text)
        + re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//[^"]*"', text)
    ]
    assert not loaded
    assert "Guarantees" in html[site / "reference" / "privacy.html"]
    assert ":func:" not in html[site / "reference" / "privacy.html"].partition("<article")[2].split("Source code")[0]
