"""What the drills do with a torch older than the app allows: a GPU that is at hand may have no newer one."""

import sys

import torch
from torch.distributed.fsdp import FSDPModule

_MISSING = "set_reduce_scatter_unused_params"  # before torch 2.13
REDUCER_LACKS = "" if torch.__version__ >= "2.13" else "DDP of this torch has no forward_sync_buffers"
IS_ADAPTED = not hasattr(FSDPModule, _MISSING)


def adapt() -> None:
    """Give FSDP what the app calls and this torch lacks. The call does nothing: all parameters count as used."""
    if not hasattr(FSDPModule, _MISSING):
        setattr(FSDPModule, _MISSING, lambda module, *args, **options: None)


def _main() -> int:
    """Run the app's own command."""
    adapt()
    from steadfast.__main__ import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
