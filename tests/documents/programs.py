"""Make docs/programs.md: every program of tests/programs, and what becomes of it."""

from tests.programs.catalog import PROGRAMS
from tests.programs.program import BOTH, Program

_HEAD = """\
# Which programs train as in a plain loop

Written by `make docs` from `tests/programs/`; change those files, not this one.

Each row is a program that is written twice: as a plain loop of torch, and for Steadfast. The link leads to both.
`tests/dist/test_differential.py` trains each on one, two and three workers in turn, kills one of them, and compares the
loss of every step and the weights in the end with those of the plain loop: *equal* is a relative difference of at most
1e-6 in float64. What cannot be equal is refused in one line before the first step; the words are of that line.

| program | `ddp` | `fsdp` | what to do |
|---|---|---|---|
"""


def programs_page() -> str:
    """Return the page that lists every program of the differential suite, and what becomes of it."""
    return _HEAD + "".join(f"{_program_row(program)}\n" for program in PROGRAMS)


def _program_row(program: Program) -> str:
    outcomes = []
    for kind in BOTH:
        words = program.refused.get(kind)
        outcomes.append("equal" if words is None else f'refused: "{words}"')
    link = f"[{program.shape}](../tests/programs/{program.name}.py)"
    return f"| {link} | {' | '.join(outcomes)} | {program.advice} |"
