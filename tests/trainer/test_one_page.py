"""`one_page.py` and the trainer end at the same weights, bit for bit: what the trainer wraps around the loop changes no number."""

import importlib.util
import re

import pytest
import torch
from rich.console import Console
from trainer_runs import TRAIN, settings_file

from shared.engine.trackers.jsonl import read_jsonl
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pretrain import loaders
from shared.trainer.run import build
from shared.trainer.settings import parse_words

PAGE = TRAIN.with_name("one_page.py")


@pytest.fixture(scope="module")
def page():
    specification = importlib.util.spec_from_file_location("one_page", PAGE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_one_page_and_the_trainer_end_at_the_same_bits(page, tmp_path, prepared, capsys, optimizer, precision):
    """With dropout, two micro-batches a step, moved middles, clipping that bites, warm-up and decay."""
    changes = {"optimizer": {"name": optimizer, "lr": 0.02}, "precision": precision, "max_grad_norm": 0.3}
    path = str(settings_file(tmp_path, prepared, **changes))
    mine = page.main([path]).state_dict()
    said = capsys.readouterr().out
    run = build(parse_words(TrainerConfig, [path]), Console(quiet=True))
    loader, held_out = loaders(run.config, run.text, run.strategy.mesh)
    theirs = run.engine.fit(loader, held_out, steps=run.config.steps).model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    logged = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    found = re.findall(r"step +(\d+)  loss ([\d.]+)  grad norm ([\d.]+) .*?(?:held out: loss ([\d.]+).*)?\n", said)
    assert [int(step) for step, *_ in found] == list(logged)
    for step, loss, norm, held_out in found:
        row = logged[int(step)]
        wanted = [row["train/loss"], row["norm/gradient"], row.get("validation/loss")]
        assert [loss, norm, held_out] == ["" if value is None else f"{value:.3f}" for value in wanted]
    assert max(float(norm) for _, _, norm, _ in found) > 0.3, "no gradient was clipped"


def test_one_page_refuses_what_it_leaves_to_the_trainer(page, tmp_path, prepared):
    path = str(settings_file(tmp_path, prepared))
    parallel = "parallel.activation_checkpointing=full"
    for word in ("precision=float16", "optimizer.name=lion", parallel, "optimizer.no_decay=['*.q_proj.weight']"):
        with pytest.raises(SystemExit, match="train.py"):
            page.main([path, word])


def test_one_page_is_one_page():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 160
    assert not re.search(r"shared\.engine\.(engine|callbacks|defaults|strategy)|shared\.parallel\.(?!config)", "\n".join(lines))
