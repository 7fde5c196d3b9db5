"""Who may import whom: stages do not know each other, the step joins them, kernels know nothing of fdp."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "fdp").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))

STAGES = {"per_sample", "clipping", "noise", "sampling", "accounting", "optimizers"}
JOINERS = {
    "step",
    "noisy_update",
    "fused_update",
    "budget",
    "guards",
    "run",
    "cli",
    "audit",
    "mechanism",
    "reductions",
    "checkpoint",
    "plan",
    "compare",
    "kfac",
    "foreign",
    "__main__",
    "__init__",
}
# The accountant is given the mechanism, which names who is sampled and how a sample is clipped. Adaptive clipping
# noises its count as sums are noised.
KNOWN = {"accounting": {"mechanism", "clipping", "sampling", "composition"}, "clipping": {"noise"}}
# In order: each may import those before it.
ORDER = (
    "types",
    "tree",
    "keys",
    "settings",
    "sample_gradients",
    "rules",
    "together",
    "vjp",
    "taps",
    "ops",
    "init",
    "torch_init",
    "collectives",
    "parallel",
    "model",
    "mesh",
    "sharding",
    "traffic",
    "offload",
    "models",
    "costs",
    "timing",
    "methods",
    "head",
    "compiled",
    "fused_head",
    "block_loop",
)
FOUNDATIONS = set(ORDER)
# What a stage may stand on, besides types, tree and keys.
GROUND = {
    "per_sample": {
        "sample_gradients",
        "together",
        "sharding",
        "traffic",
        "costs",
        "methods",
        "model",
        "compiled",
        "block_loop",
    }
}


def imports(path: Path) -> set[str]:
    """Every module imported anywhere in the file, inside functions too, as absolute dotted names."""
    found: set[str] = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def module_of(path: Path) -> str:
    """``fdp/optimizers/adam.py`` is part of ``optimizers``; ``fdp/step.py`` is ``step``."""
    first, *_ = path.relative_to(ROOT / "fdp").with_suffix("").parts
    return first


MODULES = {module_of(path) for path in FILES}


def uses(path: Path) -> set[str]:
    """The modules of fdp that a file of fdp imports, itself left out."""
    parts = {name.split(".")[1] for name in imports(path) if name.startswith("fdp.")}
    return (parts & MODULES) - {module_of(path)}


def test_the_table_is_about_modules_that_exist():
    assert (STAGES | FOUNDATIONS | {"step", "audit", "mechanism"}) <= MODULES
    assert "fdp.rules" in imports(ROOT / "fdp" / "ops.py")
    assert uses(ROOT / "fdp" / "step.py") >= {"tree", "mechanism", "noise", "per_sample", "optimizers"}


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.stem)
def test_kernels_import_nothing_of_fdp(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "fdp"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_tree_imports_optree(path):
    roots = {name.split(".")[0] for name in imports(path)}
    assert ("optree" in roots) == (path == ROOT / "fdp" / "tree.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_over_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_stages_do_not_import_each_other(stage):
    for path in FILES:
        if module_of(path) == stage:
            assert uses(path) <= {"types", "tree", "keys"} | GROUND.get(stage, set()) | KNOWN.get(stage, set())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_foundations_know_no_stage_and_only_the_step_joins_stages(path):
    module = module_of(path)
    stages = uses(path) & STAGES
    if module in FOUNDATIONS:
        assert not uses(path) - FOUNDATIONS
    elif module not in JOINERS | set(KNOWN):
        assert len(stages) < 2


def test_the_mechanism_knows_only_who_is_sampled_and_how_a_sample_is_clipped():
    assert uses(ROOT / "fdp" / "mechanism.py") == {"clipping", "sampling", "types"}


def test_the_foundations_stand_in_order():
    for path in FILES:
        module = module_of(path)
        if module in FOUNDATIONS:
            assert uses(path) <= set(ORDER[: ORDER.index(module)]), path
