"""The README, docs/ and CONTRIBUTING.md are true: tables, Python blocks, commands, links, paths and names."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import typer

import fdp
from benchmarks.readme_tables import MARKED, rendered_page
from benchmarks.readme_tables import PAGES as PAGES_WITH_TABLES
from benchmarks.tables import TABLES
from fdp import ops
from fdp.cli.main import app, main
from fdp.cli.options import build
from fdp.cli.train_options import TrainOptions
from fdp.optimizers import apply_updates, sgd
from fdp.privacy.clipping import flat
from tests.conftest import coarse_groups
from tests.test_layers import ORDER

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
on_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
SMALLER = {
    "python.md": {
        "context=128": "context=16",
        "expected_batch_size=256": "expected_batch_size=8",
        "microbatch_size=64": "microbatch_size=4",
        "arange(64)": "arange(4)",
        "range(500)": "range(2)",
    }
}
"""Sizes of a page's blocks, and what they are replaced by to run in seconds."""
OTHER_FLAGS = {
    "--check",
    "--local-dir",
    "--max-restarts",
    "--nproc-per-node",
    "--nnodes",
    "--local-addr",
    "--signal",
    "--stpes",
}
"""Options of other programs that pages name by themselves."""


class Fence(NamedTuple):
    """A fenced block: its language, its text, and the HTML comment before it."""

    language: str
    text: str
    comment: str


