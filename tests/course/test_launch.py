"""A chapter's configuration: the class's defaults, over them its YAML, other files, and the command line's options."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.course.launch import parse


@dataclass
class Inner:
    share: float = 0.5


@dataclass
class Config:
    steps: int = 10
    seed: int = 0
    name: str = "plain"
    inner: Inner = field(default_factory=Inner)


@pytest.fixture
def defaults(tmp_path) -> Path:
    (tmp_path / "run.yaml").write_text("steps: 20\nseed: 2\n")
    (tmp_path / "mine.yaml").write_text("seed: 3\nname: mine\n")
    (tmp_path / "other.yaml").write_text("name: other\n")
    return tmp_path / "run.yaml"


def test_options_stand_over_files_in_their_order_and_files_over_the_defaults(defaults):
    files = [word for name in ("mine", "other") for word in ("--config", str(defaults.with_name(f"{name}.yaml")))]
    assert parse(Config, defaults, []) == Config(20, 2)
    assert parse(Config, defaults, files) == Config(20, 3, "other")
    assert parse(Config, defaults, [*files, "--steps", "5", "--inner.share", "0.25"]) == Config(5, 3, "other", Inner(0.25))


@pytest.mark.parametrize(("words", "says"), [(["--step", "5"], "Did you mean"), (["--steps", "many"], "steps is 'many'")])
def test_what_cannot_be_is_one_sentence(defaults, words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(Config, defaults, words)
    assert ended.value.code == 2 and says in capsys.readouterr().err
