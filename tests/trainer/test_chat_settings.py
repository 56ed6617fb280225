"""`course sample`, and the settings of answers in both commands: stop strings, min-p, repetition penalty, seeds."""

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from talking_models import save_model

from shared.course.cli import cli
from shared.course.terminal import printable
from shared.rl.generation import Drawing
from shared.trainer.talk.chat import AnswerSettings, before_stop, open_talk

WARM = AnswerSettings(Drawing(temperature=0.9, top_k=None), new_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def talk(model):
    return open_talk(model, WARM, None)


def answer(talk, **settings):
    fresh = replace(talk, settings=replace(WARM, **settings))
    return "".join(fresh.answer("What is 3 plus 4?")), fresh


def sample(model, *words, said=None):
    return CliRunner().invoke(cli, ["sample", str(model), *words, "--new-tokens", "6", "--temperature", "0.9"], input=said)


def test_an_answer_ends_before_its_first_stop_string(talk):
    whole, unstopped = answer(talk)
    for begin in range(0, len(whole) - 3, 3):
        stop = (whole[begin : begin + 3], "never in it", whole[-1] + "x")
        cut, stopped = answer(talk, stop=stop)
        assert cut == whole[: min(whole.find(each) for each in stop if each in whole)]
        assert (stopped.tokens < unstopped.tokens or begin > 0) and not stopped.cut_off
    assert unstopped.cut_off and answer(talk, stop=("never in it", whole[-2:] + "x"))[0] == whole


@given(st.lists(st.text("ab\ufffd", max_size=3), max_size=6), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_what_is_shown_of_a_growing_text_is_never_taken_back(pieces, stop):
    text, shown = "", [""]
    for piece in pieces:
        text += piece
        shown.append(before_stop(text, tuple(stop)))
        assert shown[-1].startswith(shown[-2]) and text.startswith(shown[-1])
        if ends := [text.index(each) for each in stop if each in text]:
            assert shown[-1] == text[: min(ends)]
            break
    else:
        rest = text[len(shown[-1]) :].rstrip("\ufffd")
        assert rest == "" or any(each.startswith(rest) for each in stop)


def test_settings_reach_the_drawing(model, talk):
    likeliest = answer(talk, drawing=Drawing(temperature=0.0))[0]
    assert answer(talk, drawing=Drawing(temperature=0.9, min_p=1.0))[0] == likeliest != answer(talk)[0]
    assert answer(talk, drawing=Drawing(temperature=0.9, top_p=1e-6))[0] == likeliest
    repeated = answer(talk, drawing=Drawing(temperature=0.0, repetition_penalty=5.0))[0]
    assert repeated != likeliest
    prompt = "What is 3 plus 4?"
    for words, expected in ((("--min-p", "1"), likeliest), (("--temperature", "0", "--repetition-penalty", "5"), repeated)):
        done = CliRunner().invoke(cli, ["sample", str(model), prompt, "--new-tokens", "40", "--temperature", "0.9", *words])
        assert done.output == printable(expected) + "\n"
    stop = likeliest[5:8]
    done = CliRunner().invoke(cli, ["chat", str(model), "--temperature", "0", "--new-tokens", "40", "--stop", stop], input=prompt + "\n")
    assert done.output == printable(likeliest[: likeliest.find(stop)]) + "\n"


def test_sample_prints_answers_alone_from_words_or_standard_input(model):
    one, three, piped = sample(model, "def "), sample(model, "def ", "--number", "3"), sample(model, "-", said="def ")
    assert one.exit_code == 0 and piped.output == one.output and three.output.startswith(one.output)
    fresh = open_talk(model, replace(WARM, new_tokens=6, drawing=Drawing(0.9, 40)), None)
    answers = ["".join(fresh.answer("def ")) for _ in range(3)]
    assert three.output == printable("\n\n".join(answers)) + "\n" and len(set(answers)) > 1
    assert sample(model, "def ", "--seed", "1").output != one.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("",), "no token"),
        (("-",), "no token"),
        (("a", "--stop", ""), "empty string"),
        (("a", "--temperature", "nan"), "temperature is nan"),
        (("a", "--temperature", "inf"), "temperature"),
        (("a", "--min-p", "0"), "min-p"),
        (("a", "--top-p", "nan"), "--top-p is nan"),
        (("a", "--seed", str(2**64)), "seed"),
        (("word " * 400,), "write another one"),
    ],
)
def test_what_cannot_be_sampled_is_a_sentence(model, words, says):
    done = CliRunner().invoke(cli, ["sample", str(model), *words], input="")
    assert done.exit_code == 64 and says in done.output and "Traceback" not in done.output


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_a_model_of_nan_is_a_sentence(tmp_path, temperature):
    folder = save_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    done = CliRunner().invoke(cli, ["sample", str(folder), "def ", "--temperature", temperature])
    assert done.exit_code == 64 and "no token can be drawn" in done.output and "Traceback" not in done.output
