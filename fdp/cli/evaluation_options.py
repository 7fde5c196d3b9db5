"""The options of ``fdp train`` about evaluation: held-out data, and what the numbers cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.needs import Needs
from fdp.cli.options import Effect, Flag


@dataclass(frozen=True)
class EvaluationOptions:
    """The held-out data, how often it is evaluated, and the budget of the evaluations."""

    panel: ClassVar[str] = "Evaluation"

    eval_data: Annotated[
        str | None,
        Flag(
            "Held-out data: a path read like --data, or digits-test. Without --eval-public or --eval-epsilon its "
            "people are outside the guarantee."
        ),
    ] = None
    eval_public: Annotated[
        bool, Flag("Say that --eval-data is public: evaluating on it costs nothing.", needs=Needs.EVAL_DATA)
    ] = False
    eval_fraction: Annotated[
        float | None,
        Flag(
            "Hold out about this fraction of the samples of --data, such as 0.1; they are not trained on. A public "
            "hash of a sample (of a user's name with --unit user) decides."
        ),
    ] = None
    eval_every: Annotated[
        int | None,
        Flag(
            "Steps between evaluations; there is always one at the end.",
            default_text="a tenth of the steps",
            needs=Needs.EVALUATED,
        ),
    ] = None
    eval_epsilon: Annotated[
        float | None,
        Flag(
            "Release the evaluations with noise: together they cost each held-out sample this epsilon, at --delta. "
            "Trained-on samples pay nothing for them.",
            needs=Needs.EVALUATION,
        ),
    ] = None
    eval_population: Annotated[
        int | None,
        Flag(
            "With --eval-epsilon: the public number of held-out samples.",
            default_text="from --population and --eval-fraction; for --eval-data their number, rounded up",
            needs=Needs.EVAL_EPSILON,
        ),
    ] = None
    eval_max_loss: Annotated[
        float | None,
        Flag(
            "With --eval-epsilon: clip every held-out loss to this.",
            default_text="log(vocabulary or classes), the loss of a uniform guess",
            needs=Needs.EVAL_EPSILON,
        ),
    ] = None
    keep_best: Annotated[
        bool,
        Flag("Export the parameters with the lowest held-out loss, not the last ones.", needs=Needs.EVALUATION),
    ] = False
    patience: Annotated[
        int | None,
        Flag(
            "Stop after this many evaluations without a lower held-out loss. Epsilon stays that of all --steps.",
            needs=Needs.EVALUATION,
        ),
    ] = None
    ema: Annotated[
        float | None,
        Flag("Evaluate and export an exponential average of the parameters with this decay, such as 0.99; free."),
    ] = None
    sample: Annotated[
        list[str] | None,
        Flag(
            "Generate text from this prompt at every evaluation; give it several times for several prompts. Free: the "
            "text depends on the parameters alone.",
            effect=Effect.EXECUTION,
        ),
    ] = None
    sample_tokens: Annotated[
        int, Flag("With --sample: tokens to generate.", effect=Effect.EXECUTION, needs=Needs.SAMPLE)
    ] = 64
