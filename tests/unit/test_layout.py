"""Rules of the layout that a reader relies on."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

APP = Path(__file__).parents[2] / "app"
MAY_IMPORT_RAY = ("launch.py", "orchestration", "doctor", "chaos")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_ray_is_imported_where_it_is_orchestrated_and_nowhere_else() -> None:
    files = [path for path in APP.rglob("*.py") if path.relative_to(APP).parts[0] not in MAY_IMPORT_RAY]
    assert files
    assert [path for path in files if any(name.split(".")[0] == "ray" for name in imported(path))] == []


def test_ray_internals_are_in_one_module() -> None:
    using = {path.parent for path in APP.rglob("*.py") if any("._" in name for name in imported(path) if "ray" in name)}
    assert using == {APP / "orchestration" / "internals"}


def test_reading_a_config_imports_neither_torch_nor_ray() -> None:
    code = "import sys, app.cli, app.config; print([name for name in ('torch', 'ray') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=APP.parent, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
