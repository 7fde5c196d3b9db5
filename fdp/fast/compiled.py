"""Compile the forward and backward of a block once, and use them for every block of its kind.

    out, pull = runner.tapped_vjp(block, weights, carry, data, uses, trainable)        as fdp.gradients.taps.tapped_vjp
    out, pull = runner.plain_vjp(block, weights, carry, data, trainable)               gradients of the weights

Layers that compute the same function on leaves of the same shapes are one kind, so a model of 36 layers compiles as
fast as one of 3. ``torch.func`` cannot pass residuals from a compiled forward to a backward that is compiled
separately; plain autograd can (AOTAutograd splits the two). Taps make the gradients that it returns true derivatives,
and a tap that the output does not depend on is an error, never a zero.

    >>> runner = CompiledRunner()
    >>> out, pull = runner.tapped_vjp(block, weights, carry, data, uses, trainable)

Microbatches of all sizes from two samples on run the same code, which is compiled for the largest: the number of
samples is a variable of it, unless a block fixes it. So a sample is rounded alike in each
(:mod:`fdp.checks.equal_sizes`), and smaller sizes need no compilation.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from fdp_kernels.token_sums import foreach_token_sums, split_token_sums
from torch import Tensor

from fdp import tree
from fdp.equal_rounding import compiler_options
from fdp.fast.fused_head import can_fuse, fused_vjp
from fdp.gradients.execution import Pull
from fdp.gradients.plan import Plan
from fdp.gradients.rules import HALF, Record, Rule
from fdp.gradients.tape import Tape, Use
from fdp.gradients.taps import batch_size_of, make_taps, records_of, trace_tape, watch, zeros_of
from fdp.model import Block
from fdp.types import FdpError, Flat, Path, Tree

LONG_TOKENS = 2048
"""From this many tokens on, a bias's gradient is summed outside the compiled backward, which it would slow down."""


class CompiledBlock(NamedTuple):
    """A compiled forward, differentiated by plain autograd, and the rules of its uses.

    ``biases`` maps a bias to the use whose output gradient, summed over tokens, is its gradient. ``zeros`` are what
    taps are expanded from; all blocks of the kind share them in all steps, because filling one is a launch.
    """

    run: Callable[..., tuple[Tree, Flat]]
    rules: dict[str, tuple[Rule, dict[str, Any]]]
    biases: dict[str, str]
    zeros: dict[str, Tensor]


class CompiledCode(NamedTuple):
    """Code that a kind of block compiled to, and for how many samples: it serves so many and fewer."""

    run: Callable[..., tuple[Tree, Flat]]
    samples: int


