"""Layers of ``torch.nn``, alone and in small networks; parametrised, pruned, in train() and in eval()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.zoo.draws import floats, ids, integers, normal
from benchmarks.zoo.hold import Case, Draw, Kind
from fdp.foreign.uses.dropout import with_keys
from fdp.keys import key

ROWS, TOKENS, SIGNAL = floats("input", 6), floats("input", 5, 6), floats("input", 4, 9)
IMAGE, VOLUME = floats("input", 4, 7, 6), floats("input", 4, 5, 4, 4)
WHOLE = {"materialize": ("*",)}


def _kind(name: str, module: Callable[[], nn.Module], draw: Draw, **more: Any) -> Kind:
    return Kind(name, lambda: Case(module().eval(), draw), **more)


def _chain(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def _between(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A layer without parameters between two that have some."""
    return _chain(lambda: nn.Linear(6, 6), layer, lambda: nn.Linear(6, 3))


def _after_convolution(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return _chain(lambda: nn.Conv2d(4, 4, 3, padding=1), layer, nn.Flatten)


class Pairs(nn.Module):
    """A layer of two inputs, given one and its reverse."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input, input.flip(-1))


class Steps(nn.Module):
    """A recurrent cell, step by step."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, input: Tensor) -> Tensor:
        state = None
        for x in input.unbind(1):
            state = self.cell(x, state)
        return state[0] if isinstance(state, tuple) else state  # pyright: ignore


class Recurrent(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input)[0]


class SelfAttention(nn.Module):
    """Attention of tokens to themselves."""

    def __init__(self, *, tokens_first: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, batch_first=not tokens_first, **options)
        self.tokens_first = tokens_first

    def forward(self, input: Tensor) -> Tensor:
        x = input.transpose(0, 1) if self.tokens_first else input
        y = self.layer(x, x, x, need_weights=False)[0]
        return y.transpose(0, 1) if self.tokens_first else y


class Decoder(nn.Module):
    """A decoder layer whose memory is its input, reversed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input, input.flip(1))


class Bags(nn.Module):
    """A bag of words and a head."""

    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(13, 5, mode=mode, **options), nn.Linear(5, 3)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.bag(input))


class Adaptive(nn.Module):
    """An adaptive softmax over clusters of classes; its own loss has shapes that depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.AdaptiveLogSoftmaxWithLoss(6, 12, cutoffs=[3, 6], div_value=1.5)

    def forward(self, input: Tensor) -> Tensor:
        return self.head.log_prob(input)


class Routed(Adaptive):
    """An adaptive softmax that sends each sample through the clusters of its class."""

    def forward(self, input: Tensor, label: Tensor) -> Tensor:  # pyright: ignore
        return self.head(input, label).output.unsqueeze(1)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def _pruned(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(layer, "weight", amount=0.4)


def _old(wrap: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """Return a layer parametrised by a hook, as before torch 2.0."""
    return lambda: wrap(nn.Linear(6, 5))


def _dropping(layer: Callable[[], nn.Module], **more: Any) -> Kind:
    draw: Draw = lambda n, g: with_keys({"input": normal(g, n, 5, 6)}, key(n))  # noqa: E731
    return Kind(f"{type(layer()).__name__} in train()", lambda: Case(_between(layer)().train(), draw), **more)


def _parameters(holder: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held: Any = holder()

        def forward(self, input: Tensor) -> Tensor:
            values = self.held.values() if isinstance(self.held, nn.ParameterDict) else self.held
            for leaf in values:
                input = (input @ leaf).tanh()
            return input

    return Held


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "LeakyReLU in place": lambda: nn.LeakyReLU(0.1, inplace=True),
    "ELU in place": lambda: nn.ELU(inplace=True),
    "SELU": nn.SELU,
    "CELU": nn.CELU,
    "GELU": nn.GELU,
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "Mish": nn.Mish,
    "Hardswish in place": lambda: nn.Hardswish(inplace=True),
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardtanh in place": lambda: nn.Hardtanh(inplace=True),
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Softshrink": lambda: nn.Softshrink(0.1),
    "Tanhshrink": nn.Tanhshrink,
    "Threshold in place": lambda: nn.Threshold(0.1, 0.2, inplace=True),
    "RReLU in eval()": nn.RReLU,
    "Softmax": lambda: nn.Softmax(-1),
    "Softmin": lambda: nn.Softmin(-1),
    "LogSoftmax": lambda: nn.LogSoftmax(-1),
    "Dropout in eval()": lambda: nn.Dropout(0.5, inplace=True),
    "Identity": nn.Identity,
}
MAPS: dict[str, Callable[[], nn.Module]] = {
    "MaxPool2d": lambda: nn.MaxPool2d(2),
    "AvgPool2d": lambda: nn.AvgPool2d(2),
    "LPPool2d": lambda: nn.LPPool2d(2, 2),
    "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(2),
    "AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d(2),
    "PixelShuffle": lambda: nn.PixelShuffle(2),
    "PixelUnshuffle": lambda: nn.Sequential(nn.Upsample(size=(8, 6)), nn.PixelUnshuffle(2)),
    "Upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "Unfold": lambda: nn.Unfold(3),
    "ReflectionPad2d": lambda: nn.ReflectionPad2d(1),
    "ReplicationPad2d": lambda: nn.ReplicationPad2d(1),
    "ZeroPad2d": lambda: nn.ZeroPad2d(1),
    "ChannelShuffle": lambda: nn.ChannelShuffle(2),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    "Dropout2d in eval()": nn.Dropout2d,
    "GLU over channels": lambda: nn.GLU(1),
}

LAYERS: list[Kind] = [
    _kind("Linear", lambda: nn.Linear(6, 5), ROWS, compiled=True),
    _kind("Linear on tokens", lambda: nn.Linear(6, 5), TOKENS, compiled=True),
    _kind("Linear without bias", lambda: nn.Linear(6, 5, bias=False), TOKENS),
    _kind("Linear with a frozen bias", lambda: _frozen(nn.Linear(6, 5), "bias"), TOKENS, compiled=True),
    _kind("Bilinear", lambda: Pairs(nn.Bilinear(6, 6, 3)), ROWS, mend=WHOLE, compiled=True),
    _kind("Embedding", lambda: nn.Embedding(13, 5), ids("input", 6), compiled=True),
    _kind("Embedding with padding_idx", lambda: nn.Embedding(13, 5, padding_idx=0), ids("input", 6, least=0)),
    _kind("Embedding with sparse gradients", lambda: nn.Embedding(13, 5, sparse=True), ids("input", 6), compiled=True),
    _kind(
        "Embedding scaled by frequency",
        lambda: nn.Embedding(13, 5, scale_grad_by_freq=True),
        ids("input", 6),
        mend=WHOLE,
    ),
    _kind(
        "Embedding with max_norm",
        lambda: nn.Embedding(13, 5, max_norm=1.0),
        ids("input", 6),
        refusal="max_norm=1.0 renormalises every row",
        mend=lambda case: case._replace(module=_without_max_norm(case.module)),
    ),
    _kind("EmbeddingBag, mean", lambda: Bags("mean"), ids("input", 6), mend=WHOLE, compiled=True),
    _kind("EmbeddingBag, sum", lambda: Bags("sum"), ids("input", 6), mend=WHOLE),
    _kind("EmbeddingBag, max", lambda: Bags("max"), ids("input", 6), mend=WHOLE),
    _kind("EmbeddingBag with padding_idx", lambda: Bags("mean", padding_idx=0), ids("input", 6, least=0), mend=WHOLE),
    _kind("Conv1d", lambda: nn.Conv1d(4, 6, 3), SIGNAL, compiled=True),
    _kind("Conv1d, causal and dilated", lambda: nn.Conv1d(4, 6, 2, dilation=2, padding=2), SIGNAL),
    _kind("Conv1d, depthwise", lambda: nn.Conv1d(4, 8, 3, groups=4), SIGNAL),
    _kind("Conv2d", lambda: nn.Conv2d(4, 6, 3), IMAGE, compiled=True),
    _kind("Conv2d, strided groups", lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), IMAGE, compiled=True),
    _kind("Conv2d, same padding", lambda: nn.Conv2d(4, 6, (3, 2), padding="same", dilation=(1, 2)), IMAGE),
    _kind("Conv2d, circular padding", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    _kind("Conv2d, reflected padding", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    _kind("Conv3d", lambda: nn.Conv3d(4, 6, 3), VOLUME),
    _kind("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), SIGNAL, mend=WHOLE, compiled=True),
    _kind("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3), IMAGE, mend=WHOLE),
    _kind(
        "ConvTranspose2d, groups",
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1),
        IMAGE,
        mend=WHOLE,
    ),
    _kind("ConvTranspose3d", lambda: nn.ConvTranspose3d(4, 6, 2), VOLUME, mend=WHOLE),
    _kind("LayerNorm", lambda: nn.LayerNorm(6), TOKENS, compiled=True),
    _kind("LayerNorm over two dims", lambda: nn.LayerNorm([5, 6]), TOKENS),
    _kind("LayerNorm without bias", lambda: nn.LayerNorm(6, bias=False), TOKENS),
    _kind("RMSNorm", lambda: nn.RMSNorm(6), floats("x", 5, 6), compiled=True),
    _kind("GroupNorm", lambda: nn.GroupNorm(2, 4), IMAGE, compiled=True),
    _kind("InstanceNorm1d", lambda: nn.InstanceNorm1d(4, affine=True), SIGNAL),
    _kind("InstanceNorm2d", lambda: nn.InstanceNorm2d(4, affine=True), IMAGE, compiled=True),
    _kind(
        "InstanceNorm2d in eval() with statistics",
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        IMAGE,
    ),
    Kind(
        "InstanceNorm2d in train() with statistics",
        lambda: Case(nn.InstanceNorm2d(4, affine=True, track_running_stats=True).train(), IMAGE),
        refusal="",
        mend=lambda case: case._replace(module=case.module.eval()),
    ),
    _kind("BatchNorm1d in eval()", lambda: nn.BatchNorm1d(6), ROWS, compiled=True),
    _kind("BatchNorm2d in eval()", lambda: nn.BatchNorm2d(4), IMAGE),
    Kind(
        "BatchNorm2d in train()",
        lambda: Case(_after_convolution(lambda: nn.BatchNorm2d(4))().train(), IMAGE),
        refusal="normalises by statistics of the batch",
        mend=lambda case: case._replace(module=_after_convolution(lambda: nn.GroupNorm(2, 4))()),
    ),
    _kind("SyncBatchNorm in eval()", lambda: nn.SyncBatchNorm(4), IMAGE),
    _kind("PReLU", lambda: nn.PReLU(4), IMAGE, compiled=True),
    _kind("PReLU of one number", _between(nn.PReLU), TOKENS),
    *(_kind(name, _between(make), TOKENS, compiled=True) for name, make in ACTIVATIONS.items()),
    *(_kind(name, _after_convolution(make), IMAGE) for name, make in MAPS.items()),
    _kind("LSTM", lambda: Recurrent(nn.LSTM(6, 5, num_layers=2, batch_first=True)), TOKENS),
    _kind(
        "LSTM, both ways, projected",
        lambda: Recurrent(nn.LSTM(6, 5, batch_first=True, bidirectional=True, proj_size=3)),
        TOKENS,
    ),
    _kind("GRU", lambda: Recurrent(nn.GRU(6, 5, batch_first=True)), TOKENS),
    _kind("RNN of ReLU", lambda: Recurrent(nn.RNN(6, 5, nonlinearity="relu", batch_first=True)), TOKENS),
    Kind(
        "LSTM with dropout in train()",
        lambda: Case(Recurrent(nn.LSTM(6, 5, num_layers=2, batch_first=True, dropout=0.5)).train(), TOKENS),
        refusal="expected none between recurrent layers",
        mend=lambda case: case._replace(module=case.module.eval()),
    ),
    _kind("LSTMCell", lambda: Steps(nn.LSTMCell(6, 5)), TOKENS, mend=WHOLE, compiled=True),
    _kind("GRUCell", lambda: Steps(nn.GRUCell(6, 5)), TOKENS, mend=WHOLE),
    _kind("RNNCell", lambda: Steps(nn.RNNCell(6, 5)), TOKENS, mend=WHOLE),
    _kind("MultiheadAttention", SelfAttention, TOKENS, compiled=True),
    _kind("MultiheadAttention, bias of keys", lambda: SelfAttention(add_bias_kv=True, add_zero_attn=True), TOKENS),
    Kind(
        "MultiheadAttention, tokens first",
        lambda: Case(SelfAttention(tokens_first=True).eval(), TOKENS, options={"batch_first": False}),
    ),
    _kind(
        "TransformerEncoderLayer",
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        floats("src", 5, 6),
        compiled=True,
    ),
    _kind(
        "TransformerEncoderLayer, norm first",
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=True, activation="gelu"),
        floats("src", 5, 6),
    ),
    _kind(
        "TransformerEncoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2),
        floats("src", 5, 6),
        compiled=True,
    ),
    Kind(
        "TransformerEncoder, layer by layer",
        lambda: Case(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2).eval(),
            floats("src", 5, 6),
            options={"blocks": "layers.*"},
        ),
        mend={"blocks": None},
        compiled=True,
    ),
    _kind(
        "TransformerDecoderLayer",
        lambda: Decoder(nn.TransformerDecoderLayer(6, 2, 8, batch_first=True)),
        TOKENS,
        compiled=True,
    ),
    _kind("Transformer", lambda: Decoder(nn.Transformer(6, 2, 1, 1, 8, batch_first=True)), TOKENS),
    _kind("AdaptiveLogSoftmaxWithLoss, all classes", Adaptive, ROWS),
    Kind(
        "AdaptiveLogSoftmaxWithLoss, by class",
        lambda: Case(
            Routed().eval(), lambda n, g: {"input": normal(g, n, 6), "label": integers(g, n, below=12, least=0)}
        ),
        mend=WHOLE,
    ),
    _dropping(lambda: nn.Dropout(0.3), compiled=True),
    _dropping(lambda: nn.Dropout1d(0.3)),
    _dropping(
        lambda: nn.AlphaDropout(0.3),
        refusal="expected a forward that gives the same result twice",
        mend=lambda case: case._replace(module=case.module.eval()),
    ),
    _dropping(
        nn.RReLU,
        refusal="expected a forward that gives the same result twice",
        mend=lambda case: case._replace(module=case.module.eval()),
    ),
    _kind("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(6, 5)), TOKENS, compiled=True),
    _kind("weight_norm of a convolution", lambda: parametrizations.weight_norm(nn.Conv1d(4, 6, 3)), SIGNAL),
    _kind("weight_norm by a hook", _old(nn.utils.weight_norm), TOKENS),
    _kind("spectral_norm in eval()", lambda: parametrizations.spectral_norm(nn.Linear(6, 5)), TOKENS, mend=WHOLE),
    _kind("spectral_norm by a hook in eval()", _old(nn.utils.spectral_norm), TOKENS, mend=WHOLE),
    Kind(
        "spectral_norm in train()",
        lambda: Case(parametrizations.spectral_norm(nn.Linear(6, 5)).train(), TOKENS),
        refusal="the module changes this tensor when it is called",
        mend=lambda case: case._replace(module=case.module.eval()),
    ),
    _kind("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(6, 6)), TOKENS, mend=WHOLE),
    _kind("a symmetric weight", _parametrized, TOKENS, compiled=True),
    _kind("a pruned Linear", lambda: _pruned(nn.Linear(6, 5)), TOKENS, compiled=True),
    _kind("a pruned Conv2d", lambda: _pruned(nn.Conv2d(4, 6, 3)), IMAGE),
    _kind(
        "ParameterList",
        _parameters(lambda: nn.ParameterList([torch.randn(6, 6), torch.randn(6, 5)])),
        TOKENS,
        compiled=True,
    ),
    _kind(
        "ParameterDict", _parameters(lambda: nn.ParameterDict({"a": torch.randn(6, 6), "b": torch.randn(6, 5)})), TOKENS
    ),
]


def _frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


def _without_max_norm(module: Any) -> nn.Module:
    module.max_norm = None
    return module
