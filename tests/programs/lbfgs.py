"""An optimizer that evaluates the loss several times a step, by a closure."""

from tests.programs.nadam import Model, Task, data
from tests.programs.program import BOTH, Program, optimized_by

__all__ = ["Model", "Task", "data"]

PROGRAM = Program(
    __name__,
    "LBFGS",
    words=(optimized_by("torch.optim:LBFGS"),),
    refused=dict.fromkeys(BOTH, "LBFGS needs a closure, that is several forwards in a step"),
    advice="another optimizer",
)
