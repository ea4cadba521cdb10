"""Which of the project's pinned dependencies this Python lacks. Exits with 1 if there are any."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement


def is_missing(requirement: Requirement) -> bool:
    try:
        return not requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return True


def main() -> int:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(each) for each in [*project["dependencies"], *project["optional-dependencies"]["cluster"]]]
    missing = [str(each) for each in wanted if is_missing(each)]
    print("missing: " + ", ".join(missing) if missing else "all dependencies are installed")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