class CompiledRunner:
    """A runner (``gradients.execution``) that compiles each kind of block once. ``backend`` is torch.compile's.

    If ``one_order``, code that adds does not depend on measured times (:func:`fdp.equal_rounding.compiler_options`).
    """

    compiles = True

    def __init__(self, backend: str = "inductor", *, one_order: bool = False):
        self.backend = backend
        self.options = compiler_options(backend, one_order=one_order)
        self.kinds: dict[Any, CompiledBlock] = {}
        self.code: dict[Any, CompiledCode] = {}

    def tapped_vjp(
        self, block: Block, weights: Flat, carry: Tree, data: Tree, uses: tuple[Use, ...], trainable: frozenset[Path]
    ) -> tuple[Tree, Callable[[Tree], tuple[Tree, dict[Path, list[Record]]]]]:
        """Return a block's output and its pull-back to its carry and to its parameters' records."""
        local, names, here = _local(block, weights)
        trained = frozenset(names[path] for path in weights if path in trainable)
        mine = tuple(use._replace(name=_local_name(use, names), path=names[use.path]) for use in uses)
        about = (trained, _about(block, local, here, carry, data))
        key = (about, mine, samples := batch_size_of(data))
        if key not in self.kinds:
            named = Block(block.name, local, block.apply)
            tape, _ = trace_tape(named, here, trained, carry, data, attached=True)
            separate = _separate_biases(tape)
            planned = [(use.name, use.rule) for use in mine if use.name not in separate]
            run = _tapped_run(named, trained, planned, tape)
            if not tape.changed:  # what writes into its module can only be undone without compilation
                alike = (about, _per_sample(mine, samples), tuple(tape.layouts), tape.written_outputs(), *planned)
                run = self._compile(run, block, alike, samples)
            with torch.inference_mode(False):  # zeros created in that mode could never be differentiated
                zeros = zeros_of(mine, here)
            self.kinds[key] = CompiledBlock(run, tape.rules, separate, zeros)
        kind = self.kinds[key]
        taps = {
            name: tap.detach().requires_grad_()
            for name, tap in make_taps(mine, here, kind.zeros).items()
            if name not in kind.biases
        }
        carry = _requiring_grad(carry)
        with torch.enable_grad():
            out, inputs = kind.run(here, carry, data, taps)
        paths = {name: path for path, name in names.items()}

        def pull(gradient: Tree) -> tuple[Tree, dict[Path, list[Record]]]:
            carry_gradient, tap_gradients = _gradients(out, gradient, carry, taps)
            tap_gradients |= _token_sums({bias: tap_gradients[use] for bias, use in kind.biases.items()})
            found = records_of(mine, kind.rules, inputs, tap_gradients)
            return carry_gradient, {paths[name]: records for name, records in found.items()}

        return tree.map(Tensor.detach, out), pull

    def plain_vjp(
        self, block: Block, weights: Flat, carry: Tree, data: Tree, trainable: frozenset[Path]
    ) -> tuple[Tree, Callable[[Tree], tuple[Tree, Flat]]]:
        """Return a block's output and its pull-back to its carry and to the gradients of its trainable leaves."""
        local, names, here = _local(block, weights)
        alike = _about(block, local, here, carry, data)
        key = (alike, samples := batch_size_of(data))
        if key not in self.kinds:
            run = _plain_run(Block(block.name, local, block.apply))
            self.kinds[key] = CompiledBlock(self._compile(run, block, alike, samples), {}, {}, {})
        trained = {names[path]: w.detach().requires_grad_() for path, w in weights.items() if path in trainable}
        carry = _requiring_grad(carry)
        with torch.enable_grad():
            out, _ = self.kinds[key].run(here | trained, carry, data)

        def pull(gradient: Tree) -> tuple[Tree, Flat]:
            carry_gradient, found = _gradients(out, gradient, carry, trained)
            return carry_gradient, {path: found[name] for path, name in names.items() if name in found}

        return tree.map(Tensor.detach, out), pull

    def head_vjp(
        self,
        block: Block,
        weights: Flat,
        carry: Tree,
        data: Tree,
        uses: tuple[Use, ...],
        plan: Plan,
        gradient: Tensor | None,
    ) -> tuple[Tensor, Pull] | None:
        """Fuse a model's head with its loss, if the plan allows it (see :mod:`fdp.fast.fused_head`)."""
        return fused_vjp(self, block, weights, carry, data, uses, plan, gradient) if can_fuse(block, plan) else None

    def function(self, key: Any, run: Callable, *values: Any) -> Any:
        """Return ``run(*values)``, compiled once for ``key`` and the shapes, dtypes and devices of its tensors.

        ``key`` identifies all else that ``run`` depends on: what it closes over, and the types that hold the tensors.
        """
        tensors = (leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor))
        known = (key, tuple((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in tensors))
        if known not in self.kinds:
            self.kinds[known] = CompiledBlock(self._compile_as(f"function_{len(self.kinds)}", run), {}, {}, {})
        return self.kinds[known].run(*values)

    def _compile(self, run: Callable, block: Block, alike: Any, samples: int) -> Callable:
        """Return ``run``, compiled unless the block forbids it, or what it was compiled to for more samples.

        ``alike`` identifies all that ``run`` depends on but the number of samples.
        """
        if not block.compiled:
            return run
        key = (alike, samples > 1)  # torch.compile compiles for one sample apart
        if key not in self.code or self.code[key].samples < samples:
            compile = partial(self._compile_as, f"block_{block.name}", run)
            self.code[key] = CompiledCode(_with_variable_size(compile), samples)
        return lambda *values: self.code[key].run(*values)  # of all sizes so far, also of larger ones that follow

    def _compile_as(self, name: str, run: Callable) -> Callable:
        from torch._dynamo.exc import Unsupported  # here, since importing it takes long

        # With its own code object, a kind does not share torch.compile's cache and its size limit with others.
        code = run.__code__.replace(co_name=name.replace(".", "_"))
        own = types.FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)
        compiled = torch.compile(own, fullgraph=True, dynamic=False, backend=self.backend, options=self.options)

        def run_or_raise(*values: Any) -> Any:
            try:
                return compiled(*values)
            except Unsupported as error:
                raise FdpError(
                    f"{name}: torch.compile cannot trace it: compile nothing (--compile none, Compile.NONE). It says: "
                    f"{' '.join(str(error).split())}"
                ) from error

        return run_or_raise


