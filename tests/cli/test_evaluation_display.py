"""The words for evaluations: their noise beside them, with digits that fit, and what lowers it."""

from __future__ import annotations

import re

import pytest

from fdp.cli.configure import configure
from fdp.cli.evaluation_display import Noise, header_words, result_words
from fdp.run.evaluation import make_evaluator
from fdp.run.evaluation_config import planned_steps
from fdp.run.noised_evaluation import evaluation_noise
from fdp.run.prepare_run import prepare
from fdp.run.step_record import Evaluation
from tests.cli.train_runs import small_options


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (None, "held-out loss 2.3145, perplexity 10.12"),
        (Noise(1.85, 0.3), "held-out loss 2.3 ± 1.9, perplexity 1.6 to 64"),
        (Noise(0.152, 0.03), "held-out loss 2.31 ± 0.15, perplexity 8.7 to 12"),
        (Noise(0.000012, 0.0), "held-out loss 2.3145 ± 0.0000, perplexity 10.12"),
        (Noise(12.0, 2.0), "held-out loss 2 ± 12, perplexity 6.2e-05 to 1.6e+06"),
    ],
)
def test_a_noised_loss_has_its_noise_and_digits_that_fit(noise: Noise | None, said: str) -> None:
    assert result_words(Evaluation(2.3145, None, "noised"), noise) == said


def test_a_noised_accuracy_has_its_noise() -> None:
    evaluation = Evaluation(2.3145, 0.712, "noised")
    assert result_words(evaluation, Noise(0.2, 0.021)) == "held-out loss 2.31 ± 0.20, accuracy 71.2% ± 2.1%"
    assert result_words(evaluation, Noise(0.2, 0.21)).endswith("accuracy 71% ± 21%")
    assert result_words(evaluation).endswith("held-out loss 2.3145, accuracy 71.2%")


@pytest.mark.parametrize(
    ("epsilon", "often", "said"),
    [
        (1.0, 1, "--eval-every 4 (3 evaluations) has ±0.29"),
        (0.1, 1, "--eval-every 10 (1 evaluation) has ±"),
        (0.1, 10, "more than ±0.3, so that one figure says little. A larger --eval-epsilon"),
        (50.0, 1, "fewer evaluations have less"),
    ],
)
def test_the_header_says_what_helps_against_noise_that_hides_the_loss(epsilon: float, often: int, said: str) -> None:
    options = {"eval_data": "digits-test", "eval_every": often, "steps": 10, "warmup": 1, "seed": 3}
    run, _ = prepare(configure(small_options(**options, eval_epsilon=epsilon, eval_max_loss=20.0)))
    evaluator = make_evaluator(run)
    assert evaluator is not None
    assert evaluator.release is not None
    words = header_words(evaluator)
    assert said in words
    if (named := re.search(r"--eval-every (\d+) \((\d+) evaluations?\) has ±([\d.]+)", words)) is not None:
        every, evaluations, noise = int(named[1]), int(named[2]), float(named[3])
        assert len(planned_steps(every, 10)) == evaluations
        fewer = evaluation_noise(evaluator.release.budget, releases=evaluations)
        exact = evaluator.release.loss_deviation() * fewer / evaluator.release.noise_multiplier
        assert noise == pytest.approx(exact, rel=0.06), "two digits"
        more = re.search(r"part held out \(([\d.]+) times", words)
        assert more is not None
        assert float(more[1]) == pytest.approx(evaluator.release.loss_deviation() / 0.3, rel=0.06)
