"""Scikit-learn's handwritten digits as a map-style dataset, the shape that `data.target` wants."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset


def dataset(scale: float = 16.0) -> TensorDataset:
    """1,797 samples of (pixels (64,) float32 in [0, 1], label () int64); `scale` is the brightest pixel."""
    # Imported here, so that only the run that uses the digits needs scikit-learn.
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images: Tensor = torch.from_numpy((pixels / scale).astype(np.float32))
    return TensorDataset(images, torch.from_numpy(labels.astype(np.int64)))
