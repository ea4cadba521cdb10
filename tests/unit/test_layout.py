"""Rules of the layout that import contracts (`make check`) cannot say."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

APP = Path(__file__).parents[2] / "app" / "steadfast"


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_an_upward_import_breaks_the_contract(tmp_path: Path) -> None:
    for name in ("app", "pyproject.toml"):
        subprocess.run(["cp", "-r", str(APP.parents[1] / name), str(tmp_path)], check=True)
    check = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": "app"}
    assert subprocess.run(check, cwd=tmp_path, env=env, capture_output=True, check=False).returncode == 0
    with (tmp_path / "app/steadfast/plan.py").open("a") as plan:
        plan.write("\nfrom steadfast.train import train\n")
    broken = subprocess.run(check, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert "steadfast.plan -> steadfast.train" in broken.stdout


def test_ray_internals_are_in_one_module() -> None:
    using = {path.parent for path in APP.rglob("*.py") if any("._" in name for name in imported(path) if "ray" in name)}
    assert using == {APP / "orchestration" / "internals"}


def test_reading_a_config_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, steadfast.cli; from steadfast import Config, load_config; "
        "print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=APP.parent, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
