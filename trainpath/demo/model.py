"""The demo's model: a small byte-level transformer language model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ByteLM"]


class ByteLM(nn.Module):
    """Predicts the next byte from the ones before.

    Args:
        width: Channels of the residual stream.
        num_layers: Transformer blocks.
        num_heads: Attention heads.
        context: Bytes of context.
    """

    def __init__(
        self, *, width: int = 128, num_layers: int = 3, num_heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(_Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, time, 256) for `tokens` (batch, time)."""
        hidden = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, time, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        output: Tensor = hidden + self.mlp(self.norm2(hidden))
        return output
