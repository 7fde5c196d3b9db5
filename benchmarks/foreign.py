"""Milliseconds and memory of a step of `transformers` models, against fdp's own models and against Opacus.

    python -m benchmarks.foreign --json runs/foreign.json --budget 500     # run it again to continue where it stopped
    python -m benchmarks.foreign --render runs/foreign.json                # write the page; needs no GPU

Prints a line per row. ``--render`` writes ``benchmarks/results/foreign_<hardware>_<yyyymm>.{md,json}``.

| shape        | `transformers` class                                            | B | T    |
|--------------|-----------------------------------------------------------------|---|------|
| `gpt2_large` | GPT2LMHeadModel, 36 layers of width 1280, untied (840M)         | 4 | 1024 |
| `llama_1b`   | LlamaForCausalLM, 16 layers of width 2048, untied (1.1B)        | 8 | 2048 |

Modules are built from a configuration (nothing is downloaded) and converted by ``fdp.foreign.hub.causal``; `auto` and
`none` are fdp's modes. Opacus gets the module itself, with rules for the two layers that it has none for. bfloat16
compute, float32 master weights, AdamW. ``benchmarks/harness.py`` says how modes are checked (against ``materialize``,
before they are timed) and measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.device import choose_sdpa
from benchmarks.gpt2_large import CHECKED_CONTEXT, CHECKED_LAYERS, CONFIG, OPACUS, RESULTS, WIDTH, fastest, ratio
from benchmarks.harness import sweep
from benchmarks.measure import Limits
from benchmarks.modes import FAST, OURS, Candidate, Case, Row, Speed
from benchmarks.regimes import LLAMA_1B, ratios_to, table_line, verdict
from benchmarks.report import overstatements, publish
from benchmarks.sweep_options import arguments, budget_of, open_report, speed_of
from fdp import tree
from fdp.foreign.hub.causal import causal_lm
from fdp.init import constant, normal
from fdp.model import LeafSpec, Model
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.types import Path as Leaf
from fdp.types import Tree

Config = GPTConfig | LlamaConfig

MODES = ("none", "auto", *OPACUS)
OWN, FOREIGN = "own", "transformers"
LEAST_SPEED = 0.9
"""Target speed of ``auto`` on a transformers module, relative to fdp's own model of the same shape."""


class Shape(NamedTuple):
    """fdp's own model of a shape, and the size of its batch."""

    make: Callable[..., Model]
    config: Config
    batch_size: int


SHAPES = {"gpt2_large": Shape(gpt, CONFIG._replace(context=1024), 4), "llama_1b": Shape(llama, LLAMA_1B, 8)}


# Modules of transformers


def make_module(config: Config) -> nn.Module:
    """Return the ``transformers`` module of this shape, with uninitialised parameters."""
    import transformers
    from transformers.initialization import no_init_weights

    common: dict[str, Any] = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tied}
    common |= {"bos_token_id": None, "eos_token_id": None}
    if isinstance(config, GPTConfig):
        shape: dict[str, Any] = {"n_layer": config.layers, "n_embd": config.width, "n_head": config.heads}
        dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        theirs = transformers.GPT2Config(**common, **shape, **dropout, n_positions=config.context)
        kind: Any = transformers.GPT2LMHeadModel
    else:
        theirs = transformers.LlamaConfig(
            **common,
            num_hidden_layers=config.layers,
            hidden_size=config.width,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_heads,
            intermediate_size=config.hidden,
            max_position_embeddings=config.context,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        )
        kind = transformers.LlamaForCausalLM
    with no_init_weights():
        return kind._from_config(theirs, attn_implementation="sdpa", dtype=torch.float32)


def foreign(config: Config, *, name: str = FOREIGN) -> Model:
    """Return the module as an fdp model whose parameters are drawn from a key, as those of fdp's own models are."""
    model = causal_lm(make_module(config).eval(), context=config.context)
    return model._replace(name=name, leaves={path: _with_init(path, leaf) for path, leaf in model.leaves.items()})


def _with_init(path: Leaf, leaf: LeafSpec) -> LeafSpec:
    if len(leaf.shape) > 1:
        return leaf._replace(init=normal(0.02))
    return leaf._replace(init=constant(0.0 if path.endswith("bias") else 1.0))


# Opacus on them


def by_opacus(
    config: Config,
    mode: str,
    model: Model,
    samples: int,
    device: torch.device,
    params: Tree | None,
    *,
    dtype: torch.dtype,
) -> Candidate:
    """Build the module with as many layers and tokens as ``model``, trained by Opacus."""
    from benchmarks.baselines import Setup, private_by_opacus

    assert model.context is not None
    shape = config._replace(layers=len(model.blocks) - 2, context=model.context)
    register_opacus_rules()
    module = make_module(shape).to(device).train()  # it has no dropout, and Opacus refuses a module in eval mode
    values = {} if params is None else tree.flatten(params)
    with torch.no_grad():
        for name, leaf in module.named_parameters():
            if params is not None:
                leaf.copy_(values[name])
            elif leaf.ndim > 1:
                leaf.normal_(std=0.02)
            else:
                leaf.fill_(0.0 if name.endswith("bias") else 1.0)
    setup = Setup(shape, samples, device, dtype, False, params)
    return private_by_opacus(module, setup, logits_of=logits_of, ghost=mode == "opacus_ghost")


def logits_of(module: nn.Module, ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
    """Return the logits; positions are looked up for every sample, as Opacus needs."""
    places = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)
    return module(input_ids=ids, position_ids=places, use_cache=False).logits


