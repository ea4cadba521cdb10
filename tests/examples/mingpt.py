"""A character model as in Karpathy's minGPT, written from scratch: nothing in it knows of this program but the task."""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadfast.tasks import Sums


class Characters:
    """CPython's help topics as windows of characters.

    Args:
        split: "train", a window from each place of the first nine tenths of the text; or "validation", the rest in
            windows side by side.
    """

    def __init__(self, split: str, block_size: int = 64) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        vocabulary = sorted(set(text))
        place = {character: index for index, character in enumerate(vocabulary)}
        cut = len(text) * 9 // 10
        part = text[:cut] if split == "train" else text[cut:]
        self._tokens = torch.tensor([place[character] for character in part])
        self._block_size = block_size
        self._stride = 1 if split == "train" else block_size

    def __len__(self) -> int:
        return (len(self._tokens) - self._block_size - 1) // self._stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._stride
        window = self._tokens[start : start + self._block_size + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and a small network, each on a residual branch behind a norm."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.attention(self.norm_1(hidden)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.projection(attended.transpose(1, 2).reshape(batch, length, width)))
        out: Tensor = hidden + self.dropout(self.mlp(self.norm_2(hidden)))
        return out


class GPT(nn.Module):
    """Returns (logits, mean loss), the latter None without targets."""

    def __init__(
        self, vocab_size: int, block_size: int = 64, num_layers: int = 3, width: int = 48, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.position = nn.Parameter(torch.zeros(1, block_size, width))
        self.blocks = nn.Sequential(*[Block(width, 3, dropout) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        logits = self.head(self.norm(self.blocks(hidden)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class NextCharacter:
    """The model's own mean loss, as the sum that it is the mean of."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        tokens, targets = batch
        _, mean = model(tokens, targets)
        return Sums(mean * targets.numel(), targets.numel())
