"""Makes `import torchvision` work where its C library does not fit torch, as next to a torch without CUDA from PyPI.

The import then ends with `operator torchvision::nms does not exist`, though nothing here detects objects. What needs
torchvision imports this first.
"""

import torch

try:
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass  # then nothing else imports it either
except RuntimeError:
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
