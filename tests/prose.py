"""Check how plain the first lines of docstrings are: `python -m tests.prose [--list]`, a part of `make check`.

A relative clause at the beginning, or a pronoun without its noun, makes a sentence hard to follow. The bounds are those
of well-kept code bases. A figure within its bound does not mean that the sentences are good.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[1] / "app"
_CLAUSE = re.compile(r"^(What|Who|Whom|Whose|Whoever|Of|Where|When|That|Whether|How)\b")
_VAGUE = re.compile(
    r"\b(who|whoever|whom|nobody|somebody|anybody|those|they|them|it|others?|so many|as many|comes? to|has come)\b",
    re.I,
)
_MAX_CLAUSES = 0.015
_MAX_VAGUE = 0.08
_MAX_WORDS = 10.5


def first_lines(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the first line of each docstring."""
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{file.relative_to(package.parent)}:{getattr(node, 'lineno', 1)}", text.splitlines()[0]


def main() -> int:
    """Print the figures and return 1 if one exceeds its bound."""
    lines = list(first_lines(_PACKAGE))
    clauses = [line for line in lines if _CLAUSE.match(line[1])]
    vague = [line for line in lines if _VAGUE.search(line[1])]
    words = sum(len(text.split()) for _, text in lines) / len(lines)
    print(
        f"{len(lines)} docstrings: {len(clauses) / len(lines):.1%} begin with a relative clause (at most "
        f"{_MAX_CLAUSES:.1%}), {len(vague) / len(lines):.1%} have a vague pronoun (at most {_MAX_VAGUE:.0%}), "
        f"{words:.1f} words in a first line (at most {_MAX_WORDS})"
    )
    if "--list" in sys.argv:
        for place, text in [*clauses, *vague]:
            print(f"{place}: {text}")
    too_many = len(clauses) > _MAX_CLAUSES * len(lines) or len(vague) > _MAX_VAGUE * len(lines)
    return int(too_many or words > _MAX_WORDS)


if __name__ == "__main__":
    raise SystemExit(main())
