"""The promise of a run in a few paragraphs: the first sections of its statement, or a short form of them.

>>> statement_words(read_run_folder(Path("runs/notes")))
"""

from __future__ import annotations

from fdp.privacy.guarantee import shown_epsilon
from fdp.report.contents import planned_epsilon
from fdp.report.documents import Block, Bullets
from fdp.report.run_facts import read_facts
from fdp.report.statement import make_statement
from fdp.run.run_folder import RunFolder
from fdp.types import FdpError

SECTIONS = ("No guarantee", "Guarantee", "Mechanism")
"""Sections of the statement that the page shows; ``fdp statement`` writes all."""


def statement_words(run: RunFolder) -> str:
    """Return the guarantee and the mechanism of a run, from its statement if its folder has all the facts for one."""
    try:
        document = make_statement(read_facts(run)).document
    except (FdpError, KeyError, AssertionError):  # a folder of an older version
        return promise(run)
    blocks = [_words(each) for part in document.sections if part.title in SECTIONS for each in part.blocks]
    return "\n\n".join(words for words in blocks if words)


def _words(block: Block) -> str:
    if isinstance(block, str):
        return block
    return "\n".join(f"• {item}" for item in block.items) if isinstance(block, Bullets) else ""


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
