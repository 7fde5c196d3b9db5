"""The promise of a run in a few sentences, from its summary, or from its settings if it has not ended.

>>> promise(read_run_folder(Path("runs/notes")))
"""

from __future__ import annotations

from fdp.privacy.guarantee import shown_epsilon
from fdp.report.contents import planned_epsilon
from fdp.run.run_folder import RunFolder


def promise(run: RunFolder) -> str:
    """Return the guarantee of a run in words; paragraphs are separated by an empty line."""
    config, summary, budget = run.config, run.summary or {}, planned_epsilon(run)
    if not summary.get("private", bool(config.get("noise_multiplier"))) or budget is None:
        return "This run is not private. Its parameters may reveal the data that they were trained on."
    unit = summary.get("unit") or "one sample"
    words = (
        f"The parameters are ({shown_epsilon(budget)}, {config['delta']:.3g})-differentially private. Neighbouring "
        f"data sets: {config.get('relation')}. One sample is {unit}."
    )
    noise, rate = config.get("noise_multiplier"), config.get("sampling_rate")
    how = (
        f"Mechanism: in each of {run.settings['steps']:,} steps, samples are drawn by Poisson sampling with the public "
        f"rate {rate:.3g}; each sample's gradient is clipped, and Gaussian noise of {noise:.4g} times the clipping "
        f"bound is added to the sum."
    )
    more = []
    if run.summary is None:
        more.append("The run has not ended: the figure is that of all its planned steps.")
    elif summary["steps"] < summary["steps_planned"]:
        less = shown_epsilon(summary["epsilon_if_stop_was_decided_in_advance"] or 0.0)
        more.append(
            f"The run stopped after {summary['steps']} steps. The epsilon is that of all {summary['steps_planned']}, "
            f"since what the run showed may have led to the stop; it is {less} if the stop was decided on before."
        )
    return "\n\n".join([words, how, *more])
