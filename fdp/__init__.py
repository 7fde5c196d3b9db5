"""fdp: functional, differentially private, fully sharded training on PyTorch.

    >>> import fdp
    >>> step = fdp.make_train_step(model, optimizer, mechanism=mechanism, plan=plan)

The names below are the public surface, each from the module that defines it; the modules are public too. They are
loaded when first used, so that ``fdp --help`` need not wait for torch. Importing fdp tells torch to give cuBLAS a small
workspace, unless the environment says otherwise (``fdp.equal_rounding``).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fdp.equal_rounding import limit_workspaces as _limit_workspaces

if TYPE_CHECKING:
    from fdp.checks.first_call import Checks as Checks
    from fdp.checks.model_checks import check_independent as check_independent
    from fdp.checks.model_checks import check_norms as check_norms
    from fdp.fast.compile_modes import Compile as Compile
    from fdp.fast.compile_modes import make_execution as make_execution
    from fdp.foreign.module import from_module as from_module
    from fdp.foreign.uses.custom_rules import operation as operation
    from fdp.foreign.uses.custom_rules import rule as rule
    from fdp.gradients.clipped_sum import clipped_sum as clipped_sum
    from fdp.gradients.execution import Execution as Execution
    from fdp.gradients.execution import Memory as Memory
    from fdp.gradients.per_sample import per_sample_norms as per_sample_norms
    from fdp.gradients.plan import Method as Method
    from fdp.gradients.plan import make_plan as make_plan
    from fdp.gradients.rules import Rule as Rule
    from fdp.gradients.rules import check_rule as check_rule
    from fdp.keys import fold_in as fold_in
    from fdp.keys import key as key
    from fdp.model import Block as Block
    from fdp.model import LeafSpec as LeafSpec
    from fdp.model import Model as Model
    from fdp.model import from_loss as from_loss
    from fdp.parallel.mesh import make_mesh as make_mesh
    from fdp.parallel.offload import Offload as Offload
    from fdp.parallel.sharded_init import init_params as init_params
    from fdp.parallel.sharded_init import shared_key as shared_key
    from fdp.parallel.sharding import Zero as Zero
    from fdp.parallel.sharding import make_sharding as make_sharding
    from fdp.parallel.sharding import over_tensor_axis as over_tensor_axis
    from fdp.privacy.accounting import epsilon as epsilon
    from fdp.privacy.accounting import noise_multiplier_for as noise_multiplier_for
    from fdp.privacy.clipping import clip_to as clip_to
    from fdp.privacy.mechanism import Mechanism as Mechanism
    from fdp.privacy.noise import add_gaussian as add_gaussian
    from fdp.privacy.noise import expected_mean as expected_mean
    from fdp.privacy.sampling import poisson as poisson
    from fdp.privacy.sampling import sample_batch as sample_batch
    from fdp.run.private_run import PrivateRun as PrivateRun
    from fdp.run.private_run import private as private
    from fdp.run.spent import spent as spent
    from fdp.step import init_state as init_state
    from fdp.step import make_train_step as make_train_step
    from fdp.types import Batch as Batch
    from fdp.types import FdpError as FdpError
    from fdp.types import TrainState as TrainState

if sys.version_info < (3, 11):  # noqa: UP036
    found = ".".join(str(part) for part in sys.version_info[:3])
    raise ImportError(
        f"fdp needs Python >= 3.11, found {found}: run it with python3.11 or later (make: PYTHON=python3.11)"
    )
_limit_workspaces()

_HOME = {
    "privacy.accounting": ("epsilon", "noise_multiplier_for"),
    "checks.model_checks": ("check_independent", "check_norms"),
    "run.private_run": ("PrivateRun", "private"),
    "run.spent": ("spent",),
    "checks.first_call": ("Checks",),
    "privacy.clipping": ("clip_to",),
    "foreign.module": ("from_module",),
    "foreign.uses.custom_rules": ("operation", "rule"),
    "keys": ("fold_in", "key"),
    "privacy.mechanism": ("Mechanism",),
    "parallel.mesh": ("make_mesh",),
    "gradients.plan": ("Method", "make_plan"),
    "model": ("Block", "LeafSpec", "Model", "from_loss"),
    "privacy.noise": ("add_gaussian", "expected_mean"),
    "parallel.offload": ("Offload",),
    "gradients.clipped_sum": ("clipped_sum",),
    "gradients.execution": ("Execution", "Memory"),
    "gradients.per_sample": ("per_sample_norms",),
    "fast.compile_modes": ("Compile", "make_execution"),
    "gradients.rules": ("Rule", "check_rule"),
    "privacy.sampling": ("poisson", "sample_batch"),
    "parallel.sharding": ("Zero", "make_sharding", "over_tensor_axis"),
    "parallel.sharded_init": ("init_params", "shared_key"),
    "step": ("init_state", "make_train_step"),
    "types": ("Batch", "FdpError", "TrainState"),
}
__all__ = sorted(name for names in _HOME.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"fdp.{module}"), name)
    raise AttributeError(f"module 'fdp' has no attribute {name!r}")
