# SPDX-License-Identifier: BSD-3-Clause
"""A GPT, and the text that it is trained on: bytes of the Python library's sources."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: As much text as is read.
TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and of the batch of one rank.

    :param tokens: how many there are; texts have the first 256 alone
    :param is_tied: the output has the embedding's weights
    """

    layers: int
    heads: int
    width: int
    context: int
    tokens: int
    is_tied: bool
    batch: int


SHAPES = {
    "small": Shape(layers=4, heads=4, width=128, context=64, tokens=256, is_tied=False, batch=4),
    "gpt2": Shape(layers=12, heads=12, width=768, context=1024, tokens=50257, is_tied=True, batch=2),
    # For tests of what is around it
    "tiny": Shape(layers=1, heads=2, width=16, context=16, tokens=256, is_tied=True, batch=2),
}


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Any, mask: Any) -> Any:
        """x: batch × length × width; mask: true where attention may not go."""
        batch, length, width = x.shape
        parts = self.attention(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-2, -1)) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.projection((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(x)


class Gpt(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.tokens, shape.width)
        self.places = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.tokens, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if shape.is_tied:
            self.head.weight = self.embedding.weight
        mask = torch.ones(shape.context, shape.context, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Any) -> Any:
        """tokens: batch × length."""
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.places[:length]
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        return self.head(self.norm(x))


def build(shape: Shape, seed: int) -> Gpt:
    """The model as training begins; the same on all ranks."""
    torch.manual_seed(seed)
    return Gpt(shape)


def read_text(limit: int = TEXT_BYTES) -> Any:
    """The text, a tensor of bytes: the library's modules in the order of their names, packages aside.

    :raises RuntimeError: this Python has none
    """
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= limit:
            break
    if not found:
        raise RuntimeError(f"there are no sources in {sysconfig.get_path('stdlib')}")
    return torch.frombuffer(found[:limit], dtype=torch.uint8)


def batch(text: Any, shape: Shape, seed: int, step: int, rank: int) -> tuple[Any, Any]:
    """Inputs and what follows them: for a step and a rank the same whenever it is asked for, after a restart too."""
    chance = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)
    starts = torch.randint(len(text) - shape.context - 1, (shape.batch,), generator=chance)
    rows = torch.stack([text[start : start + shape.context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]
