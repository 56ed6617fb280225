"""The chat templates that trl 1.16 ships, with the masks of its own training templates: what is trained here, there and why not."""

import re
from pathlib import Path

import pytest
import trl
from tool_records import WEATHER, called

from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.spans import render_answers
from shared.finetune.chat.template import ChatTemplate, TemplateError
from tests.support import chat_templates

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
QUESTION = {"role": "user", "content": "What is two plus two?"}
TOOLS = [{"type": "function", "function": WEATHER["function"] | {"description": "Tells the weather."}}]
CALL = called("weather", {"city": "Oslo"}) | {"content": ""}
CALL["tool_calls"][0]["id"] = "a12345678"
DEGREES = {"role": "tool", "content": "3 degrees", "name": "weather", "tool_call_id": "a12345678"}
COLD = {"role": "assistant", "content": "Cold."}
TALKS = {
    "one turn": [QUESTION, {"role": "assistant", "content": "It is four."}],
    "two turns": [QUESTION, {"role": "assistant", "content": "It is four."}, {"role": "user", "content": "And?"},
                  {"role": "assistant", "content": "Yes."}],
    "reasoning": [QUESTION, {"role": "assistant", "content": "It is four.", "reasoning_content": "Two and two."}],
    "call": [QUESTION, CALL],
    "tools": [QUESTION, CALL, DEGREES, COLD],
    "tools and reasoning": [QUESTION, CALL | {"reasoning_content": "Look it up."}, DEGREES, COLD | {"reasoning_content": "Three."}],
    "tools and words": [QUESTION, CALL | {"content": "Let me look."}, DEGREES, COLD, {"role": "user", "content": "And?"},
                        {"role": "assistant", "content": "Yes."}],
}  # fmt: skip
OF_TOOLS = ("call", "tools", "tools and reasoning", "tools and words")
SILENT = "writes nothing after a last answer, so a model would not learn to stop"
NO_TOOLS = "shows no tools, and the record has some: give one that does"
REFUSED = {  # in conversations of one or another kind, for the reason that is true of each
    **dict.fromkeys([("glm4moe", talk) for talk in TALKS if talk not in OF_TOOLS], SILENT),
    **dict.fromkeys([("glm4moe", talk) for talk in OF_TOOLS], "no special token ends it wherever it stands"),
    **{(name, talk): NO_TOOLS for talk in OF_TOOLS for name in (
        "cohere", "cohere2", "gemma", "gemma3", "llava_next", "deepseek_r1_distill", "deepseekv3", "idefics3", "llama3",
        "phi3", "phi3_5", "qwen2_5_vl", "smolvlm")},
    **{("lfm2", talk): "shows no calls of tools, and the record has some" for talk in OF_TOOLS},
    **{(name, "tools and words"): "message 2: the template leaves out what it says beside its calls of tools" for name in (
        "gptoss", "llama3_1", "llama3_2", "muse_glimmer")},
    # It writes the words behind the responses.
    ("gemma4_v5", "tools and words"): "message 2: no special token ends it wherever it stands",
    ("diffusion_gemma", "tools and words"): "message 4: what comes before it in the text is not its generation prompt",
}  # fmt: skip
REREAD = [(name, "tools and words") for name in ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6")]  # "Cold." stands behind thinking that goes
BESIDE = re.compile(r"(\s|</?think>|<[|｜](start|Assistant|channel)[|｜]>|assistant|</s>)*")  # what trl trains on more
LESS = {"diffusion_gemma": re.compile(r"<\|tool_response>|<\|turn>model")}  # and what it does not: here the prompt ends before them


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return TextTokenizer.load(chat_templates.save_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture
def opened(base):
    """A template by the name of its file, and what finds its special tokens in a text."""
    made = {}

    def find(name):
        if name not in made:
            source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
            template = ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"})
            ends = re.findall(r"<\w*(?:turn|end|eot|start)\w*\|?>|<\w+\|>|<\|\w+>", source)
            made[name] = template, ChatEncoder(base.with_special([*template.special_names, *dict.fromkeys(ends)])).special
        return made[name]

    yield find
    for template, _ in made.values():
        template.close()


def test_the_table_of_templates_and_conversations_is_whole():
    assert (len(NAMES), len(TALKS), len(REFUSED)) == (41, 7, 7 + 4 * 14 + 6)
    assert {name for name, _ in REFUSED} < set(NAMES) and {talk for _, talk in REFUSED} == set(TALKS)
    trained = [(name, talk) for name in NAMES for talk in TALKS if (name, talk) not in REFUSED]
    assert len(trained) == 218 and len([1 for name, talk in trained if talk not in OF_TOOLS]) == 3 * 40


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_found_in_the_stock_template_and_lie_within_those_of_the_training_one(name, opened):
    for talk, messages in TALKS.items():
        asked = Conversation("here", messages, TOOLS if talk in OF_TOOLS else None)
        if (name, talk) in REFUSED:
            with pytest.raises(TemplateError, match=REFUSED[name, talk]):
                rendered(opened, name, asked)
        else:
            require_spans(name, talk, asked, *rendered(opened, name, asked))
            if (FOLDER / f"{name}_training.jinja").exists():
                compare(opened, name, talk, asked)


def rendered(opened, name, asked):
    template, special = opened(name)
    template.require_shown(asked.call())
    return render_answers(template, special, asked)


def require_spans(name, talk, asked, text, spans):
    """Each answer stands in its span, with a token that ends it."""
    answers = [message for message in asked.messages if message["role"] == "assistant" and ((name, talk) not in REREAD or message != COLD)]
    assert len(spans) == len(answers), (talk, text)
    for answer, (start, stop) in zip(answers, spans, strict=True):
        calls = ["weather", "Oslo"] if "tool_calls" in answer else []
        assert all(word in text[start:stop] for word in [answer["content"], *calls]), (talk, text[start:stop])


def compare(opened, name, talk, asked):
    """What is trained is what trl's template of the same name trains on, but for headers and spaces."""
    special = opened(name)[1]
    text, spans = rendered(opened, name, asked)
    theirs, wanted = render_answers(opened(f"{name}_training")[0], special, asked)
    if theirs != text:  # it keeps the empty thinking of earlier turns
        assert talk in ("two turns", "tools", "tools and words") and "<think>" in theirs
        return
    trained = [any(start <= place < stop for start, stop in spans) for place in range(len(text))]
    more = [any(start <= place < stop for start, stop in wanted) for place in range(len(text))]
    places = list(zip(text, trained, more, strict=True))
    left = "".join(character if there and not here else "\n" for character, here, there in places)
    assert all(BESIDE.fullmatch(piece) for piece in left.split("\n")), (talk, left)
    beyond = "".join(character if here and not there else "\n" for character, here, there in places).split()
    assert all(name in LESS and LESS[name].fullmatch(piece) for piece in beyond), (talk, beyond)
    assert all(special.search(text[start:stop]) for start, stop in spans)


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
