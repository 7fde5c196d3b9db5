"""Pages of the site that are not files in ``docs/``: the README, project files, results, examples, the reference.

``mkdocs`` calls the functions named ``on_...`` (a hook, see ``mkdocs.yml``). Pages in ``docs/`` link to files of the
repository by relative paths, which work on a code host. On the site the same links lead to the generated pages.

    ../CONTRIBUTING.md                     ->  contributing.md
    ../examples/logistic.py                ->  examples/logistic.md      (the program as a code block)
    ../benchmarks/results/zoo_x.json       ->  results/zoo_x.json
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
RENAMED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples": "examples/index.md",
}
FIRST = ("privacy", "gradients", "optimizers", "models", "foreign", "hf", "kfac", "data", "run", "parallel")
"""Packages that the reference lists first; the others follow by name."""
FOUND = sorted(path.parent.name for path in (ROOT / "fdp").glob("*/__init__.py"))
PACKAGES = (*(name for name in FIRST if name in FOUND), *(name for name in FOUND if name not in FIRST))
CORE = tuple(sorted(path.stem for path in (ROOT / "fdp").glob("*.py") if not path.stem.startswith("__")))
"""The modules that are no packages; they share a page."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """Add packages to the section "Reference", and pages in ``docs/`` that no section names to "How to"."""
    named = set(re.findall(r"\b[\w/]+\.md\b", str(config.nav)))
    how_to, reference = (entry[name] for name in ("How to", "Reference") for entry in config.nav if name in entry)
    how_to += sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name not in named)
    reference += [{f"fdp.{package}": f"reference/{package}.md"} for package in PACKAGES]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the files of the site."""
    for path, content in generated_pages():
        files.append(File.generated(config, path, content=content))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def generated_pages() -> Iterator[tuple[str, str]]:
    """Yield path and content of every page that is not a file in ``docs/``."""
    for source, path in RENAMED.items():
        if (ROOT / source).is_file():
            yield path, with_links((ROOT / source).read_text(), source)
    for result in sorted((ROOT / "benchmarks" / "results").glob("*")):
        if result.suffix == ".md":
            yield f"results/{result.name}", with_links(result.read_text(), f"benchmarks/results/{result.name}")
        elif result.suffix == ".json":
            yield f"results/{result.name}", result.read_text()
    yield from example_pages()
    yield from reference_pages()


def example_pages() -> Iterator[tuple[str, str]]:
    """Yield one page per program, and one that lists them with the first sentence of each."""
    programs = sorted((ROOT / "examples").glob("*.py"))
    lines = ["# Examples", "", "Programs that are read from top to bottom.", "", "| program | about |", "|---|---|"]
    for program in programs:
        about = (ast.get_docstring(ast.parse(program.read_text())) or "").split("\n\n")[0]
        lines.append(f"| [{program.name}]({program.stem}.md) | {' '.join(about.split())} |")
        yield f"examples/{program.stem}.md", f"# examples/{program.name}\n\n```python\n{program.read_text()}```\n"
    yield "examples/index.md", "\n".join(lines) + "\n"


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield the reference: the public names, the modules of the core, and one page per package."""
    yield "reference/index.md", surface()
    yield "reference/core.md", "# Core modules\n\n" + "\n\n".join(f"::: fdp.{name}" for name in CORE) + "\n"
    for package in PACKAGES:
        names = [dotted(path) for path in sorted((ROOT / "fdp" / package).rglob("*.py"))]
        blocks = [package_block(name) if is_package(name) else f"::: {name}" for name in names]
        yield f"reference/{package}.md", f"# fdp.{package}\n\n" + "\n\n".join(blocks) + "\n"


def package_block(name: str) -> str:
    """Return the directive for a package: its docstring, without the members that its modules show."""
    return f"::: {name}\n    options:\n      members: false"


def is_package(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).is_dir()


def dotted(path: Path) -> str:
    """Return the name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def surface() -> str:
    """Return the page of the public names, each linked to the module that defines it."""
    tree = ast.parse((ROOT / "fdp" / "__init__.py").read_text())
    table = next(node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME")
    homes = {name: home for home, names in ast.literal_eval(table.value).items() for name in names}
    lines = [
        "# Reference",
        "",
        "The names of `import fdp`. Modules are public too; their pages are in the navigation, by package.",
        "",
        "| name | defined in |",
        "|---|---|",
    ]
    lines += [f"| [`fdp.{name}`][fdp.{homes[name]}.{name}] | `fdp.{homes[name]}` |" for name in sorted(homes)]
    return "\n".join(lines) + "\n"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point the links of a page in ``docs/`` at the pages of the site."""
    if page.file.generated_by:
        return markdown
    return with_links(markdown, f"docs/{page.file.src_uri}")


def with_links(markdown: str, source: str) -> str:
    """Return the text with its links to files of the repository pointed at pages of the site.

    ``source`` is the path of the text in the repository.
    """
    here = site_path(source)
    assert here is not None

    def replace(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        there = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2])))
        if there is None:
            return match[0]
        relative = os.path.relpath(there, posixpath.dirname(here) or ".")
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    return LINK.sub(replace, markdown)


def site_path(path: str) -> str | None:
    """Return the place on the site of a file of the repository, or None if the site does not have it."""
    if path in RENAMED:
        return RENAMED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/results/"):
        return path.removeprefix("benchmarks/")
    if re.fullmatch(r"examples/\w+\.py", path):
        return path.removesuffix(".py") + ".md"
    return None
