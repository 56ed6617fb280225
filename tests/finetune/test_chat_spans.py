"""Answers in a rendered chat: equal to transformers' masks where a template says them, proved where not, refused where they cannot be."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.encoding import ChatEncoder
from shared.finetune.chat.masking import assistant_mask
from shared.finetune.chat.spans import render_answers
from shared.finetune.chat.template import CHATML, ChatTemplate, TemplateError
from tests.support import chat_templates as published

TALK = [
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "It is four.\n\n  def f(x):\n    return    x"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Yes."},
]
ENDS = {"chatml": "<|im_end|>", "qwen": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "zephyr": "</s>"}
AFTER_PROMPT = {"mistral": " "}  # what a model writes before the answer's first word


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return published.save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def encoder(folder):
    return ChatEncoder(TextTokenizer.load(folder))


@pytest.fixture(scope="module")
def templates():
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return {name: ChatTemplate(source, name, variables) for name, source in (published.TEMPLATES | {"default": CHATML}).items()}


def rendered(template, encoder, messages, **options):
    return render_answers(template, encoder.special, Conversation("here", messages, **options))


def answers_of(template, encoder, messages, **options):
    text, spans = rendered(template, encoder, messages, **options)
    return [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize("name", [*published.TEMPLATES, "default"])
def test_an_answer_and_its_end_token_are_trained_also_where_a_users_turn_follows(name, templates, encoder):
    end, before = ENDS.get(name, "<|im_end|>"), AFTER_PROMPT.get(name, "")
    wanted = [before + message["content"] + end for message in TALK if message["role"] == "assistant"]
    assert answers_of(templates[name], encoder, TALK) == wanted
    assert answers_of(templates[name], encoder, TALK[:3]) == wanted[:1]
    assert answers_of(templates[name], encoder, TALK, first=2) == wanted[1:]


@pytest.mark.parametrize("source", [published.GENERATION, CHATML])
@pytest.mark.parametrize("trim_offsets", [False, True])
def test_masks_equal_those_of_transformers_for_a_template_that_says_what_is_generated(source, trim_offsets, tmp_path):
    """With GPT-2's post-processor too, which takes spaces out of the offsets: an answer's newlines are trained all the same."""
    from transformers import AutoTokenizer

    folder = published.save_tokenizer(tmp_path, trim_offsets)
    theirs, encoder = AutoTokenizer.from_pretrained(folder), ChatEncoder(TextTokenizer.load(folder))
    for messages in (TALK, TALK[:3], TALK[:2], [{"role": "system", "content": "  \n"}, *TALK]):
        wanted = theirs.apply_chat_template(messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True)
        text, spans = rendered(ChatTemplate(source, "mine"), encoder, messages)
        ids, offsets = encoder.encode([text])[0]
        assert ids == wanted["input_ids"]
        assert assistant_mask(offsets, spans).tolist() == [bool(mark) for mark in wanted["assistant_masks"]]
    plain = source.replace("{% generation %}", "").replace("{% endgeneration %}", "").replace("{%- generation %}", "")
    plain = ChatTemplate(plain.replace("{%- endgeneration %}", ""), "plain")
    assert not plain.says_generated
    assert rendered(plain, encoder, TALK) == rendered(ChatTemplate(source, "mine"), encoder, TALK)


def test_a_generation_block_in_a_macro_is_found(encoder):
    """transformers counts what has been written so far, which within a macro is something else."""
    source = "{% macro say(m) %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}{% endmacro %}"
    source += "{% for m in messages %}{{ 'A: ' + say(m) if m.role == 'assistant' else 'U: ' + m.content }}{% endfor %}"
    assert answers_of(ChatTemplate(source, "macro"), encoder, TALK) == [TALK[1]["content"] + "</s>", "Yes.</s>"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (published.ENDLESS, "message 2: no special token ends it wherever it stands, so a model would not learn to stop"),
        (published.PROMPTED.replace("<think>", "Hm."), "message 2: what comes before it in the text is not its generation prompt"),
        (published.LOUD, "message 4: it does not stand once in the text"),
        (published.CHATML.replace("message['content'] +", "message['content'] + message['content'] +"), "does not stand once"),
        (published.CHATML.replace("message['content'] +", "(message['content'] | length) ~ message['content'] +"), "depends on it"),
        (published.CHATML.replace("message['content'] +", "message['content'].replace('four', '4') +"), "message 2: the template rewrites"),
        (published.CHATML.replace("<|im_start|>' +", "<|im_start|>' + (messages | length | string) +"), "message 2: what comes before it"),
    ],
)
def test_a_template_whose_spans_cannot_be_proved_is_refused_with_the_reason(source, reason, encoder):
    template = ChatTemplate(source, "odd.jinja", {"eos_token": "</s>"})
    with pytest.raises(TemplateError) as caught:
        rendered(template, encoder, TALK)
    assert reason in str(caught.value) and "odd.jinja" in str(caught.value) and "\n" not in str(caught.value)


def test_thinking_that_a_template_drops_or_prompts_for_leaves_answers_that_it_writes(encoder):
    thoughts = [TALK[0], {"role": "assistant", "content": "<think>Hm, four.</think>It is four."}, *TALK[2:]]
    assert answers_of(ChatTemplate(published.THINKING, "thinking"), encoder, thoughts) == ["Yes.<|im_end|>"]
    assert answers_of(ChatTemplate(published.PROMPTED, "prompted"), encoder, TALK) == [TALK[1]["content"] + "<|im_end|>", "Yes.<|im_end|>"]


def test_an_end_that_only_a_last_answer_has_is_refused_also_where_no_other_turn_follows(encoder):
    """Training on single turns alone would not show it, and in a chat the model would meet answers that do not end."""
    source = published.ENDLESS.replace("{%- else %}", "{%- elif messages[-1].role == 'assistant' %}")
    with pytest.raises(TemplateError, match="message 2: no special token ends it wherever it stands"):
        rendered(ChatTemplate(source, "odd.jinja", {"eos_token": "</s>"}), encoder, TALK[:2])


def test_what_is_refused_in_one_conversation_may_be_proved_in_another(encoder):
    """Without thinking in an earlier turn, the template that drops it writes the answers as they are."""
    assert answers_of(ChatTemplate(published.THINKING, "odd"), encoder, TALK)[1] == "Yes.<|im_end|>"


def test_tool_calls_are_answers_and_tool_messages_are_not(templates, encoder):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "<|im_end|>"}}}
    talk = [TALK[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4"}, TALK[3]]
    for name in ("qwen", "default"):
        first, second = answers_of(templates[name], encoder, encoder.guarded(talk))
        assert first.strip().startswith('<tool_call>\n{"name": "add"') and first.endswith("</tool_call><|im_end|>")
        assert second == "Yes.<|im_end|>"
        said = [TALK[0], {**talk[1], "content": "I add."}]
        assert answers_of(templates[name], encoder, encoder.guarded(said))[0].startswith("I add.\n<tool_call>")


characters = st.characters(codec="utf-8", exclude_categories=["Cs", "Co", "Cn"])
words = st.text(characters, min_size=1, max_size=12).filter(lambda text: text.strip())
forged = st.sampled_from(["<|im_end|>", "</s>", "a<|eot_id|>b", "[/INST]", "Quorvane1", "<|im_start|>assistant\n", "{{ x }}"])
spaces = st.sampled_from(["", "", " ", "\n", " \t\n"])
contents = st.tuples(spaces, st.lists(words | forged, min_size=1, max_size=3).map("".join), spaces).map("".join)


@settings(max_examples=40)
@given(st.lists(contents, min_size=2, max_size=4), st.sampled_from(sorted(ENDS)))
def test_spans_hold_the_answers_and_their_end_tokens_for_any_words(templates, encoder, texts, name):
    """Whatever is said: the spans are proved, hold the answer (perhaps stripped) and one end token, and nothing of the user's words."""
    messages = [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]
    guarded = encoder.guarded(messages)
    text, spans = rendered(templates[name], encoder, guarded)
    answers = [message["content"] for message in guarded[1::2]]
    assert len(spans) == len(answers)
    for (start, stop), answer in zip(spans, answers, strict=True):
        assert text[start:stop] in [AFTER_PROMPT.get(name, "") + form + ENDS[name] for form in (answer, answer.strip())]
    ids, offsets = encoder.encode([text])[0]
    marked = assistant_mask(offsets, spans).tolist()
    end = encoder.tokenizer.special(ENDS[name])
    assert [number for number, trained in zip(ids, marked, strict=True) if trained].count(end) == len(answers)
    assert encoder.tokenizer.decode(ids, keep_special=True) == encoder.plain(text)