def _with_variable_size(compile: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return ``compile()``, a function of (weights, carry, data, ...), for any number of samples if that can vary.

    Any call may compile: one after a failure, or one under other settings of torch, say of its products. Code in which
    the number is fixed is compiled for each, beyond as many as torch allows by itself in a function of its own.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit  # here, since importing it takes long

    code, own = compile(), {}

    def run(weights: Flat, carry: Tree, data: Tree, *taps: Flat) -> Any:
        samples, data = batch_size_of(data), tree.map(_own, data)  # marks are not for the caller's tensors
        for leaf in tree.leaves((carry, data, taps)):
            if leaf.shape[:1] == (samples,):
                torch._dynamo.maybe_mark_dynamic(leaf, 0)
        try:
            return own.get(samples, code)(weights, carry, data, *taps)
        except FailOnRecompileLimitHit:
            own[samples] = compile()
        return own[samples](weights, carry, data, *taps)

    return run


def _own(leaf: Tensor) -> Tensor:
    """Return a tensor that fills its memory from the start; torch.compile would compile again for one that does not."""
    if leaf.storage_offset() or not leaf.is_contiguous():
        return leaf.clone(memory_format=torch.contiguous_format)
    return leaf.detach()


def _about(block: Block, local: Tree, weights: Flat, carry: Tree, data: Tree) -> tuple[Any, ...]:
    """Return what the code of a block depends on: its function, and all shapes, but not the number of samples."""
    samples = batch_size_of(data)

    def describe(leaf: Tensor) -> tuple[Any, ...]:
        shape = tuple(leaf.shape)
        return (None, *shape[1:]) if shape[:1] == (samples,) else shape, leaf.dtype, leaf.device

    values = (carry, data)
    leaves = tuple((tuple(w.shape), w.dtype, w.device) for w in weights.values())
    return block.apply, repr(local), leaves, *zip(tree.paths(values), map(describe, tree.leaves(values)))


def _per_sample(uses: tuple[Use, ...], samples: int) -> tuple[Any, ...]:
    """Return the uses as they are for any number of samples; as they are if shapes do not begin with it."""
    shapes = [shape for use in uses for shape in (use.input_shape, use.output_shape)]
    if any(shape[:1] != (samples,) for shape in shapes):
        return uses
    return tuple(use._replace(input_shape=use.input_shape[1:], output_shape=use.output_shape[1:]) for use in uses)


def _local(block: Block, weights: Flat) -> tuple[Tree, dict[Path, str], Flat]:
    """Return the block's tree of leaves named by their order, so that blocks of a kind are equal, and its weights."""
    names = {path: str(i) for i, path in enumerate(dict.fromkeys(tree.leaves(block.params)))}
    return tree.select(names, block.params), names, {names[path]: w.detach() for path, w in weights.items()}


def _local_name(use: Use, names: dict[Path, str]) -> str:
    return names[use.path] + use.name.removeprefix(use.path)


def _requiring_grad(carry: Tree) -> Tree:
    return tree.map(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), carry)


def _gradients(out: Tree, gradient: Tree, carry: Tree, taps: Flat) -> tuple[Tree, Flat]:
    """Return the gradients of carry and taps. Every tap must have one; a carry that the output ignores gets zeros."""
    opened = [leaf for leaf in tree.leaves(carry) if leaf.requires_grad]
    wanted = [*opened, *taps.values()]
    follows = [(o, g) for o, g in zip(tree.leaves(out), tree.leaves(gradient)) if o.requires_grad]
    if not wanted or not follows:
        found: list[Tensor | None] = [None] * len(wanted)
    else:
        outs, gradients = zip(*follows)
        found = list(torch.autograd.grad(outs, wanted, gradients, allow_unused=True))
    if lost := [name for name, g in zip(taps, found[len(opened) :]) if g is None]:
        raise FdpError(f"compiled block: expected an output that depends on every tap, got none from {lost[:4]}")
    of_carry = iter(found[: len(opened)])

    def slope(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf  # a placeholder: integers have no gradient
        own = next(of_carry) if leaf.requires_grad else None
        return torch.zeros_like(leaf) if own is None else own

    return tree.map(slope, carry), dict(zip(taps, found[len(opened) :]))  # type: ignore[arg-type]


def _separate_biases(tape: Tape) -> dict[str, str]:
    """Return the biases that are added once, to the output of one use with many tokens."""
    long = {use.name for use in tape.uses if len(use.output_shape) == 3 and use.output_shape[1] >= LONG_TOKENS}
    return {bias: use for bias, use in tape.biases.items() if use in long and tape.expansions.count(bias) == 1}


def _token_sums(gradients: Flat) -> Flat:
    """Sum each over tokens. In half precision on a GPU, gradients that differ in width only share a launch."""
    alike: dict[Any, list[str]] = {}
    for name, g in gradients.items():
        alike.setdefault((g.shape[:2], g.dtype, g.is_cuda), []).append(name)
    found: Flat = {}
    for (_, dtype, on_gpu), names in alike.items():
        these = [gradients[name] for name in names]
        sums = (
            split_token_sums(foreach_token_sums(these), these)
            if on_gpu and dtype in HALF
            else [g.sum(1) for g in these]
        )
        found |= dict(zip(names, sums))
    return found


def _tapped_run(
    block: Block, trained: frozenset[str], planned: list[tuple[str, str]], seen: Tape
) -> Callable[..., tuple[Tree, Flat]]:
    layouts, written = seen.layouts, seen.written_outputs()

    def run(weights: Flat, carry: Tree, data: Tree, taps: Flat) -> tuple[Tree, Flat]:
        tape = Tape(batch_size_of(data), taps, attached=True)
        tape.known, tape.written = layouts, written
        out = block.apply(watch(block, weights, trained, tape), carry, data)
        met = [(use.name, use.rule) for use in tape.uses]
        if [use for use in planned if use not in met]:  # torch.compile hides some functions of torch
            raise FdpError(f"{block.name}: expected the uses {planned}, as planned, got {met}; do not compile it")
        return out, {name: x.detach() for name, x in tape.inputs.items()}

    return run


def _plain_run(block: Block) -> Callable[..., tuple[Tree, Flat]]:
    def run(weights: Flat, carry: Tree, data: Tree) -> tuple[Tree, Flat]:
        return block.apply(tree.select(weights, block.params), carry, data), {}

    return run
