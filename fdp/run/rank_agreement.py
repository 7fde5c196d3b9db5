"""Checks that all ranks of a run were given the same: each draws samples and noise from a key that follows from it.

    key of a rank = fold_in(root, settings)              ranks whose settings differ would draw other samples and noise

Without them, a sample that two ranks drew would count twice, and the noise of one rank's shard would not be that of the
sum. ``fdp train`` compares its options as well; from Python, every rank makes its own module, loss and optimizer.

    >>> check_ranks_agree(config, mechanism, digest, sharding)        # before the first parameters
    >>> check_ranks_draw_alike(config, key, plan, sharding)           # before the first step
"""

from __future__ import annotations

from fdp.fingerprint import fingerprint
from fdp.gradients.plan import Plan
from fdp.parallel.agree import check_agreement
from fdp.parallel.sharding import Sharding
from fdp.privacy.mechanism import Mechanism
from fdp.run.run_config import RunConfig
from fdp.types import Key


def check_ranks_agree(config: RunConfig, mechanism: Mechanism, digest: str, sharding: Sharding | None) -> None:
    """Refuse ranks whose data or public numbers differ, before anything is computed together."""
    if sharding is None:
        return
    check_agreement(
        {
            "number of samples": len(config.dataset),
            "content of the data": digest,
            "noise multiplier": mechanism.noise_multiplier,
            "population": mechanism.sampling.population,
            "statistics": mechanism.statistics and mechanism.statistics.public(),
            "batch size": config.batch_size,
            "microbatch": config.microbatch_sizes,
            "steps": config.steps,
        }
    )


def check_ranks_draw_alike(config: RunConfig, key: Key, plan: Plan, sharding: Sharding | None) -> None:
    """Refuse ranks whose model, loss, optimizer, clipping or first parameters differ.

    Each would draw samples and noise of its own: a sample that two ranks drew would count twice.
    """
    if sharding is None:
        return
    check_agreement(
        {
            "clipping": config.clip.name,
            "delta": config.delta,
            "dtype": str(config.dtype),
            "kind of device": config.device.type,
            "list of trained leaves": sorted(config.model.trainable),
            "microbatch sizes": config.microbatch_sizes,
            "method": plan.method.value,
        }
    )
    # Of each other difference, the key is all that is known.
    check_agreement({"model, loss, optimizer, clip norm or first parameters": fingerprint(key)})
