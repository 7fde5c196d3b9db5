"""fdp: functional, differentially private, fully sharded training on PyTorch.

    >>> import fdp
    >>> step = fdp.make_train_step(model, optimizer, mechanism=mechanism, plan=plan)

The names below are the public surface, each from the module that defines it; the modules are public too. They are
loaded when first used, so that ``fdp --help`` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdp.accounting import epsilon as epsilon
    from fdp.accounting import noise_multiplier_for as noise_multiplier_for
    from fdp.audit import check_independent as check_independent
    from fdp.audit import check_norms as check_norms
    from fdp.budget import spent as spent
    from fdp.checks import Checks as Checks
    from fdp.clipping import clip_to as clip_to
    from fdp.foreign.module import from_module as from_module
    from fdp.foreign.uses import operation as operation
    from fdp.foreign.uses import rule as rule
    from fdp.keys import fold_in as fold_in
    from fdp.keys import key as key
    from fdp.mechanism import Mechanism as Mechanism
    from fdp.mesh import make_mesh as make_mesh
    from fdp.methods import Method as Method
    from fdp.methods import make_plan as make_plan
    from fdp.model import Block as Block
    from fdp.model import LeafSpec as LeafSpec
    from fdp.model import Model as Model
    from fdp.model import from_loss as from_loss
    from fdp.noise import add_gaussian as add_gaussian
    from fdp.noise import expected_mean as expected_mean
    from fdp.offload import Offload as Offload
    from fdp.per_sample import clipped_sum as clipped_sum
    from fdp.per_sample import per_sample_norms as per_sample_norms
    from fdp.rules import Rule as Rule
    from fdp.rules import check_rule as check_rule
    from fdp.sampling import poisson as poisson
    from fdp.sampling import sample_batch as sample_batch
    from fdp.sharding import Zero as Zero
    from fdp.sharding import init_params as init_params
    from fdp.sharding import make_sharding as make_sharding
    from fdp.sharding import over_tensor_axis as over_tensor_axis
    from fdp.sharding import shared_key as shared_key
    from fdp.step import init_state as init_state
    from fdp.step import make_train_step as make_train_step
    from fdp.types import Batch as Batch
    from fdp.types import FdpError as FdpError
    from fdp.types import TrainState as TrainState

_HOME = {
    "accounting": ("epsilon", "noise_multiplier_for"),
    "audit": ("check_independent", "check_norms"),
    "budget": ("spent",),
    "checks": ("Checks",),
    "clipping": ("clip_to",),
    "foreign.module": ("from_module",),
    "foreign.uses": ("operation", "rule"),
    "keys": ("fold_in", "key"),
    "mechanism": ("Mechanism",),
    "mesh": ("make_mesh",),
    "methods": ("Method", "make_plan"),
    "model": ("Block", "LeafSpec", "Model", "from_loss"),
    "noise": ("add_gaussian", "expected_mean"),
    "offload": ("Offload",),
    "per_sample": ("clipped_sum", "per_sample_norms"),
    "rules": ("Rule", "check_rule"),
    "sampling": ("poisson", "sample_batch"),
    "sharding": ("Zero", "init_params", "make_sharding", "over_tensor_axis", "shared_key"),
    "step": ("init_state", "make_train_step"),
    "types": ("Batch", "FdpError", "TrainState"),
}
__all__ = sorted(name for names in _HOME.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"fdp.{module}"), name)
    raise AttributeError(f"module 'fdp' has no attribute {name!r}")
