"""Train all of 8 billion parameters with flat clipping on one GPU: tokens/s and memory beside plain training.

    python -m benchmarks.llama_8b --json runs/llama_8b.json          # one H200, about three minutes
    python -m benchmarks.llama_8b --render runs/llama_8b.json        # write the page; needs no GPU
    python -m benchmarks.llama_8b --layers 2 --width 64 --vocab 512 --context 32 --device cpu     # a try, anywhere

The shape of Llama-3.1-8B, context 2048, bfloat16 compute. What is held between steps:

    float32 parameters               4 bytes       the master weights
    bfloat16 copy                    2 bytes       what blocks compute with, written by the update
    two moments in bfloat16          4 bytes       rounded stochastically (``fdp.optimizers.narrow_moments``)
    float32 sum over microbatches    4 bytes       its rounding is covered by more noise (``fdp.privacy.sum_rounding``)

A step is several microbatches, so that sums are accumulated as in a real run; then noise, AdamW and the cast in one
pass. ``none`` is the same step without privacy: the same state, the same accumulation, the same compiled blocks. Both
are recorded as CUDA graphs, as ``fdp train`` does by itself. Tokens are random; the learning rate is not 0. Steps that
compile or record are not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.device import GIB, free, peak_gib, synchronize
from benchmarks.report import current_commit, hardware, publish, versions
from fdp import keys
from fdp.checks.first_call import Checks
from fdp.fast.compile_modes import Compile, make_execution
from fdp.gradients import timing
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.model import Model
from fdp.models import LANGUAGE, LlamaConfig, llama
from fdp.optimizers import adamw, narrow_moments
from fdp.parallel.sharding import abstract_params
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.privacy.sum_rounding import rounding_slack
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step
from fdp.types import Batch

LLAMA_8B = LANGUAGE["llama-8b"]
assert isinstance(LLAMA_8B, LlamaConfig)
MODES = ("none", "auto")
LEAST_TOKENS_PER_SECOND, LEAST_SHARE, MOST_GIB = 6000, 0.90, 135
RESULTS = Path(__file__).parent / "results"


class Settings(NamedTuple):
    """The shape of a step: its microbatches, how many are timed, and how their memory is used."""

    config: LlamaConfig
    microbatch: int
    microbatches: int
    steps: int
    device: torch.device
    memory_budget: float | None
    checkpoint_activations: bool
    cuda_graph: bool


def measure(mode: str, settings: Settings) -> dict[str, Any]:
    """Return the figures of one mode; everything that it allocated is freed at its end."""
    device, config = settings.device, settings.config
    model, samples = llama(config, name="llama-8b"), settings.microbatch * settings.microbatches
    sampling = poisson(1 << 20, expected_batch_size=samples)
    private = mode != "none"
    mechanism = Mechanism(sampling, flat(max_norm=1.0), 1.0) if private else without_noise(sampling, flat(max_norm=1.0))
    plan = make_step_plan(model, Method(mode), settings)
    optimizer = narrow_moments(adamw(1e-5))
    execution = make_execution(
        compile=Compile.BLOCK,
        cuda_graph=settings.cuda_graph,
        checkpoint_activations=settings.checkpoint_activations,
        sum_dtype=torch.float32,
        microbatch_size=settings.microbatch,
    )
    began = time.perf_counter()
    params = model.init(keys.key(0).to(device))
    state = init_state(model, params, optimizer, mechanism, execution=execution)
    del params
    synchronize(device)
    ready = time.perf_counter()
    held = torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else None
    options: dict[str, Any] = {"mechanism": mechanism, "plan": plan, "execution": execution}
    step = make_train_step(model, optimizer, donate=("state",), checks=Checks.SKIPPED, **options)
    batch, key, seconds, losses = make_batch(settings, sampling), keys.key(1).to(device), [], []
    for t in range(settings.steps + (2 if settings.cuda_graph else 1)):
        synchronize(device)
        start = time.perf_counter()
        state, metrics = step(state, batch, key)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(float(metrics.losses.mean()))
        print(f"  {mode} step {t}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}", flush=True)
    timed = statistics.median(seconds[-settings.steps :])
    rounding = make_stages(model, optimizer, donate=("state",), **options).rounding(device)
    del state, step, batch, metrics
    return {
        "mode": mode,
        "tokens_per_second": samples * config.context / timed,
        "seconds": timed,
        "fastest_seconds": min(seconds[-settings.steps :]),
        "peak_gib": peak_gib(device),
        "state_gib": held,
        "stored_gib": plan.stored_bytes / GIB,
        "init_seconds": ready - began,
        "first_step_seconds": seconds[0],
        "extra_noise": rounding_slack(sampling, rounding),
        "losses": losses,
        "choices": count_choices(plan),
    }


def make_step_plan(model: Model, method: Method, settings: Settings) -> Plan:
    """Plan a microbatch by measured times, before anything else takes memory."""
    tokens = torch.zeros(settings.microbatch, settings.config.context + 1, dtype=torch.int64, device=settings.device)
    shapes = abstract_params(model, None, device=settings.device)
    dtype, options = torch.bfloat16, {"method": method, "memory_budget": settings.memory_budget}
    if method is Method.NONE:
        options["memory_budget"] = None
    plan = make_plan(model, shapes, {"tokens": tokens}, dtype=dtype, **options)
    if method is Method.NONE or not timing.is_worth_timing(settings.device, dtype):
        return plan
    uses = [use for block in plan.uses for use in block]
    times = timing.measure(uses, dtype=dtype, device=settings.device, store=timing.default_store())
    return make_plan(model, shapes, {"tokens": tokens}, dtype=dtype, timings=times, **options)


def make_batch(settings: Settings, sampling: Any) -> Batch:
    """Return random tokens as a batch that is accepted at every step."""
    shape = (settings.microbatches, settings.microbatch, settings.config.context + 1)
    draw = torch.Generator(device=settings.device).manual_seed(0)
    tokens = torch.randint(0, settings.config.vocab_size, shape, device=settings.device, generator=draw)
    return trusted_batch({"tokens": tokens}, torch.ones(shape[:2], device=settings.device), sampling, step=None)


def count_choices(plan: Plan) -> dict[str, int]:
    """Return how many leaves have their norms and sum computed in which way."""
    found: dict[str, int] = {}
    for choice in plan.choices.values():
        name = f"{choice.norm.value}, {choice.sum.value}"
        found[name] = found.get(name, 0) + 1
    return found


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the page: a table of the modes, and what was asked for."""
    rows, settings = {row["mode"]: row for row in content["rows"]}, content["settings"]
    lines = [
        "# 8 billion parameters, all of them, flat clipping, one GPU",
        "",
        f"The shape of Llama-3.1-8B ({settings['parameters']:,} parameters), context {settings['context']}, a step of "
        f"{settings['microbatches']} microbatches of {settings['microbatch']}: bfloat16 compute, float32 master "
        f"weights, moments in bfloat16 (stochastic rounding), a float32 sum whose rounding is part of the sensitivity.",
        f"`{content['command']}`, commit {content['commit']}, {content['hardware']}, "
        f"{', '.join(f'{k} {v}' for k, v in content['versions'].items())}, {content['date']}. Data in `{name}.json`.",
        "",
        "| mode | tokens/s | s per step | peak GiB | state GiB | stored GiB | extra noise |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, row in rows.items():
        gib = ["" if row[which] is None else f"{row[which]:.1f}" for which in ("peak_gib", "state_gib", "stored_gib")]
        noise = f"{100 * row['extra_noise']:.2f} %" if row["extra_noise"] else ""
        lines.append(
            f"| `{mode}` | {row['tokens_per_second']:,.0f} | {row['seconds']:.3f} | {' | '.join(gib)} | {noise} |"
        )
    lines += ["", *verdicts(rows)]
    if "auto" in rows:
        chosen = ", ".join(f"{count} leaves by {way}" for way, count in rows["auto"]["choices"].items())
        lines += ["", f"`auto`: {chosen} (norm, sum)."]
    return "\n".join(lines) + "\n"


def verdicts(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line per target: what was asked for, and what was found."""
    if "auto" not in rows:
        return []
    auto, lines = rows["auto"], []
    targets: list[tuple[str, float | None, float, bool]] = [
        ("tokens/s of `auto`, at least", auto["tokens_per_second"], LEAST_TOKENS_PER_SECOND, True),
        ("peak GiB of `auto`, below", auto["peak_gib"], MOST_GIB, False),
    ]
    if "none" in rows:
        share = auto["tokens_per_second"] / rows["none"]["tokens_per_second"]
        targets.insert(0, ("speed of `auto` over `none`, at least", share, LEAST_SHARE, True))
    for words, found, target, at_least in targets:
        if found is not None:
            met = found >= target if at_least else found < target
            lines.append(f"- {words} {target:g}: {found:,.3g}{'' if met else ' (**not met**)'}")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train 8 billion parameters privately on one GPU.")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--microbatch", type=int, default=1, help="samples computed at once")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    parser.add_argument("--memory-budget", type=float, help="GiB that auto may store between norms and sum")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--cuda-graph", action=argparse.BooleanOptionalAction, help="by default on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("layers", "width", "vocab", "context"):
        parser.add_argument(f"--{name}", type=int, help="a smaller model, to try the script")
    parser.add_argument("--json", type=Path, default=Path("runs/llama_8b.json"))
    parser.add_argument("--render", type=Path, help="write the page of a finished file")
    return parser.parse_args(argv)


def config_of(options: argparse.Namespace) -> LlamaConfig:
    """Return the preset's shape, or a smaller one."""
    config, width = LLAMA_8B, options.width
    assert isinstance(config, LlamaConfig)
    if width is not None:
        config = config._replace(width=width, heads=max(4, width // 128), hidden=width * 7 // 2, key_heads=4)
    changes = {"layers": options.layers, "vocab_size": options.vocab, "context": options.context}
    return config._replace(**{field: value for field, value in changes.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the modes, print them, and write them to a file; or write the page of such a file."""
    options = parse(argv)
    if options.render is not None:
        print(publish(options.render, RESULTS, page))
        return
    config, device = config_of(options), torch.device(options.device)
    settings = Settings(
        config,
        options.microbatch,
        options.microbatches,
        options.steps,
        device,
        None if options.memory_budget is None else options.memory_budget * GIB,
        options.checkpoint_activations,
        device.type == "cuda" if options.cuda_graph is None else options.cuda_graph,
    )
    parameters = sum(torch.Size(leaf.shape).numel() for leaf in llama(config).leaves.values())
    content = {
        "benchmark": "llama_8b",
        "hardware": hardware(device),
        "versions": versions(device),
        "commit": current_commit(),
        "command": f"python -m benchmarks.llama_8b --microbatch {settings.microbatch} --microbatches "
        f"{settings.microbatches}{' --checkpoint-activations' if settings.checkpoint_activations else ''}"
        f"{' --no-cuda-graph' if options.cuda_graph is False else ''}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "settings": {"parameters": parameters, **config._asdict(), **settings._asdict(), "config": None}
        | {"device": device.type},
        "rows": [],
    }
    for mode in options.modes:
        free(device)
        row = measure(mode, settings)
        content["rows"].append(row)
        peak = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.1f} GiB"
        print(f"{mode}: {row['tokens_per_second']:,.0f} tokens/s, {row['seconds']:.3f} s per step{peak}", flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1))
    print("\n".join(verdicts({row["mode"]: row for row in content["rows"]})))


if __name__ == "__main__":
    main()
