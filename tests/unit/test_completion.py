"""`completion`: what bash offers behind the words of a command."""

import shlex
import subprocess
from pathlib import Path

import pytest

from steadfast.cli import main
from steadfast.commands import VERBS


@pytest.fixture(scope="module")
def script() -> str:
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.extend(words))
        assert main(0.0, ["completion"]) == 0
    return "".join(printed)


def offered(script: str, line: str, folder: Path) -> list[str]:
    """Return what bash offers for the last word of a line, which bash splits at spaces and equals signs."""
    words = line.replace("=", " = ").split(" ")
    typed = " ".join(map(shlex.quote, words))
    # Outside of a completion, bash refuses compopt.
    calls = f"compopt() {{ :; }}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _steadfast; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{calls}"], cwd=folder, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("steadfast st", {"status"}),
        ("steadfast --ve", {"--verbose", "--version"}),
        ("steadfast --config train.yaml optimizer.l", {"optimizer.lr="}),
        ("steadfast plan optimizer.mo", {"optimizer.momentum="}),
        ("steadfast track", {"trackers="}),
        ("steadfast status --j", {"--json"}),
        ("steadfast status d", {"ddp"}),
        ("steadfast audit ddp --tr", {"--trust-code"}),
        ("steadfast --config ", set()),  # bash offers the names of files
        ("steadfast optimizer.lr=", set()),
        ("steadfast train --local", set()),
    ],
)
def test_bash_offers_verbs_options_keys_and_runs(script: str, line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "ddp").mkdir(parents=True)
    assert set(offered(script, line, tmp_path)) == expected


def test_bash_offers_every_verb_and_the_first_verbs_options(script: str, tmp_path: Path) -> None:
    found = set(offered(script, "steadfast ", tmp_path))
    assert {*VERBS, "--config", "--job", "run.steps=", "batch.global_size="} <= found
    assert "--workers" not in found
