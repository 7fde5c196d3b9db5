"""The values of a record that trackers plot, by the names under which they plot them.

>>> tracked_values(record)                            # {"loss/train": 3.1, "privacy/epsilon": 0.8, ...}
"""

from __future__ import annotations

from fdp.run.step_record import StepRecord

NAMES = {
    "loss": "loss/train",
    "epsilon": "privacy/epsilon",
    "clipped_fraction": "clipping/clipped_fraction",
    "norm_q10": "clipping/norm_q10",
    "norm_q50": "clipping/norm_q50",
    "norm_q90": "clipping/norm_q90",
    "max_norm": "clipping/max_norm",
    "parameter_norm": "parameters/norm",
    "samples": "speed/samples",
    "seconds": "speed/seconds_per_step",
    "kfac_failures": "kfac/failures",
}


def tracked_values(record: StepRecord) -> dict[str, float]:
    """Return the values of a step that it has."""
    values: dict[str, float | None] = {name: getattr(record, field) for field, name in NAMES.items()}
    if record.seconds > 0:
        values["speed/samples_per_second"] = record.samples / record.seconds
    if record.peak_memory_bytes is not None:
        values["speed/peak_memory_gib"] = record.peak_memory_bytes / 2**30
    if record.evaluation is not None:
        values["loss/held_out"] = record.evaluation.loss
        values["accuracy/held_out"] = record.evaluation.accuracy
    return {name: float(value) for name, value in values.items() if value is not None}
