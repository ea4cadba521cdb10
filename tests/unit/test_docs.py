"""What the documents say of the code is so: the files, the names and the events that they mention are there."""

import ast
import re
import shlex
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterator

import pytest

from steadfast.cli import main, split_verb
from steadfast.commands.options import is_of_config, read_config
from steadfast.config import Config, load_config
from steadfast.errors import SteadfastError
from tests.documents import DOCS, PAGES
from tests.documents.reference import reference_page
from tests.programs.catalog import PROGRAMS

ROOT = DOCS.parent
CHECKED = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]
STARTER = ROOT / "app/steadfast/commands/starter"
CONFIG_OF_READER = "mine.yaml"  # name, in every page, of a file that the reader writes
# Programs in the pages' commands that no test runs from there, each with the reason.
NOT_RUN = {
    "aws": "needs an account",
    "cat": "prints a file of a host",
    "cd": "is part of a longer line",
    "docker": "needs a container engine; tests/e2e/test_image.py runs the steps of the Dockerfile",
    "export": "sets a variable",
    "kubectl": "needs a cluster",
    "pkill": "ends processes; tests/cluster kill them by their numbers",
    "ray": "needs hosts; tests/e2e run `ray up`, `ray exec` and `ray down` on simulated ones",
    "sbatch": "needs Slurm; tests/e2e/test_slurm.py runs the script with stand-ins",
    "sed": "edits a file with an answer of `aws`",
    "ssh": "needs another machine",
    "tensorboard": "serves until it is ended; tests/e2e/test_onprem.py runs it",
}


def quoted(page: str) -> Iterator[str]:
    """Yield what a page has between backquotes, code blocks left out."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for found in re.findall(r"`([^`]+)`", text):
        yield " ".join(found.split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_is_made_from_the_code_is_what_would_be_written_now(page: str) -> None:
    if page == "command_line.md" and sys.version_info >= (3, 13):
        pytest.skip("argparse of this Python has other words for options than that of 3.11")
    assert (DOCS / page).read_text() == PAGES[page](), "run: make docs"


def promises() -> dict[str, list[str]]:
    """Return the rows of CONTRIBUTING.md by promise: the tests, or for a promise without a test the reason."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Promises and their tests\n")[2]
    tested, _, untested = text.partition("\n### Not tested yet\n")
    found: dict[str, list[str]] = {}
    for part, of_tests in ((tested, True), (untested.partition("\n## ")[0], False)):
        for line in part.splitlines():
            if not line.startswith("| ") or line.startswith("| promise |"):
                continue
            promise, _, rest = line.strip("| ").rpartition(" | ")
            assert promise not in found, f"CONTRIBUTING.md has two rows for: {promise}"
            found[promise] = re.findall(r"`(\w+/\w+\.py::\w+)`", rest) if of_tests else [rest]
    return found


def test_each_promise_has_a_test_that_is_there_or_a_reason_for_having_none() -> None:
    rows = promises()
    assert len(rows) > 150
    page = (ROOT / "docs" / "security.md").read_text().partition("## Another user of the same machine")[2]
    reached = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(reached) > 10
    rows |= {what: [test.strip("`")] for what, _, test in reached}
    functions: dict[str, set[str]] = {}
    wrong: list[str] = []
    for promise, found in rows.items():
        if not found:
            wrong.append(f"{promise}: the row names no test as `folder/test_file.py::test_name`, and gives no reason")
        for test in found:
            file, separator, name = test.partition("::")
            if separator and file not in functions:
                path = ROOT / "tests" / file
                nodes = ast.parse(path.read_text()).body if path.exists() else []
                functions[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            if separator and name not in functions[file]:
                wrong.append(f"{promise}: tests/{file} has no {name}; give the row the new name")
    assert not wrong, "\n".join(wrong)


def test_every_program_is_in_the_differential_suite() -> None:
    modules = {path.stem for path in (ROOT / "tests/programs").glob("*.py")} - {"__init__", "catalog", "program"}
    assert {program.name for program in PROGRAMS} == modules


@pytest.mark.parametrize(
    ("heading", "row"),
    [
        ("## `run`", "| `epochs` | integer above 0 or null | `null` | length of the run in passes"),
        ("## `scaling`", "| `num_workers` | integer above 0 or [integer above 0, integer above 0] | `[1, 8]` | number"),
        ("## `batch`", "| `balance` | `even`, `even_samples`, `speed` or number above 0 by name | `even` | how a"),
        ("### `model`, kind mlp", "| `in_features` | integer above 0 | `...` | number of values in one input |"),
        ("## `checkpoint`", "| `every` | period | `5 minutes` | how often to write a checkpoint"),
        ("### `checkpoint.keep_best`", "| `mode` | `min`, `max` | `min` | whether the least or the greatest"),
        ("#### `faults.inject`, kind kill_at", "| `phase` | `loader`, `forward`, `collective`, `checkpoint` |"),
    ],
)
def test_the_reference_says_of_a_key_what_it_takes_its_default_and_its_meaning(heading: str, row: str) -> None:
    _, found, after = reference_page().partition(f"\n{heading}\n")
    assert found
    assert f"\n{row}" in after.partition("\n#")[0]


@pytest.mark.parametrize("page", CHECKED)
def test_files_that_a_page_names_are_there(page: str) -> None:
    paths = {each for each in quoted(page) if re.fullmatch(r"(app|cluster|configs|docs|tests)/[\w./-]*", each)}
    links = {each for each in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())}
    folder = (ROOT / page).parent
    missing = [each for each in paths if not (ROOT / each).exists()]
    missing += [each for each in links if not (folder / each).exists()]
    assert not missing


