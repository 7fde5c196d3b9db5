"""The layout of the tree: one ordered list of packages, each of which imports only those before it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "fdp").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))

ORDER = (
    "types",
    "arguments",
    "extras",
    "tree",
    "keys",
    "init",
    "fingerprint",
    "privacy",
    "data",
    "optimizers",
    "model",
    "parallel",
    "storage",
    "ledger",
    "cpu",
    "gradients",
    "equal_rounding",
    "attention",
    "ops",
    "finish",
    "fast",
    "checks",
    "models",
    "foreign",
    "kfac",
    "stages",
    "step",
    "run",
    "estimate",
    "advice",
    "report",
    "hf",
    "cli",
    "__init__",
    "__main__",
)
# Inside the largest packages.
INSIDE = {
    "cli": (
        "__init__",
        "formatting",
        "allocator",
        "waiting_threads",
        "tour",
        "flag_names",
        "other_names",
        "options",
        "choices",
        "needs",
        "advice_options",
        "kfac_options",
        "evaluation_options",
        "reading_options",
        "ledger_options",
        "tracking_options",
        "rank_options",
        "train_options",
        "start_options",
        "config_file",
        "names",
        "folder_lock",
        "signals",
        "unused_options",
        "fast_defaults",
        "check_data",
        "leaf_names",
        "model_and_data",
        "extend",
        "configure_kfac",
        "configure_evaluation",
        "configure",
        "run_files",
        "bookkeeping",
        "tracked_values",
        "tensorboard",
        "weights_and_biases",
        "tracking",
        "resume",
        "evaluation_display",
        "covered_files",
        "display",
        "user_advice",
        "recipe",
        "progress",
        "diverged",
        "sample_texts",
        "session",
        "start_ranks",
        "advise",
        "statement",
        "search_options",
        "search_promise",
        "search_summary",
        "search_runs",
        "search",
        "train",
        "epsilon",
        "plan_tables",
        "plan",
        "compare",
        "inspect_data",
        "inspect",
        "generate",
        "report",
        "ledger_totals",
        "ledger",
        "main",
        "output_streams",
        "entry",
    ),
    "foreign": (
        "find_stack",
        "call_template",
        "placeholders",
        "module_state",
        "loss_state",
        "leaves",
        "init_tape",
        "torch_init",
        "uses",
        "stack",
        "hub",
        "perturb_samples",
        "check_on_example",
        "check_structure",
        "inspect",
        "module",
        "adapters",
        "__init__",
    ),
    "kfac": (
        "types",
        "factor_forms",
        "factors",
        "foreach",
        "layers",
        "factor_storage",
        "preconditioning",
        "inversion",
        "ranks",
        "measure",
        "form_policy",
        "config",
        "state_slots",
        "state",
        "refresh",
        "optimizer",
        "private",
        "__init__",
    ),
}
# The steps of the proof know each other only where one is given the other's value.
PROOF = {
    "microbatches": set(),
    "loss_distributions": set(),
    "sampling": {"microbatches"},
    "sum_rounding": {"sampling"},
    "noise": set(),
    "composition": set(),
    "releases": {"accounting", "mechanism", "loss_distributions"},
    "curves": {"accounting", "releases", "loss_distributions"},
    "shown_numbers": set(),
    "guarantee": {"releases", "shown_numbers"},
    "several_runs": {"guarantee", "releases", "shown_numbers"},
    "chain": {"guarantee", "releases", "several_runs"},
    "clipping": {"noise"},  # adaptive clipping adds noise to its count
    "mechanism": {"clipping", "sampling"},
    "accounting": {"mechanism", "clipping", "sampling", "composition", "loss_distributions", "shown_numbers"},
    "selection": {"accounting", "mechanism", "clipping", "sampling", "loss_distributions"},
}


@cache
def imports(path: Path) -> set[str]:
    """Return every module imported anywhere in the file, inside functions too, as absolute dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: expected absolute imports"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def parts_of(path: Path) -> tuple[str, ...]:
    """``fdp/optimizers/adam.py`` is ``("optimizers", "adam")``; ``fdp/step.py`` is ``("step",)``."""
    return path.relative_to(ROOT / "fdp").with_suffix("").parts


NAMES = {parts_of(path)[0] for path in FILES}


def packages_used(path: Path, depth: int = 0, inside: str = "fdp") -> set[str]:
    """Return the packages, ``depth`` folders below ``inside``, that a file imports, its own left out."""
    prefix = f"{inside}."
    used = {name.removeprefix(prefix).split(".")[0] for name in imports(path) if name.startswith(prefix)}
    there = {parts_of(each)[depth] for each in FILES if len(parts_of(each)) > depth}
    return (used & there) - {parts_of(path)[depth]}


def test_the_list_names_every_package_and_no_other():
    assert set(ORDER) == NAMES
    for package, order in INSIDE.items():
        assert set(order) == {parts_of(path)[1] for path in FILES if parts_of(path)[0] == package}
    assert set(PROOF) | {"__init__"} == {parts_of(path)[1] for path in FILES if parts_of(path)[0] == "privacy"}


def test_an_import_is_seen():
    assert packages_used(ROOT / "fdp" / "ops.py") >= {"gradients", "types"}
    assert packages_used(ROOT / "fdp" / "kfac" / "optimizer.py", 1, "fdp.kfac") >= {"refresh", "state"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here, *below = parts_of(path)
    allowed = set(ORDER[: ORDER.index(here)])
    assert packages_used(path) <= allowed
    if here in INSIDE:
        order = INSIDE[here]
        assert packages_used(path, 1, f"fdp.{here}") <= set(order[: order.index(below[0])])


@pytest.mark.parametrize("step", sorted(PROOF))
def test_the_steps_of_the_proof_stand_alone(step):
    path = ROOT / "fdp" / "privacy" / f"{step}.py"
    assert packages_used(path) <= {"types", "arguments", "tree", "keys"}
    assert packages_used(path, 1, "fdp.privacy") <= PROOF[step]


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