def register_opacus_rules() -> None:
    """Register Opacus rules for GPT-2's linear layers, which store (inputs, outputs), and for Llama's norms."""
    from opacus.grad_sample.linear import (  # pyright: ignore[reportMissingImports] (the extra `bench` installs it)
        compute_linear_grad_sample,
        compute_linear_norm_sample,
    )
    from opacus.grad_sample.utils import (  # pyright: ignore[reportMissingImports]
        register_grad_sampler,
        register_norm_sampler,
    )
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.pytorch_utils import Conv1D

    def transposed_linear(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        found = compute_linear_grad_sample(layer, activations, backprops)
        return {leaf: g.transpose(1, 2) if leaf.ndim == 2 else g for leaf, g in found.items()}

    def rms_norm_scale(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        x = activations[0].float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.variance_epsilon)
        return {layer.weight: torch.einsum("n...d,n...d->nd", backprops.float(), normed)}

    register_grad_sampler(Conv1D)(transposed_linear)
    register_norm_sampler(Conv1D)(compute_linear_norm_sample)  # a norm does not depend on the transpose
    register_grad_sampler(LlamaRMSNorm)(rms_norm_scale)


# The sweep


def make_cases(
    name: str,
    *,
    speed: Speed = FAST,
    layers: int | None = None,
    memory_budget: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Case, Case]:
    """Return the cases of a shape: fdp's own model, and the transformers module."""
    make, config, batch_size = SHAPES[name]
    config = config._replace(layers=layers or config.layers)
    few, short = min(CHECKED_LAYERS, config.layers), min(CHECKED_CONTEXT, config.context)
    checked = config._replace(layers=few, context=short)

    def case(whose: str, make: Callable[..., Model], baseline: Any) -> Case:
        regime = f"{name}, {whose}"
        small = make(checked, name=f"{regime}, {few} layers, {short} tokens")
        return Case(
            regime, config.layers, make(config), small, batch_size, speed, dtype, memory_budget, baseline=baseline
        )

    return case(OWN, make, None), case(FOREIGN, foreign, partial(by_opacus, config, dtype=dtype))


def modes_of(case: Case, modes: Sequence[str]) -> list[str]:
    """Return the modes that the case has."""
    return [mode for mode in modes if mode in OURS or case.baseline is not None]


# The page


def page(content: dict[str, Any], *, name: str) -> str:
    """Return the Markdown page of a report."""
    rows: list[Row] = content["rows"]
    versions = ", ".join(f"{what} {which}" for what, which in content["versions"].items())
    settings = content["settings"]
    lines = [
        f"# Models of transformers on one {content['hardware']}, {content['date']}",
        "",
        f"    {content['command']}",
        "",
        fill(
            f"{versions}; commit {', '.join(sorted({row['commit'] for row in rows}))}; fdp with `--compile "
            f"{settings['compile']}`{' and a CUDA graph' if settings['cuda_graph'] else ''}; attention kernel: "
            f"{settings['sdpa']}. Rows: `{name}.json`. Models and measurement: `benchmarks/foreign.py`, "
            "`benchmarks/harness.py`.",
            WIDTH,
        ),
        "",
        "| model | layers | B | T | mode | ms | 20-80 % | tokens/s | peak GiB | speed / `none` | memory / `none` |",
        "|---" * 11 + "|",
    ]
    for shape in SHAPES:
        for whose in (OWN, FOREIGN):
            mine = [row for row in rows if row["regime"] == f"{shape}, {whose}"]
            plain = _timed(rows, shape, whose).get("none")
            lines += [table_line(row, plain) for row in sorted(mine, key=lambda row: MODES.index(row["mode"]))]
    lines += overstatements(rows)
    lines += ["", "| figure | target | measured | |", "|---|---|---|---|"]
    for shape in SHAPES:
        own, theirs = _timed(rows, shape, OWN), _timed(rows, shape, FOREIGN)
        for mode in ("auto", "none"):
            speed, _ = ratios_to(theirs.get(mode), own.get(mode))
            lines.append(verdict(f"speed, `{mode}` of transformers / own, {shape}", ">=", LEAST_SPEED, speed))
        best, auto = fastest(theirs, OPACUS), theirs.get("auto")
        faster = ratio(best["ms"] if best else None, auto["ms"] if auto else None)
        which = f" ({best['mode']})" if best else ""
        lines.append(verdict(f"speed, `auto` of transformers / best Opacus{which}, {shape}", ">=", 1.0, faster))
    return "\n".join(lines) + "\n"


def _timed(rows: Sequence[Row], shape: str, whose: str) -> dict[str, Row]:
    return {row["mode"]: row for row in rows if row["regime"] == f"{shape}, {whose}" and "failed" not in row}


def render(source: Path, folder: Path = RESULTS) -> Path:
    """Write page and rows of a report as ``foreign_<hardware>_<yyyymm>.{md,json}``; return the page's path."""
    return publish(source, folder, page)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("Milliseconds and memory of a step of models of transformers.", modes=MODES)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    options = parser.parse_args(argv)
    if options.render:
        print(f"written: {render(options.render)}")
        return
    device, start = torch.device(options.device), time.perf_counter()
    choose_sdpa(options.sdpa)
    report = open_report(options, "foreign", device)
    for name in options.shapes:
        cases = make_cases(name, speed=speed_of(options), layers=options.layers, memory_budget=budget_of(options))
        for case in cases:
            sweep(
                report,
                [case],
                modes_of(case, options.modes),
                device=device,
                limits=Limits(cap=options.cap),
                budget=options.budget - (time.perf_counter() - start),
                profiled=options.profile,
                retry=options.retry,
            )


if __name__ == "__main__":
    main()
