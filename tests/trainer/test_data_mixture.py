"""The data mixture through the trainer: shares by tokens, on any number of ranks, resumed, and announced."""

import io
import json
from itertools import islice

import pytest
import torch
from rich.console import Console
from trainer_runs import TINY, settings_file

from shared.course.errors import CourseError
from shared.data.loader import PackedLoader
from shared.data.prepare import prepare
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.mesh import Mesh
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pretrain import loaders
from shared.trainer.run import train_model
from shared.trainer.settings import parse_words

ROWS = 32


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two sources whose tokens tell them apart: one of small letters, a larger one of capitals."""
    folder = tmp_path_factory.mktemp("texts")
    for name, count, letter in (("small", 8, "a"), ("large", 40, "A")):
        (folder / name).mkdir()
        for number in range(count):
            words = [chr(ord(letter) + (number * 7 + i * i) % 26) * (1 + i % 5) for i in range(200)]
            (folder / name / f"{number}.txt").write_text(" ".join(words))
    return folder


def config_of(folder, texts, weights=(3, 1), **changes) -> TrainerConfig:
    paths = [str(texts / name) for name in ("small", "large")]
    sources = [{"path": path} | ({"weight": weight} if weight else {}) for path, weight in zip(paths, weights, strict=True)]
    cleaning = {"stages": ["repair"]}
    data = TINY["data"] | {"prepare": TINY["data"]["prepare"] | {"sources": sources, "cleaning": cleaning}} | changes.pop("data", {})
    return parse_words(TrainerConfig, [str(settings_file(folder, texts / "prepared", data=data, **changes))])


def loader_of(config, rank=0, ranks=1):
    text = prepare(config.data.prepare, config.data.prepared)

    def share(world):
        return loaders(config, text, Mesh(config.parallel, world))[0]

    if ranks == 1:
        return share(SingleRankCommunicator())
    return run_threads(share, ranks)[rank]


def rows(loader, steps: int) -> torch.Tensor:
    return torch.cat([torch.cat([batch["input_ids"] for batch in step]) for step in islice(loader, steps)])


def share_of_small(loader, tokenizer, steps: int) -> float:
    """The share of predicted tokens that small letters stand for."""
    counts = [0, 0]
    for step in islice(loader, steps):
        for batch in step:
            for ids, targets in zip(batch["input_ids"], batch["targets"], strict=True):
                text = tokenizer.decode(ids[targets >= 0].tolist())
                counts[text.upper() == text] += int((targets >= 0).sum())
                assert text in (text.upper(), text.lower()), "a row is of one source"
    return counts[0] / sum(counts)


def test_training_tokens_come_in_the_shares_of_the_weights(tmp_path, texts):
    """Also where the smaller source is gone through several times for the larger one's once."""
    tokenizer = prepare(config_of(tmp_path, texts).data.prepare, texts / "prepared").tokenizer
    for weights in ((3, 1), (1, 4)):
        found = share_of_small(loader_of(config_of(tmp_path, texts, weights)), tokenizer, ROWS)
        assert found == pytest.approx(weights[0] / sum(weights), abs=2 / (4 * ROWS)), weights
    assert isinstance(loader_of(config_of(tmp_path, texts, (None, None))), PackedLoader)
    assert len(list((texts / "prepared").iterdir())) == 1, "another weight needs no other preparation"


def test_a_mixture_is_the_same_on_any_number_of_ranks_and_after_a_resume(tmp_path, texts):
    whole = rows(loader_of(config_of(tmp_path, texts)), ROWS)
    two = config_of(tmp_path, texts, parallel={"data_parallel": 2})
    ranks = [loader_of(two, rank, 2) for rank in range(2)]
    shares = [rows(loader, 12).view(12, 2, -1) for loader in ranks]
    assert torch.equal(torch.cat(shares, dim=1).flatten(0, 1), whole[:48])
    state = json.loads(json.dumps(ranks[1].state_dict()))
    resumed = loader_of(config_of(tmp_path, texts))
    resumed.load_state_dict(state)
    assert torch.equal(rows(resumed, 10), whole[48:88])


def test_a_run_says_what_it_mixes_and_ends_with_a_report(tmp_path, texts):
    said = io.StringIO()
    config = config_of(tmp_path, texts, steps=4, report={"export": False})
    results = train_model(config, Console(file=said, width=300))
    assert f"Data mixture, by tokens: 75% {texts / 'small'}, 25% {texts / 'large'}." in said.getvalue()
    assert results.report.is_file()


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ((3, None), {}, "Some sources have a weight and some have none"),
        ((3, -1), {}, "weight is -1"),
        ((3, 1), {"data": {"epochs": 2}}, "give data.epochs null, or no weights"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(tmp_path, texts, capsys, weights, changes, message):
    with pytest.raises(SystemExit):
        config_of(tmp_path, texts, weights, **changes)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_weighted_source_of_which_nothing_is_left_is_named(tmp_path, texts):
    config = config_of(tmp_path, texts)
    text = prepare(config.data.prepare, config.data.prepared)
    text.documents[1] = 0
    with pytest.raises(CourseError, match="No document of .*large is left to train on"):
        loaders(config, text, Mesh(config.parallel, SingleRankCommunicator()))
