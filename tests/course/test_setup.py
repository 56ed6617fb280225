"""What a newcomer installs: one list of packages, the commands of the README, and no version said twice."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from shared.corpus import EMBEDDED
from shared.course.doctor import BRINGS
from shared.course.errors import CourseError
from shared.course.importing import require
from shared.course.paths import CHECKOUT

PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = PROJECT["optional-dependencies"]
NAMED = [*PROJECT["dependencies"], *(line for lines in GROUPS.values() for line in lines)]
PINS = dict(re.match(r"([\w-]+)(?:\[\w+\])?==([\w.]+)$", line).groups() for line in NAMED if "==" in line)

COMMANDS = {
    "run": "", "lab": "lab", "check": "check", "test": "test", "test-all": "test", "gpu": "test", "install": "",
    "install GROUP=trackers": "trackers", "install GROUP=builds": "builds", "install GROUP=scaling": "scaling",
    "install GROUP=pretrained": "pretrained",
}  # fmt: skip


def make(*arguments: str) -> str:
    done = subprocess.run(["make", "--no-print-directory", *arguments], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_conda_takes_every_package_from_pyproject():
    environment = yaml.safe_load((CHECKOUT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert [entry.split("=")[0] for entry in conda] == ["python", "pip"]
    assert pip == {"pip": ["--editable .[test]"]}
    assert environment["name"] == PROJECT["name"]


def test_the_embedded_corpus_is_pinned_to_the_versions_that_it_records():
    assert {package.name: package.version for package in EMBEDDED}.items() <= PINS.items()


def test_what_is_installed_is_what_is_pinned():
    """torch 2.11 is the one exception: the code also runs on it, though notebooks are compared on the pinned version."""
    installed = {name: metadata.version(name).split("+")[0] for name in PINS}
    if installed["torch"].startswith("2.11."):
        installed["torch"] = PINS["torch"]
    assert installed == PINS


def test_each_command_installs_the_packages_that_it_needs_and_no_more():
    """Seen in a fresh folder: the group that pip is asked for."""
    asked = {command: re.findall(r"install.sh \S+ *(\w*)$", make("--dry-run", *command.split(), "VENV=none"), re.M) for command in COMMANDS}
    assert asked == {command: [group] for command, group in COMMANDS.items()}
    assert set(COMMANDS.values()) == {"", *GROUPS} == {"", *BRINGS}
    assert GROUPS["test"][0] == f"{PROJECT['name']}[check,trackers,scaling,pretrained]"
    assert GROUPS["check"][0] == f"{PROJECT['name']}[lab,builds]"


def test_what_a_learner_runs_imports_only_what_make_run_installs():
    """Of every statement in the core, the chapters, the solutions and the checks. The others are imported by the commands that need them,
    which name the command that installs them; a learner meets none of these."""
    elsewhere = {"shared/course/refresh.py": {"nbclient", "nbformat", "nbval"}, "shared/trainer/evaluation/lm_eval_adapter.py": {"lm_eval"}}
    elsewhere["tests/exercises/builds/02_transformer/pieces.py"] = {"transformers"}
    brought, own = closure(PROJECT["dependencies"]), {path.name.removesuffix(".py") for path in CHECKOUT.iterdir()}
    distributions = metadata.packages_distributions()
    foreign = {}
    for path in sorted(CHECKOUT.glob("*/**/*.py")):
        name = path.relative_to(CHECKOUT).as_posix()
        if not name.startswith(("shared/", "chapters/", "solutions/", "tests/exercises/")):
            continue
        modules = {module.split(".")[0] for module in imported(ast.parse(path.read_text(encoding="utf-8")))} - sys.stdlib_module_names
        modules -= own | {beside.stem for beside in path.parent.glob("*.py")}
        if missing := {module for module in modules if not brought & {canonical(each) for each in distributions.get(module, [])}}:
            foreign[name] = missing
    assert foreign == elsewhere


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec") and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value  # a package whose files are read


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def closure(lines: list[str]) -> set[str]:
    """The packages that requirements bring, with what those require, in canonical spelling."""
    found, left = set(), [Requirement(line) for line in lines]
    while left:
        wanted = left.pop()
        name = canonical(wanted.name)
        if (name, *wanted.extras) in found:
            continue
        found.add((name, *wanted.extras))
        inner = map(Requirement, metadata.requires(name) or [])
        left += [each for each in inner if not each.marker or any(each.marker.evaluate({"extra": of}) for of in wanted.extras or {""})]
    return {name for name, *_ in found}


def test_a_package_that_only_one_command_needs_is_named_with_what_installs_it():
    sentence = "^Fitting a law needs no_such_package, which is not installed .*: `make install GROUP=scaling`[.]$"
    with pytest.raises(CourseError, match=sentence):
        require("no_such_package.part", "scaling", "Fitting a law")
    assert require("json.decoder", "scaling", "Fitting a law").JSONDecoder


def test_no_package_is_named_twice():
    names = [re.match(r"[\w-]+", line).group() for line in NAMED]
    packages = [name for name in names if name != PROJECT["name"]]  # a group names itself to bring other groups
    assert len(packages) == len(set(packages))


def test_make_without_a_target_explains_the_commands():
    shown = make()
    for target in ("make run", "make lab", "make test", "make test-all", "IMPL=mine"):
        assert target in shown


def test_make_lab_opens_the_first_chapter_or_the_one_that_is_asked_for():
    assert "/lab/tree/notebooks/01_training_loop.ipynb" in make("--dry-run", "lab")
    assert "/lab/tree/notebooks/02_transformer.ipynb" in make("--dry-run", "lab", "CHAPTER=02")


def test_make_lab_asks_nobody_whether_news_are_wanted():
    folder = re.search(r'app_settings_dir="([^"]+)"', make("--dry-run", "lab"))[1]
    for plugin, settings in json.loads(Path(folder, "overrides.json").read_text(encoding="utf-8")).items():
        package, name = plugin.split(":")
        schema = Path(sys.prefix, "share", "jupyter", "lab", "schemas", package, f"{name}.json")
        assert set(settings) <= set(json.loads(schema.read_text(encoding="utf-8"))["properties"])


def test_make_run_starts_the_trainer_or_a_chapter_and_hands_options_on():
    assert "train.py chapters/12_grpo/laptop.yaml impl=mine steps=3" in make("--dry-run", "run", "IMPL=mine", "ARGS=steps=3")
    assert "impl=" not in make("--dry-run", "run", "CONFIG=my.yaml")  # or the file's own `impl` would be without effect
    assert "chapters/01_training_loop/run.py --impl mixed --steps 3" in make(
        "--dry-run", "run", "CHAPTER=01", "IMPL=mixed", "ARGS=--steps 3"
    )
    layout = make("--dry-run", "run", "LAYOUT=dp2", "CONFIG=my.yaml")
    assert "shared.trainer.launch.start dp2 my.yaml" in layout and "parallel.backend" not in layout
    assert "my.yaml parallel.backend=torch steps=3" in make(
        "--dry-run", "run", "LAYOUT=dp2", "CONFIG=my.yaml", "BACKEND=torch", "ARGS=steps=3"
    )


def test_the_readme_lists_the_twelve_chapters_with_links():
    rows = re.findall(r"^\| \[(\d\d) [^]]*\]\(chapters/(\w+)/README.md\) \|", (CHECKOUT / "README.md").read_text(encoding="utf-8"), re.M)
    assert [number for number, _ in rows] == [f"{number:02}" for number in range(1, 13)]
    assert [slug for _, slug in rows] == sorted(path.parent.name for path in CHECKOUT.glob("chapters/*_*/README.md"))


def test_the_readme_says_how_much_of_the_course_a_learner_writes():
    """Functions and lines of the solutions, beside the functions of the core without the course's own tools."""
    said = " ".join((CHECKOUT / "README.md").read_text(encoding="utf-8").split())
    exercises, builds = sorted(CHECKOUT.glob("solutions/*.py")), sorted(CHECKOUT.glob("solutions/builds/*.py"))
    core = [file for file in CHECKOUT.glob("shared/**/*.py") if not file.is_relative_to(CHECKOUT / "shared" / "course")]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (*exercises, *builds))
    yours = functions_in(exercises) + functions_in(builds)
    written = f"{functions_in(exercises)} exercise functions and {functions_in(builds)} for the builds, {lines:,} lines in our solutions."
    assert written in said and round(functions_in(core) / yours) == 8 and "about eight times as many functions." in said


def functions_in(files: list[Path]) -> int:
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    return sum(isinstance(node, ast.FunctionDef) for node in nodes)
