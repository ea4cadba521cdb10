"""Python's own help texts as a dataset of mappings, the samples that Hugging Face's models take."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Topics(Dataset[dict[str, Tensor]]):
    """About 700,000 bytes, cut into samples of `context_length` tokens: a token is a byte."""

    def __init__(self, context_length: int = 64) -> None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values()).encode()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._samples = tokens[: len(tokens) // context_length * context_length].view(-1, context_length)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Labels stand where their tokens do: the task looks one ahead."""
        return {"input_ids": self._samples[index], "labels": self._samples[index]}
