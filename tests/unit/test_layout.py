"""Rules of the layout that import contracts (`make check`) cannot say."""

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT = Path(__file__).parent
APP = UNIT.parents[1] / "app" / "steadfast"

# Test files whose subject is no module of the package, with the reason.
ABOUT_MORE = {
    "test_alarms": "tests/benchmarks/alarms.py, so that the benchmark's simulation stays right",
    "test_cluster_files": "the YAML and shell files of cluster/",
    "test_docs": "README.md, CONTRIBUTING.md and docs/",
    "test_layout": "rules for the whole tree",
    "test_leaks": "tests/support/leaks.py, which guards every test",
    "test_odd_input": "damaged files, which every command that reads a run directory may meet",
    "test_pages": "docs/migrate, docs/defaults.md and docs/does_not_fit.md, with their programs",
    "test_spot_watcher": "cluster/spot_watcher.py",
    "test_storm": "tests/chaos/storm.py and schedules.py, so that the published table stays right",
    "test_strangers": "run directories of another user, which every reading command may meet",
    "test_suite": "tests/stages, so that a stage that has become too dear fails",
    "test_torch_internals": "private names of torch, which several modules use",
}


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


def names_of_test_files(package: Path) -> set[str]:
    """Return the names that a test file may have: a module with as many of its packages as make the name unique."""
    counts: Counter[str] = Counter()
    names: set[str] = set()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        suffixes = ["_".join(parts[start:]) for start in range(len(parts))]
        counts.update(suffixes)
        names.update(suffixes[:1])  # the whole path is a name even where a deeper module ends alike
    names.update(name for name, count in counts.items() if count == 1)
    return {f"test_{name}" for name in names}


def misnamed(folder: Path, names: set[str]) -> list[str]:
    """Return what is wrong with the names of a folder's test files, and what to do."""
    found: list[str] = []
    for path in sorted(folder.glob("test_*.py")):
        if path.stem not in names:
            found.append(
                f"{path.name} is named after no module of app/steadfast, or two modules share that name: call the file "
                "test_<module>.py, test_<package>_<module>.py where two modules share a name, or add it to ABOUT_MORE "
                f"in {Path(__file__).name} with a reason"
            )
    return found


def test_every_unit_test_file_is_named_after_what_it_tests() -> None:
    wrong = misnamed(UNIT, names_of_test_files(APP) | ABOUT_MORE.keys())
    assert not wrong, "\n".join(wrong)
    assert all((UNIT / f"{name}.py").exists() for name in ABOUT_MORE)
    assert not ABOUT_MORE.keys() & names_of_test_files(APP)


@pytest.mark.parametrize(
    ("name", "is_right"),
    [
        ("test_ledger", True),
        ("test_analysis_audit", True),
        ("test_plan", True),  # a module at the top, though commands/plan.py ends alike
        ("test_checkpoint", True),  # a package
        ("test_audit", False),  # analysis/audit.py and commands/audit.py share the name
        ("test_nothing", False),
    ],
)
def test_a_misnamed_test_file_is_named_with_the_remedy(tmp_path: Path, name: str, is_right: bool) -> None:
    (tmp_path / f"{name}.py").touch()
    wrong = misnamed(tmp_path, names_of_test_files(APP))
    assert (wrong == []) == is_right
    if wrong:
        assert wrong[0].startswith(f"{name}.py ")
        assert "test_<package>_<module>.py" in wrong[0]
