"""Decoder-only transformer after GPT-2 (Radford et al., 2019).

Unlike GPT-2's, the output layer does not share the weights of the embedding.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadfast.config import GptConfig


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_dim = config.embed_dim // config.num_heads
        self.dropout = config.dropout_of_attention
        # The outputs of each head are neighbours, so that a worker with a part of the rows has whole heads.
        self.query_key_value = nn.Linear(config.embed_dim, 3 * config.embed_dim, bias=config.bias)
        self.project = nn.Linear(config.embed_dim, config.embed_dim, bias=config.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        # (batch, context, 3 * embed) -> three of (batch, heads, context, head)
        query, key, value = (
            self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4).unbind()
        )
        # The functional form does not switch between training and evaluation by itself.
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=mask is None)
        # (batch, heads, context, head) -> (batch, context, embed)
        return cast(Tensor, self.project(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention and a two-layer MLP, each after a norm and beside a residual connection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.embed_dim, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.embed_dim, bias=config.bias)
        self.expand = nn.Linear(config.embed_dim, 4 * config.embed_dim, bias=config.bias)
        self.project = nn.Linear(4 * config.embed_dim, config.embed_dim, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        hidden = F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        return x + cast(Tensor, self.dropout(self.project(hidden)))


def _mask_of_documents(position_ids: Tensor) -> Tensor:
    """Return which tokens each token attends to, bool (batch, 1, context, context)."""
    documents = (position_ids == 0).cumsum(1)
    own = documents[:, :, None] == documents[:, None, :]
    return own.tril()[:, None]


class Gpt(nn.Module):
    """GPT-2, which predicts the next token at every position."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        # Submodules are created in forward order, because DDP's buckets and FSDP's prefetching expect gradients in
        # reverse order.
        self.embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position = nn.Embedding(config.context_length, config.embed_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.embed_dim, bias=config.bias)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw GPT-2's initial weights.

        Weights are normal with standard deviation 0.02, in layers that end a residual branch divided by
        sqrt(2 num_layers). Biases are zero.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02
                if name.endswith("project"):
                    # Each layer adds to the residual stream twice. Without the factor the variance would grow with
                    # depth.
                    std /= math.sqrt(2 * self.config.num_layers)
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Map tokens, int64 (batch, context), to logits (batch, context, vocab).

        Args:
            input_ids: the tokens.
            position_ids: position of each token in its document, int64 (batch, context), 0 where a document begins. A
                token attends to its own document. None if each sequence is one document.
        """
        mask: tuple[Tensor, ...] = ()
        if position_ids is None:
            # (context,), added to each sequence of (batch, context, embed)
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        else:
            mask = (_mask_of_documents(position_ids),)
        x = self.dropout(self.embed(input_ids) + self.position(position_ids))
        for layer in self.layers:
            x = layer(x, *mask)
        return cast(Tensor, self.head(self.norm(x)))

    def blocks(self) -> list[nn.Module]:
        """Return the repeated layers, which FSDP shards one by one."""
        return list(self.layers)

    def tensor_plan(self) -> dict[str, str]:
        """Return how linear layers are split over the workers of `parallel.tensor_size`."""
        return {
            "layers.*.attention.query_key_value": "column",
            "layers.*.attention.project": "row",
            "layers.*.expand": "column",
            "layers.*.project": "row",
        }

    def get_output_embeddings(self) -> nn.Linear:
        """Return the layer that computes logits, as Hugging Face's models do."""
        return self.head

    def flops_per_sample(self) -> int:
        """Return the training FLOPs of context_length tokens.

        The count is PaLM's (arXiv:2204.02311, appendix B).
        """
        config = self.config
        # A token costs 6 FLOPs per parameter, except for the lookup of embeddings. Attention is counted without its
        # mask.
        num_parameters = sum(map(torch.numel, self.parameters()))
        num_parameters -= self.embed.weight.numel() + self.position.weight.numel()
        attention = 12 * config.num_layers * config.embed_dim * config.context_length
        return config.context_length * (6 * num_parameters + attention)

    @torch.no_grad()
    def generate(self, prompt: Tensor, num_tokens: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Continue `prompt`, int64 (length,), by `num_tokens` random tokens.

        `generator` is a CPU generator, and `temperature` is above 0.
        """
        # Dropout would otherwise change the text, and draw from the training's generators.
        was_training = self.training
        self.eval()
        text = prompt
        for _ in range(num_tokens):
            # (vocab,): logits of the next token; the model takes at most context_length tokens
            logits = self(text[None, -self.config.context_length :])[0, -1].float().cpu()
            # Tokens are drawn on the CPU, because the generators of different devices would draw different text.
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            text = torch.cat([text, drawn.to(text.device)])
        self.train(was_training)
        return text