def commands_of(page: str) -> Iterator[list[str]]:
    """Yield the words of each command in a page's shell blocks, variables before the command left out."""
    for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield from commands_in(line)


def commands_in(line: str) -> Iterator[list[str]]:
    """Yield the commands of one line of a shell, also those that `ray exec` passes to a host."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("&|;"):
            # The first words may set variables.
            if command or not re.match(r"[A-Z_]+=", word):
                command.append(word)
            continue
        if command:
            yield command
        if command[:2] == ["ray", "exec"]:
            yield from commands_in(command[-1])
        command = []


def check_command(command: list[str]) -> None:
    """Check that a command of a page can be given: verb, options, keys, files, targets of make, extras of pip."""
    program, *rest = command
    for word in rest:
        if re.fullmatch(r"(cluster|configs|tests)/[\w./]+", word):
            assert (ROOT / word).exists(), word
    match program:
        case "steadfast":
            check_steadfast(rest)
        case "torchrun":
            script = "main.py" if "main.py" in rest else "steadfast"  # of -m steadfast
            check_steadfast(rest[rest.index(script) + 1 :])
        case "python" if rest[0] == "main.py":
            check_steadfast(rest[1:])
        case "python":
            assert rest[0] == "-m"
            assert list(ROOT.glob(rest[1].replace(".", "/") + "*")), f"no module {rest[1]}"
        case "make":
            targets = " ".join(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
            assert set(rest) <= set(targets.split())
        case "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for named in re.findall(r"(?:\.|steadfast)\[([\w,]+)\]", " ".join(rest)):
                assert set(named.split(",")) <= extras.keys()
        case _:
            assert program in NOT_RUN, f"{program}: run it in a test, or add it to NOT_RUN with a reason"


def check_steadfast(arguments: list[str]) -> None:
    """Parse a command line of Steadfast as the command does, with everything but the work of the verb."""
    verb = split_verb(arguments)[0] or "train"

    def run(options: Namespace) -> int:
        if options.cluster:
            assert (ROOT / options.cluster).exists() or (STARTER / options.cluster).exists()
        if (STARTER / (getattr(options, "config", None) or "none")).exists():  # a file that `init` has written
            options.config = str(STARTER / options.config)
        overrides = [*getattr(options, "words", []), *filter(is_of_config, getattr(options, "runs", []))]
        if getattr(options, "config", None) == CONFIG_OF_READER:
            load_config("ddp.yaml", overrides)
        elif hasattr(options, "words"):
            read_config(options)
        elif getattr(options, "config", None):
            load_config(options.config, overrides)
        assert set(getattr(options, "sections", [])) <= Config.model_fields.keys()
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"steadfast.commands.{verb}.run", run)
        assert main(0.0, ["-v", *arguments]) == 0, arguments


@pytest.mark.parametrize("page", CHECKED)
def test_commands_of_a_page_can_be_given(page: str) -> None:
    for command in commands_of(page):
        check_command(command)


@pytest.mark.parametrize(
    "line",
    [
        "steadfast --config ddp.yaml optimizer.rate=1",
        "steadfast stats",
        "steadfast status --wach",
        "steadfast config optimiser",
        "python main.py --config no_such_file.yaml",
        "torchrun --standalone main.py --config ddp.yaml run.step=3",
        "ray exec cluster/aws.yaml 'cd ~/steadfast && python main.py scale ddp --worker 2'",
        "ray up -y cluster/no_such_file.yaml",
        "make no-such-target",
        "pip install '.[no_such_extra]'",
        "pip install 'steadfast[no_such_extra]'",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    commands = list(commands_in(line))
    with pytest.raises((AssertionError, SteadfastError, SystemExit)):
        check_command(commands[-1])


def test_names_that_the_architecture_names_are_in_the_code() -> None:
    words: set[str] = set()
    doubles = [ROOT / "tests/support" / name for name in ("drill.py", "memory_store.py")]
    for path in [*(ROOT / "app").rglob("*.py"), *doubles]:
        words.update(re.findall(r"\w+", path.read_text()))
    # `Coordinator._lost`, `build_optimizer`, `World.shard`: identifiers, maybe with dots and with arguments.
    named = [each for each in quoted("docs/architecture.md") if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", each)]
    diagram = (ROOT / "docs/architecture.md").read_text().partition("```mermaid")[2].partition("```")[0]
    named += re.findall(r"\b[A-Z]\w+(?:\.\w+|(?=\())", diagram)
    unknown = []
    for each in named:
        parts = each.partition("(")[0].split(".")
        if not all(part in words for part in parts) and not (ROOT / each).exists():
            unknown.append(each)
    assert not unknown


def test_the_floors_are_those_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    picture = re.search(r"```text\n(__main__ .*?)```", (ROOT / "docs/architecture.md").read_text(), flags=re.DOTALL)
    assert picture
    drawn = [line.partition("  ")[0].replace(" · ", " | ") for line in picture[1].splitlines()]
    assert drawn == contracts[0]["layers"]


def program_text() -> str:
    """The program's sources, with the parts of each string joined, and fields of f-strings cut out."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "app").rglob("*.py")))
    return re.sub(r"\{[^{}]*\}", "\0", re.sub(r'"\s*\n\s*f?"', "", source))


def test_what_troubleshooting_quotes_is_said_by_the_program() -> None:
    text = program_text()
    rows = [line for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if line.startswith("| `")]
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(quotes) > 30
    for quote in quotes:
        # Without what differs from case to case: numbers, names, and what stands for them.
        for words in re.split(r"…|\b\d[\d.%]*|\bN\b|\bHOST\b|\(s\)", quote):
            part = words.strip(" .:,;")
            assert len(part.split()) < 3 or part in text, quote
