"""What callbacks may read of a run: all of it is there, and they read nothing else."""

import ast
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shared.course.paths import CHECKOUT
from shared.engine.config import EngineConfig
from shared.engine.engine import RuntimeEngine
from shared.engine.callbacks import Ranks, RunState
from shared.engine.strategy import Strategy

OF_A_RUN, OF_RANKS = ({name for name in (*of.__annotations__, *vars(of)) if not name.startswith("_")} for of in (RunState, Ranks))


def read_of_runs(tree: ast.Module) -> Iterator[str]:
    """The attributes that functions read of parameters annotated as a RunState, and those of its strategy, dotted."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            runs = {each.arg for each in function.args.args if each.annotation and ast.unparse(each.annotation) == "RunState"}
            for node in ast.walk(function):
                match node:
                    case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr="strategy"), attr=read) if name in runs:
                        yield f"strategy.{read}"
                    case ast.Attribute(value=ast.Name(id=name), attr=read) if name in runs:
                        yield read


FILES = [path for path in sorted((CHECKOUT / "shared").rglob("*.py")) if "RunState" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_callbacks_read_of_a_run_what_it_promises(path):
    read = set(read_of_runs(ast.parse(path.read_text(encoding="utf-8"))))
    assert not read - OF_A_RUN - {f"strategy.{name}" for name in OF_RANKS}


def test_reads_are_found():
    """The negative control of the test above."""
    tree = ast.parse("def on_step(self, engine: RunState):\n    engine.secret\n    engine.strategy.other\n    self.mine")
    assert set(read_of_runs(tree)) == {"secret", "strategy", "strategy.other"}


def test_an_engine_and_its_strategy_have_all_that_is_promised(tmp_path):
    model = nn.Linear(2, 2)
    engine = RuntimeEngine(model, torch.optim.SGD(model.parameters(), 0.1), EngineConfig(output=tmp_path), callbacks=[])
    assert not {name for name in OF_A_RUN if not hasattr(engine, name)}
    assert not {name for name in OF_RANKS if not hasattr(engine.strategy, name)} and isinstance(engine.strategy, Strategy)
