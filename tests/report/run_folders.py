"""Folders of runs that never ran, for the tests of reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fdp.cli.fast_defaults import resolve_fast_defaults
from fdp.cli.options import to_dict
from fdp.cli.train_options import TrainOptions
from fdp.run.step_record import Evaluation, StepRecord, record_to_json


def make_records(
    steps: int,
    *,
    private: bool = True,
    evaluate_every: int | None = None,
    cost: str = "public",
    texts: tuple[str, ...] = (),
) -> list[StepRecord]:
    """Return records of a run whose loss falls from 5 to 3 and whose epsilon rises to 8."""
    records = []
    for step in range(1, steps + 1):
        done = step / steps
        loss = 3 + 2 * math.exp(-4 * done) + 0.05 * math.sin(12.9898 * step)
        evaluated = evaluate_every is not None and step % evaluate_every == 0
        records.append(
            StepRecord(
                step=step,
                loss=loss,
                epsilon=8 * math.sqrt(done) if private else None,
                clipped_fraction=0.4 + 0.3 * math.sin(step) if private else None,
                norm_q10=0.5 + 0.1 * math.sin(step) if private else None,
                norm_q50=1.0 + 0.2 * math.sin(step) if private else None,
                norm_q90=2.0 + 0.4 * math.sin(step) if private else None,
                max_norm=1.0 if private else None,
                samples=64 + step % 7,
                seconds=0.5 + 0.01 * (step % 5),
                parameter_norm=10 + done,
                evaluation=Evaluation(loss + 0.1, None, cost, texts) if evaluated else None,
                peak_memory_bytes=2**30 + step * 2**16,
            )
        )
    return records


def write_run(
    folder: Path, records: list[StepRecord], *, planned: int | None = None, finished: bool = True, **settings: Any
) -> Path:
    """Write the files of a run with these records, and return the folder."""
    folder.mkdir(parents=True)
    planned = len(records) if planned is None else planned
    private = not records or records[-1].epsilon is not None
    given = to_dict(resolve_fast_defaults(TrainOptions())) | {"steps": planned, "lr": 4e-3} | settings
    config = {
        "settings": given,
        "delta": 1e-6,
        "noise_multiplier": 1.1 if private else 0.0,
        "epsilon": 8.0 if private else None,
        "epsilon_planned": 8.0 if private else None,
        "relation": "add or remove one sample; sampling rate public",
        "population": 16000,
        "sampling_rate": 0.004,
        "device": "cpu",
        "versions": {"fdp": "0.1.0", "torch": "2.13.0"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record_to_json(each)) + "\n" for each in records))
    (folder / "plan.json").write_text(json.dumps(make_plan_json()))
    if finished:
        (folder / "summary.json").write_text(json.dumps(make_summary(records, planned, private)))
    return folder


def make_summary(records: list[StepRecord], planned: int, private: bool) -> dict[str, Any]:
    """Return the summary of a run with these records."""
    return {
        "loss_first": records[0].loss if records else None,
        "loss_last": records[-1].loss if records else None,
        "private": private,
        "epsilon": 8.0 if private else None,
        "epsilon_if_stop_was_decided_in_advance": records[-1].epsilon if private and records else None,
        "delta": 1e-6 if private else None,
        "relation": "add or remove one sample; sampling rate public" if private else None,
        "unit": "one window of 129 tokens",
        "noise_multiplier": 1.1 if private else 0.0,
        "steps": len(records),
        "steps_planned": planned,
        "samples": 15903,
        "parameter_count": 123456,
        "parameter_norm": 11.0,
        "parameter_sha256": "0" * 64,
        "seconds_per_step": 0.5,
        "peak_memory_bytes": 2**30,
        "method": "auto" if private else "none",
        "world_size": 1,
        "seed": "os",
    }


def make_plan_json() -> dict[str, Any]:
    """Return the plan of a model with four equal blocks."""
    leaves = [("embed.tokens", "embedding", "gram", "pair")]
    for block in range(4):
        leaves += [
            (f"blocks.{block}.qkv", "linear", "gram", "pair"),
            (f"blocks.{block}.mlp", "linear", "keep", "reuse"),
        ]
    rows = [
        {
            "leaf": leaf,
            "use": use,
            "shape": [64, 64],
            "input_shape": [32, 128, 64],
            "norm": norm,
            "sum": how,
            "stored_bytes": 2.0**20,
            "predicted_seconds": 1e-4,
        }
        for leaf, use, norm, how in leaves
    ]
    about = {"method": "auto", "microbatch": 32, "dtype": "float32", "stored_bytes": 9 * 2.0**20}
    return about | {"rows": rows}
