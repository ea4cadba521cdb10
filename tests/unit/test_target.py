"""Code that a configuration names: where it is found, and the message when it is not."""

import sys
from pathlib import Path

import pytest

from steadfast.config import Config, Target, TargetData
from steadfast.config.target import build_target, load_target
from steadfast.data.datasets import build_dataset
from steadfast.errors import ConfigError
from steadfast.models.gpt import Gpt


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("jason:loads", "no module jason in "),
        ("json.deep:loads", "no module json.deep in "),
        ("json:load_", "json has no load_"),
        ("math:pi", "is a float, which cannot be called"),
        ("<live model>:Net", "was an object of the program that called steadfast.fit(); only such a program can go on"),
    ],
)
def test_target_says_what_failed(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_target(target, "data.target")
    assert message in str(caught.value)
    assert str(caught.value).startswith("data.target: ")


def test_target_is_found_in_the_working_directory_and_a_failing_import_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_b.py").write_text("def dataset(n): return [(float(i),) for i in range(n)]\n")
    (tmp_path / "needs_b.py").write_text("import not_installed_b\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert len(build_dataset(TargetData(target="mine_b:dataset", args={"n": 3}))) == 3
    with pytest.raises(ConfigError, match=r"data\.args: .* does not take .*'m'"):
        build_dataset(TargetData(target="mine_b:dataset", args={"m": 3}))
    with pytest.raises(ConfigError, match=r'target: "needs_b:x": needs_b\.py:1: .*No module named .not_installed_b'):
        load_target("needs_b:x")


BROKEN = {
    "what it imports is broken": (
        "import math\nfrom math import nope\n",
        r"mine\.py:2: ImportError: cannot import name",
    ),
    "a lazy import without a name": (
        'raise ModuleNotFoundError("Could not import module GPT2")\n',
        r"mine\.py:1: ModuleNotFoundError: Could not import module GPT2",
    ),
    "no Python": ("x = = 1\n", r"mine\.py:1: SyntaxError: invalid syntax"),
    "a bug at its top": ("x = 1\nx.y\n", r"mine\.py:2: AttributeError: 'int' object has no attribute 'y'"),
    "a script": (
        "raise ValueError('trying to initialize twice')\n",
        r"mine\.py:1: ValueError: trying .* belongs under if __name__ == .__main__. in mine",
    ),
    "another steadfast": (
        "\nimport steadfast.utils\n",
        r"mine\.py:2: .*No module named .steadfast\.utils.\. Steadfast's own package is",
    ),
}


@pytest.mark.parametrize(("code", "message"), BROKEN.values(), ids=BROKEN)
def test_an_error_in_the_users_module_is_told_as_it_is_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    (tmp_path / "steadfast").mkdir()
    (tmp_path / "steadfast" / "utils.py").touch()
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f'model\\.target: "mine:x": {message}') as caught:
        load_target("mine:x", "model.target")
    assert caught.value.__cause__ is not None  # for -v
    assert "mine" not in sys.modules


def test_a_users_package_called_app_is_loaded_and_without_one_it_is_the_former_name_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "net.py").write_text("def build(): return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_target("app.net:build")() == 3
    with pytest.raises(ConfigError, match=r"no module app\.nothing"):
        load_target("app.nothing:build")
    for name in ("app", "app.net"):
        del sys.modules[name]
    monkeypatch.setitem(sys.modules, "app", None)  # as if no such package were installed
    assert load_target("app.models.gpt:Gpt") is Gpt
    (told,) = caplog.messages
    assert told == "app.models.gpt is called steadfast.models.gpt since version 0.3: change the configuration"


@pytest.mark.parametrize("target", ["steadfast.net:build", "steadfast.models:build"])
def test_a_package_called_steadfast_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as without:
        load_target(target)
    assert "hides" not in str(without.value)
    (tmp_path / "steadfast").mkdir()
    with pytest.raises(
        ConfigError, match=f"{target}.*Steadfast's own package is called steadfast too, and hides.*rename"
    ):
        load_target(target)


class Nothing:
    """A callable that is false, as one with a length of 0 is."""

    def __call__(self) -> int:
        return 3

    def __len__(self) -> int:
        return 0


def test_a_section_calls_the_object_that_it_holds_after_a_copy() -> None:
    section = Target.of_object("model", "My net!", Nothing())
    assert section.model_dump() == {"kind": "target", "target": "<live model>:My_net_", "args": {}}
    copied = Config().model_copy(update={"model": section}).model
    assert isinstance(copied, Target)
    assert build_target(copied, "model") == 3
