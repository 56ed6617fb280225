"""The chat templates that trl 1.16 ships, with the masks of its own training templates: what is trained here, there and why not."""

import re
from pathlib import Path

import pytest
import trl

from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.spans import render_answers
from shared.finetune.chat.template import ChatTemplate, TemplateError
from tests.support import chat_templates

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
PICTURES = ("idefics3", "llava_next", "smolvlm")  # their contents are lists of parts
SILENT = ("glm4moe",)  # nothing ends a last answer: the next turn's own token does
QUESTION = {"role": "user", "content": "What is two plus two?"}
TALKS = {
    "one turn": [QUESTION, {"role": "assistant", "content": "It is four."}],
    "two turns": [QUESTION, {"role": "assistant", "content": "It is four."}, {"role": "user", "content": "And?"},
                  {"role": "assistant", "content": "Yes."}],
    "reasoning": [QUESTION, {"role": "assistant", "content": "It is four.", "reasoning_content": "Two and two."}],
}  # fmt: skip
BESIDE = re.compile(r"(\s|</?think>|<[|｜](start|Assistant|channel)[|｜]>|assistant|</s>)*")  # what trl trains on more: headers and spaces


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return TextTokenizer.load(chat_templates.save_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def opened(base):
    """A template by the name of its file, and what finds its special tokens in a text."""
    made = {}

    def find(name):
        if name not in made:
            source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
            template = ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"})
            ends = re.findall(r"<\w*(?:turn|end|eot|start)\w*\|?>|<turn\|>|<\|turn>", source)
            made[name] = template, ChatEncoder(base.with_special([*template.special_names, *dict.fromkeys(ends)])).special
        return made[name]

    yield find
    for template, _ in made.values():
        template.close()


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PICTURES + SILENT])
def test_answers_are_found_in_the_stock_template_and_lie_within_those_of_the_training_one(name, talk, opened):
    template, special = opened(name)
    asked = Conversation("here", TALKS[talk])
    text, spans = render_answers(template, special, asked)
    answers = [message["content"] for message in TALKS[talk] if message["role"] == "assistant"]
    assert len(spans) == len(answers)
    for answer, (start, stop) in zip(answers, spans, strict=True):
        assert answer in text[start:stop] and special.search(text[start:stop]), text[start:stop]
    if not (FOLDER / f"{name}_training.jinja").exists():
        return
    theirs, wanted = render_answers(opened(f"{name}_training")[0], special, asked)
    if theirs != text:  # it keeps the empty thinking of earlier turns
        assert talk == "two turns" and "<think>" in theirs
        return
    trained = [any(start <= place < stop for start, stop in spans) for place in range(len(text))]
    more = [any(start <= place < stop for start, stop in wanted) for place in range(len(text))]
    assert all(there for here, there in zip(trained, more, strict=True) if here)
    left = "".join(character if there and not here else "\n" for character, here, there in zip(text, trained, more, strict=True))
    assert all(BESIDE.fullmatch(piece) for piece in left.split("\n")), left


@pytest.mark.parametrize("name", SILENT)
def test_a_template_that_ends_no_last_answer_is_refused_for_that_reason(name, opened):
    template, special = opened(name)
    with pytest.raises(TemplateError, match="writes nothing after a last answer, so a model would not learn to stop"):
        render_answers(template, special, Conversation("here", TALKS["one turn"]))


THOUGHT = "<think>\nTwo.\n</think>\n\nIt is four."


def test_thinking_within_an_answer_is_trained_where_it_stands_and_read_where_the_template_drops_it(opened):
    template, special = opened("qwen3")
    text, spans = render_answers(template, special, Conversation("here", [QUESTION, {"role": "assistant", "content": THOUGHT}]))
    assert [text[start:stop] for start, stop in spans] == [THOUGHT + "<|im_end|>"]
    later = [QUESTION, {"role": "assistant", "content": THOUGHT}, *TALKS["two turns"][2:]]
    text, spans = render_answers(template, special, Conversation("here", later))
    assert "Two." not in text and [text[start:stop] for start, stop in spans] == ["<think>\n\n</think>\n\nYes.<|im_end|>"]


def test_a_template_that_drops_the_thinking_of_a_last_answer_is_refused(opened):
    template, special = opened("deepseek_r1_distill")
    with pytest.raises(TemplateError, match="the template leaves its thinking out"):
        render_answers(template, special, Conversation("here", [QUESTION, {"role": "assistant", "content": THOUGHT}]))