@cache
def fences(page: Path) -> list[Fence]:
    found = re.finditer(r"(?:<!-- ([^>]*) -->\n)?^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Fence(match[2], match[3], match[1] or "") for match in found]


@cache
def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Return what stands in backticks outside fenced blocks, line breaks as spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


# Tables


@pytest.mark.parametrize("page", PAGES_WITH_TABLES, ids=lambda page: page.name)
def test_tables_are_rendered_from_the_results(page: Path) -> None:
    assert page.read_text() == rendered_page(page), "run: python -m benchmarks.readme_tables"


@pytest.mark.parametrize("page", PAGES_WITH_TABLES, ids=lambda page: page.name)
def test_captions_name_unit_machine_versions_command_and_commit(page: Path) -> None:
    tables = list(MARKED.finditer(page.read_text()))
    assert tables
    for match in tables:
        caption = " ".join(match[0].split("\n\n")[0].split())
        origin = re.search(r"on (one|two|an) .*\(torch [\d.+a-z]+.*\) by `(.+?)` at commit [0-9a-f]{7}\b", caption)
        assert origin is not None, caption
        assert command_exists(origin[2]), caption
        assert re.search(r"\*\*.*(Milliseconds|Seconds|GiB|Steps|accuracy|share|sample|Kinds).*\*\*", caption), caption


def test_every_table_is_on_a_page_and_no_other_table_holds_measurements() -> None:
    pages = {page: page.read_text() for page in PAGES_WITH_TABLES}
    assert {match[2] for text in pages.values() for match in MARKED.finditer(text)} == set(TABLES)
    for text in pages.values():
        by_hand = [line for line in MARKED.sub("", text).splitlines() if line.startswith("|")]
        assert not [line for line in by_hand if re.search(r"\d+\.\d+|\d (ms|s|GiB)\b", line)]


def test_the_readme_states_the_held_out_loss_of_the_default_run() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("default_recipe_*.json")
    recipe = json.loads(path.read_text())["rows"]["recipe"]
    text = (ROOT / "README.md").read_text()
    assert f"{recipe['mean']:.2f} nats per byte" in text
    assert path.with_suffix(".md").name in text
    assert len(recipe["runs"]) == 3
    options = build(TrainOptions, {})
    flat_settings = {name: value for group in vars(options).values() for name, value in vars(group).items()}
    assert all(flat_settings[name] in (value, None) for name, value in recipe["settings"].items())  # None: by model


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 192


# Python blocks


@on_every_page
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks of a page run in order, in one namespace; ``<!-- not run: why -->`` marks those that only compile."""
    blocks = [fence for fence in fences(page) if fence.language == "python"]
    sizes = SMALLER.get(page.name, {})
    assert all(any(printed in fence.text for fence in blocks) for printed in sizes)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for fence in blocks:
        text = fence.text
        for printed, small in sizes.items():
            text = text.replace(printed, small)
        code = compile(text, str(page), "exec")
        if fence.comment.startswith("not run: code of another library"):
            continue
        if fence.comment.startswith("not run: "):
            check_calls(text)
        else:
            exec(code, scope)
    if page.name == "python.md":
        assert "embed.tokens" in capsys.readouterr().out
        assert int(scope["state"].step) == 2


def check_calls(text: str) -> None:
    """Check a block that is not run: its imports, and the keyword arguments of every call of ``fdp.name``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("fdp."):
            resolve(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("fdp."):
            given = {str(keyword.arg) for keyword in node.keywords}
            assert given <= set(inspect.signature(resolve(ast.unparse(node.func))).parameters), ast.unparse(node)


def test_a_block_that_is_not_run_is_still_checked() -> None:
    check_calls("fdp.make_mesh({'shard': 2}, device_type='cpu')")
    with pytest.raises(AssertionError):
        check_calls("fdp.make_mesh({'shard': 2}, devices='cpu')")
    with pytest.raises((AssertionError, ImportError)):
        check_calls("from fdp.step import Nothing")


def test_the_step_of_the_readme_clips_sums_and_divides() -> None:
    """With next to no noise it moves the parameters by the sum of clipped gradients over the expected batch size."""
    (block,) = (fence.text for fence in fences(ROOT / "README.md") if fence.language == "python")
    assert len(block.splitlines()) <= 10

    def loss(params: Any, data: Any) -> torch.Tensor:
        return F.cross_entropy(ops.linear(data["x"], params["weight"]), data["label"], reduction="none")

    data = {"x": torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), "label": torch.arange(6) % 3}
    params, mask = {"weight": torch.zeros(3, 5)}, torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    model, sampling = fdp.from_loss(loss, params), fdp.poisson(6, expected_batch_size=3)
    scope: dict[str, Any] = {name: getattr(fdp, name) for name in fdp.__all__} | {"apply_updates": apply_updates}
    scope |= {"model": model, "plan": fdp.make_plan(model, params, data), "sampling": sampling, "optimizer": sgd(1.0)}
    scope |= {"C": 0.1, "z": 1e-6}
    exec(block, scope)
    state = fdp.init_state(model, params, sgd(1.0), fdp.Mechanism(sampling, flat(max_norm=0.1), 1e-6))
    after, losses = scope["train_step"](state, data, mask, fdp.key(0))

    gradients = [torch.func.grad(lambda w, b=b: loss({"weight": w}, data)[b])(params["weight"]) for b in range(6)]
    clipped = [weight * g * min(1.0, 0.1 / float(g.norm())) for g, weight in zip(gradients, mask)]
    torch.testing.assert_close(after.params["weight"], -sum(clipped) / 3, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses, loss(params, data))
    assert int(after.step) == 1


# Commands


COMMAND = re.compile(r"(fdp|torchrun|srun|python|make|pytest|pip|source|git|cd)( |$)")
SHELL_ONLY = re.compile(r"#|export |cd |source \S+/bin/activate$|git clone |python -m venv ")
"""Lines of a shell block that are not a command of this project: comments, and what every shell knows."""
QUICK = {("--version",), ("epsilon",)}
"""Commands that run as printed, because they take seconds; the first words of each."""


def shell_lines(page: Path) -> Iterator[str]:
    """Yield the lines of the page's shell blocks, continued lines joined, without empty ones."""
    for fence in fences(page):
        if fence.language in ("", "bash"):
            yield from (line for line in fence.text.replace("\\\n", " ").splitlines() if line.strip())


def shell_commands(page: Path) -> Iterator[list[str]]:
    """Yield every command of the page's shell blocks as words, without comments and without a trailing ``...``."""
    for line in shell_lines(page):
        if COMMAND.match(line) and not SHELL_ONLY.match(line):
            words = shlex.split(line, comments=True)
            words = words[: words.index(">")] if ">" in words else words  # where the output goes is the shell's
            yield [word for word in words if word not in ("...", "$@")]


@on_every_page
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    """Python runs, shell lines parse, json and toml load; output and pictures are ``text``."""
    for fence in fences(page):
        assert fence.language in ("", "bash", "python", "json", "toml", "text", "pycon"), fence.language
        if fence.language == "json":
            json.loads(fence.text)
        if fence.language == "toml":
            tomllib.loads(fence.text)
    for line in shell_lines(page):
        assert COMMAND.match(line) or SHELL_ONLY.match(line), f"{line}: not a command; a block of output is ```text"


@on_every_page
def test_quick_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in shell_commands(page):
        if words[0] == "fdp" and tuple(words[1:2]) in QUICK:
            with pytest.raises(SystemExit) as ended:
                main(words[1:])
            assert not ended.value.code, words


def command_exists(command: str) -> bool:
    """Return True if ``python -m x.y``, ``python x/y.py`` or ``make target`` names something in this tree."""
    words = command.split()
    if words[0] == "make":
        return bool(re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    if words[:2] == ["python", "-m"]:
        module = ROOT / words[2].replace(".", "/")
        return module.with_suffix(".py").exists() or (module / "__main__.py").exists()
    return words[0] == "python" and (ROOT / words[1]).exists()


def parse(words: list[str]) -> None:
    """Parse ``fdp ...`` as the command line does, without running it; raise on an unknown command or option."""
    if not words or words == ["--version"]:
        return
    group: Any = typer.main.get_command(app)
    with group.make_context("fdp", list(words)) as context:
        name, command, rest = group.resolve_command(context, list(words))
        command.make_context(name, rest, parent=context)


@on_every_page
def test_commands_parse(page: Path) -> None:
    for words in shell_commands(page):
        if "fdp" in words:
            parse(words[words.index("fdp") + 1 :])
        elif words[:2] == ["pip", "install"]:
            assert known_extras(words[-1]), words
        elif words[0] != "pytest":
            assert command_exists(" ".join(words)), words


def known_extras(package: str) -> bool:
    """Return True if ``.[a,b]`` or ``fdp[a,b]`` names extras of this project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.fullmatch(r"(?:\.|fdp)(?:\[([\w,]+)\])?", package)
    return found is not None and set((found[1] or "all").split(",")) <= set(extras)


def test_a_wrong_command_does_not_parse() -> None:
    parse(["train", "--epsilon", "3", "--steps", "2"])
    for words in (["train", "--epsilom", "3"], ["trian"], ["epsilon", "--steps", "2"], ["train", "--steps", "two"]):
        with pytest.raises(Exception, match=r"(?i)option|command|valid|missing"):
            parse(words)
    assert not command_exists("make bench-gpu")
    assert not command_exists("python -m benchmarks.nothing")


@cache
def known_flags() -> frozenset[str]:
    group: Any = typer.main.get_command(app)
    commands = [group, *group.commands.values()]
    return frozenset({flag for command in commands for option in command.params for flag in option.opts} | {"--help"})


@on_every_page
def test_commands_and_flags_in_the_text_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for span in spans(page):
        words = span.split()
        if words[0] == "fdp" and len(words) > 1:
            assert words[1] in group.commands or words[1] == "..." or words[1] in known_flags(), span
        if words[0] in ("python", "make") and len(words) > 1:
            assert command_exists(span), span
        if words[0] not in ("python", "pytest", "rank"):
            flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", span))
            assert flags <= known_flags() | OTHER_FLAGS, span


SMALLER_PATH = {"20": "2", "128": "8", "32": "4", "0.1": "0.2"}
"""Numbers of the path from notes to a model, and what they are replaced by to run in seconds."""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model and the notes of the README, of 40 patients, in a folder of their own."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("readme")
    before = sys.argv
    sys.argv = ["make_notes", "--folder", str(folder / "clinic"), "--patients", "40", "--public-steps", "1"]
    try:
        runpy.run_path(str(ROOT / "examples" / "make_notes.py"), run_name="__main__")
    finally:
        sys.argv = before
    return folder


@pytest.mark.long
def test_the_path_of_the_readme_runs(
    clinic: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From notes to a private model: every command of the README in its order, with smaller numbers."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(clinic)
    monkeypatch.setenv("FDP_LEDGER", str(clinic / "ledger"))
    (record,) = (json.loads(fence.text) for fence in fences(ROOT / "README.md") if fence.language == "json")
    assert set(record) == set(json.loads((clinic / "clinic" / "notes.jsonl").read_text().splitlines()[0]))
    printed = [words for words in shell_commands(ROOT / "README.md") if words[0] == "fdp"]
    assert [words[1] for words in printed] == ["inspect", "advise", "train", "generate", "report", "statement"]
    for words in printed:
        with coarse_groups(), pytest.raises(SystemExit) as ended:
            main([SMALLER_PATH.get(word, word) for word in words[1:]])
        assert not ended.value.code, capsys.readouterr().err
    summary = json.loads((clinic / "runs" / "notes" / "summary.json").read_text())
    assert 2.7 < summary["epsilon"] <= 3
    assert 25 < summary["samples"] < 40  # every patient is one sample; about a fifth is held out
    assert summary["unit"].startswith("one user")
    transformers.AutoModelForCausalLM.from_pretrained(clinic / "runs" / "notes" / "model")


# Links, paths and names


def slugs(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@on_every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        assert not anchor or anchor in slugs(there), target


@on_every_page
def test_paths_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        for path in re.findall(r"(?<![\w./])(?:fdp|kernels|tests|benchmarks|examples|docs)/[\w./*-]*", span):
            assert list(ROOT.glob(path.rstrip("/"))), span


@on_every_page
def test_names_in_the_text_exist(page: Path) -> None:
    for name in {match for span in spans(page) for match in re.findall(r"^@?(fdp(?:\.\w+)+)", span)}:
        assert resolve(name) is not None, name


def resolve(name: str) -> Any:
    """Return the module or attribute of a dotted name."""
    value = importlib.import_module("fdp")
    dotted = "fdp"
    for part in name.split(".")[1:]:
        dotted += f".{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(dotted)
    return value


def test_the_picture_of_packages_is_the_order_of_imports() -> None:
    (picture,) = (fence.text for fence in fences(ROOT / "CONTRIBUTING.md") if fence.text.startswith("types "))
    shown = [line.split()[0].rstrip("/") for line in picture.splitlines()]
    assert shown == [name for name in ORDER if not name.startswith("__")]
    assert all((ROOT / "fdp" / name).is_dir() == (f"{name}/ " in picture) for name in shown)
