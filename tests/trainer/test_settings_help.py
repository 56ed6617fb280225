"""The trainer's help, for every key and for the entries of lists, and the key that is offered for one that does not exist."""

import re

import pytest

from shared.course.typed import keys_of, unknown_key
from shared.trainer.config import TrainerConfig
from shared.trainer.settings import parse_words


def test_without_a_configuration_the_usage_is_printed(capsys):
    with pytest.raises(SystemExit) as left:
        parse_words(TrainerConfig, [])
    assert left.value.code == 2 and "Give a configuration first" in capsys.readouterr().err


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as left:
        parse_words(TrainerConfig, ["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    for name in ("--data.fim.rate", "--optimizer.lr", "--engine.checkpoint.every", "--model.num_key_value_heads", "--report.prompts"):
        assert name in said
    assert not re.search(r"--[\w.]+ [A-Z_]+\n\s+\(type", said), "a field without a sentence"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--data.prepare.sources.help", "--data.prepare.sources.weight WEIGHT"),
        ("--grpo.rewards.help", "--grpo.rewards.options OPTIONS"),
        ("--model.experts.help", "--model.experts.num_experts NUM_EXPERTS"),
        ("--engine.callbacks.help", "--engine.callbacks.name NAME"),
    ],
)
def test_help_shows_the_fields_of_a_lists_entries(capsys, word, said):
    with pytest.raises(SystemExit) as left:
        parse_words(TrainerConfig, [word])
    assert left.value.code == 0 and said in capsys.readouterr().out


def test_help_of_a_key_that_does_not_exist_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as left:
        parse_words(TrainerConfig, ["--grpo.reward.help"])
    assert left.value.code == 2 and "Did you mean 'grpo.rewards'?" in capsys.readouterr().err


def test_the_help_that_is_advertised_is_the_help_that_is_there(capsys):
    with pytest.raises(SystemExit):
        parse_words(TrainerConfig, ["--help"])
    advertised = re.findall(r"^  (--[\w.]+\.help)", capsys.readouterr().out, re.M)
    assert len(advertised) > 8
    for word in advertised:
        with pytest.raises(SystemExit) as left:
            parse_words(TrainerConfig, [word])
        assert left.value.code == 0, word
    capsys.readouterr()


@pytest.mark.parametrize(
    ("key", "offered"),
    [
        ("data.weight", None),  # not dpo.sft_weight
        ("engine.name", None),  # which several sections have
        ("report.path", None),
        ("checkpoint.every", "engine.checkpoint.every"),
        ("data.sources", "data.prepare.sources"),
        ("model.hidden_sizes", "model.hidden_size"),
        ("batchsize", "data.batch_size"),
    ],
)
def test_a_key_like_it_is_offered_from_its_own_section_only(key, offered):
    said = unknown_key(key, list(keys_of(TrainerConfig)))
    assert said == f"There is no setting {key}." + (f" Did you mean {offered!r}?" if offered else "")


@pytest.mark.parametrize(("key", "only"), [("engine.lr", "optimizer.lr"), ("optimizer.rate", "data.fim.rate")])
def test_the_only_key_of_that_name_in_another_section_is_named_as_what_it_is_and_not_offered(key, only):
    assert unknown_key(key, list(keys_of(TrainerConfig))) == f"There is no setting {key}. The only {key.split('.')[1]} is {only!r}."
