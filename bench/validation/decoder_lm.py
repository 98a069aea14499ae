"""The decoder language model of the `decoder_lm_*` rows: every step written out in tensor operators.

RMSNorm, rotary positions, causal attention, SwiGLU, cross entropy and an AdamW that walks its parameters. How the rows
were measured is in the functions that run them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY = 10_000
BATCH = 4


@dataclass(frozen=True)
class Size:
    """Width of the stream, width of the feed-forward, blocks, heads."""

    width: int
    inner: int
    layers: int
    heads: int


SIZES = {
    "small": Size(768, 3072, 12, 12),
    "medium": Size(1024, 4096, 24, 16),
    "large": Size(1280, 5120, 36, 20),
    "3.4b": Size(2560, 10240, 32, 32),
}


def softmax(values: Tensor, dim: int) -> Tensor:
    """Softmax in its three steps; the shifted values live as long as the function."""
    shifted = values - values.max(dim=dim, keepdim=True).values
    powers = shifted.exp()
    return powers / powers.sum(dim=dim, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot product attention over the last two dimensions, with an optional boolean mask."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", softmax(scores, -1), value)


class Linear(nn.Module):
    """A matrix without bias, applied by einsum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, values: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return torch.einsum("...i,oi->...o", values, self.weight)


class RmsNorm(nn.Module):
    """Root mean square normalisation, in float32 inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, values: Tensor) -> Tensor:
        """Same shape and type as `values`."""
        wide = values.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * scaled).to(values.dtype)


class Rotary(nn.Module):
    """Rotary positions from a table of cosines and sines [2, context, head width / 2]."""

    table: Tensor

    def __init__(self, context: int, head: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2, context, head // 2), persistent=False)

    def forward(self, values: Tensor, positions: Tensor) -> Tensor:
        """Rotate neighbouring pairs of the last dimension."""
        first, second = values.unflatten(-1, (-1, 2)).unbind(-1)
        cosine, sine = self.table[:, positions]
        turned_first = cosine * first - sine * second
        turned_second = sine * first + cosine * second
        return torch.cat((turned_first, turned_second), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value, self.out = (Linear(size.width, size.width) for _ in range(4))
        self.rotary = Rotary(context, size.width // size.heads)

    def forward(self, values: Tensor) -> Tensor:
        """[batch, context, width] to the same shape."""
        query, key, value = (
            project(values).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        positions = torch.arange(values.shape[1], device=values.device)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        causal = positions[:, None] >= positions[None, :]
        attended = attend(query, key, value, causal)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2).contiguous())
        return out


class FeedForward(nn.Module):
    """SwiGLU with its SiLU written out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = Linear(size.width, size.inner), Linear(size.width, size.inner)
        self.down = Linear(size.inner, size.width)

    def forward(self, values: Tensor) -> Tensor:
        """[batch, context, width] to the same shape."""
        gate = self.gate(values)
        out: Tensor = self.down(gate * torch.sigmoid(gate) * self.up(values))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised stream and added to it."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(size, context), RmsNorm(size.width)
        self.ffn, self.ffn_norm = FeedForward(size), RmsNorm(size.width)

    def forward(self, values: Tensor) -> Tensor:
        """[batch, context, width] to the same shape."""
        attended: Tensor = values + self.attention(self.attention_norm(values))
        out: Tensor = attended + self.ffn(self.ffn_norm(attended))
        return out


class DecoderLm(nn.Module):
    """Embedding by indexing, blocks, norm, and a head of its own."""

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, size.width))
        self.blocks = nn.ModuleList(Block(size, context) for _ in range(size.layers))
        self.norm = RmsNorm(size.width)
        self.head = Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, context, vocabulary] of tokens [batch, context]."""
        values = self.embedding[tokens]
        for block in self.blocks:
            values = block(values)
        logits: Tensor = self.head(self.norm(values))
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood, by a log softmax written out and a gather."""
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    log_probs = shifted - shifted.exp().sum(dim=-1, keepdim=True).log()
    return -log_probs.gather(-1, targets.unsqueeze(-1)).mean()


class WalkingAdamW(torch.optim.Optimizer):
    """AdamW, one parameter after the other: new moment tensors each step, and temporaries for the update."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["beta1"], group["beta2"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.data
                count = state.get("count", 0) + 1
                first = state.get("first", torch.zeros_like(parameter))
                second = state.get("second", torch.zeros_like(parameter))
                first = beta1 * first + (1 - beta1) * gradient
                second = beta2 * second + (1 - beta2) * gradient**2
                rate = group["lr"] * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
                parameter.data -= rate * first / (second.sqrt() + group["eps"])
                parameter.data -= group["lr"] * group["weight_decay"] * parameter.data
                state.update(count=count, first=first, second=second)
