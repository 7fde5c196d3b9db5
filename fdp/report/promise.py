"""The promise of a run in a few paragraphs: the first sections of its statement, or a short form of them.

>>> statement_words(read_run_folder(Path("runs/notes")))
"""

from __future__ import annotations

from fdp.privacy.shown_numbers import round_up, shown_delta, shown_epsilon
from fdp.report.contents import planned_epsilon
from fdp.report.documents import Block, Bullets
from fdp.report.mechanism_words import describe_mechanism
from fdp.report.run_facts import read_facts
from fdp.report.statement import guarantee_section
from fdp.run.run_folder import RunFolder
from fdp.types import FdpError

BULLET = "• "
"""The start of a line that is an entry of a list."""


def statement_words(run: RunFolder) -> str:
    """Return the guarantee and the mechanism of a run in the words of its statement, which ``fdp statement`` writes."""
    try:
        facts = read_facts(run)
    except (FdpError, KeyError):  # a folder of an older version
        return promise(run)
    if not facts.private:
        return promise(run)
    blocks = (*guarantee_section(facts).blocks, "Mechanism:", Bullets(tuple(describe_mechanism(facts))))
    return "\n\n".join(words for words in map(_words, blocks) if words)


def _words(block: Block) -> str:
    if isinstance(block, str):
        return block
    return "\n".join(f"{BULLET}{item}" for item in block.items) if isinstance(block, Bullets) else ""


def promise(run: RunFolder) -> str:
    """Return the guarantee of a run in words; paragraphs are separated by an empty line."""
    config, summary, budget = run.config, run.summary or {}, planned_epsilon(run)
    if not summary.get("private", bool(config.get("noise_multiplier"))) or budget is None:
        return "This run is not private. Its parameters may reveal the data that they were trained on."
    unit = summary.get("unit") or "one sample"
    words = (
        f"The parameters are ({shown_epsilon(budget)}, {shown_delta(config['delta'])})-differentially private. "
        f"Neighbouring data sets: {config.get('relation')}. One sample is {unit}."
    )
    noise, rate = round_up(config["noise_multiplier"], 4), config.get("sampling_rate")
    how = (
        f"Mechanism: in each of {run.settings['steps']:,} steps, samples are drawn by Poisson sampling with the public "
        f"rate {rate:.3g}; each sample's gradient is clipped, and Gaussian noise of {noise} times the clipping "
        f"bound is added to the sum."
    )
    open_end = "The run has not ended: the figure is that of all its planned steps." if run.summary is None else ""
    return "\n\n".join(each for each in (words, how, open_end, _stopped(run)) if each)


def _stopped(run: RunFolder) -> str:
    """Return what a stop before the last step means for epsilon; nothing for a run that made all its steps."""
    summary = run.summary or {}
    if not summary or summary["steps"] >= summary["steps_planned"]:
        return ""
    less = shown_epsilon(summary["epsilon_if_stop_was_decided_in_advance"] or 0.0)
    return (
        f"The run stopped after {summary['steps']} steps. The epsilon is that of all {summary['steps_planned']}, since "
        f"what the run showed may have led to the stop; it is {less} if the stop was decided on before."
    )
