"""The options of ``fdp train`` on several ranks: how they are started, what is sharded, what is kept on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.needs import Needs
from fdp.cli.options import Effect, Flag, Range


@dataclass(frozen=True)
class RankOptions:
    """The ranks, what is sharded over them, and what is kept on the CPU."""

    panel: ClassVar[str] = "On several ranks (--nproc N on this machine, or torchrun -m fdp train ...)"

    nproc: Annotated[
        int | None,
        Flag(
            "Start this many ranks on this machine, by torch's own launcher.",
            effect=Effect.EXECUTION,
            range=Range.COUNT,
        ),
    ] = None
    mesh: Annotated[
        str | None,
        Flag(
            "Axes of the ranks: shard=4, or replicate=2,shard=2,tensor=2.",
            default_text="shard=N with --nproc N",
            effect=Effect.EXECUTION,
        ),
    ] = None
    zero: Annotated[
        int,
        Flag(
            "ZeRO stage along shard: 0 shards nothing, 2 parameters and optimizer state; 3 also gathers by block.",
            effect=Effect.EXECUTION,
            needs=Needs.SEVERAL_RANKS,
        ),
    ] = 3
    offload: Annotated[
        str, Flag("What to keep on the CPU: none, all, or a list of params, grads, optimizer.", effect=Effect.EXECUTION)
    ] = "none"
    checkpoint_activations: Annotated[
        bool,
        Flag(
            "Store only every block's input and run its forward again; --zero 3 always does.", effect=Effect.EXECUTION
        ),
    ] = False
    reduce: Annotated[
        str,
        Flag(
            "Reduce the sums once per step (step) or block by block (microbatch); auto: microbatch for --zero 3, else "
            "step.",
            effect=Effect.EXECUTION,
            needs=Needs.SEVERAL_RANKS,
        ),
    ] = "auto"
    reduce_dtype: Annotated[
        str,
        Flag(
            "Dtype of the reduced sums; auto: float64 if private, else float32. float32 rounds private sums, see "
            "docs/many_ranks.md.",
            effect=Effect.EXECUTION,
            needs=Needs.SEVERAL_RANKS,
        ),
    ] = "auto"
    replicate_data: Annotated[
        bool,
        Flag(
            "Compute the whole batch on every rank; the result is the same.",
            effect=Effect.EXECUTION,
            needs=Needs.SEVERAL_RANKS,
        ),
    ] = False
    timeout: Annotated[
        float,
        Flag(
            "Seconds to wait for a rank that does not answer.",
            effect=Effect.EXECUTION,
            needs=Needs.SEVERAL_RANKS,
            range=Range.POSITIVE,
        ),
    ] = 600.0
