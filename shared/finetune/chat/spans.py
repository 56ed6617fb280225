"""Chapter 10. Answer spans of a rendered chat (assistant-only loss): found and proved for any chat template.

A span begins where the generation prompt ends, which is where a model begins to write, and holds the answer and the end token after it.
A template with `{% generation %}` says where its spans are. For another they are found by rendering again, and proved:

    the answers replaced by words of no meaning     nothing else may change, and each answer stands there once, as it is
    the messages before an answer, and a prompt     is how the whole text begins
    nothing after an answer, and a user's turn      both begin with the same special token, which ends the answer

Spaces at an answer's ends may be missing, as some templates strip them. A template that rewrites its answers, as those do that drop the
thinking of earlier turns, is refused: a model would be trained on answers that it never gives.
"""

import re
from collections.abc import Sequence
from os.path import commonprefix

from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.messages import Message
from shared.finetune.chat.template import ChatTemplate, TemplateError

Span = tuple[int, int]
WORDS = ("Quorvane{}x", "Zilm{}terops")  # stand for answers: no template asks for them, and no text holds them


def render_answers(template: ChatTemplate, special: re.Pattern, asked: Conversation) -> tuple[str, list[Span]]:
    """The text of a conversation, and the characters of the answers in it that are trained on.

    Args:
        special: finds the special tokens that a template writes: `ChatEncoder.special`.

    Raises:
        TemplateError: the messages cannot be rendered, or the spans cannot be proved.
    """
    if not template.says_generated:
        return proved(template, special, asked)
    calls = [asked.call()] + [asked.call(asked.messages[: asked.first], prompt=True)] * (asked.first > 0)
    whole, *before = template.render_all(calls)
    if asked.read_only:
        return whole.text, spans_of_trained(template, asked, whole.generated)
    return whole.text, [span for span in whole.generated if not before or span[0] >= len(before[0].text)]


def spans_of_trained(template: ChatTemplate, asked: Conversation, spans: list[Span]) -> list[Span]:
    """The spans of trained answers, where others are marked as only read: one span belongs to each answer."""
    answers = [number for number, message in enumerate(asked.messages) if message["role"] == "assistant"]
    if len(spans) != len(answers):
        raise TemplateError(
            f"The chat template {template.name} writes {len(spans)} generated parts for {len(answers)} answers, of which some are marked "
            "as not trained: which part is whose cannot be told. Split the conversation after the last answer that is only read."
        )
    return [span for number, span in zip(answers, spans, strict=True) if asked.is_trained(number)]


def proved(template: ChatTemplate, special: re.Pattern, asked: Conversation) -> tuple[str, list[Span]]:
    """`render_answers` for a template that does not say what is generated."""
    messages = list(asked.messages)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    calls = [asked.call(), *(asked.call(with_words(messages, answers, word)) for word in WORDS)]
    for number in answers:
        ended = messages[: number + 1]
        following = ended if ended[-1].get("tool_calls") else [*ended, {"role": "user", "content": "."}]
        calls += [asked.call(messages[:number], prompt=True)] if number else []
        calls += [asked.call(ended), asked.call(following)]
    whole, *rest = (rendered.text for rendered in template.render_all(calls))
    places = places_of_answers(template, whole, rest[:2], messages, answers)
    texts, spans = iter(rest[2:]), []
    for number in answers:
        prompt = next(texts) if number else whole[: places.get(number, (0, 0))[0]]
        start, stop = places.get(number, (len(prompt), len(prompt)))
        if not whole.startswith(prompt) or len(prompt) > start:
            refuse(template, number, "what comes before it in the text is not its generation prompt")
        endings = [text[stop:] if text.startswith(whole[:stop]) else "" for text in (next(texts), next(texts))]
        ends = list(special.finditer(commonprefix([*endings, whole[stop:]])))
        if not ends:
            refuse(template, number, "no special token of the tokenizer ends it, both where a turn follows and where none does")
        spans.append((len(prompt), stop + ends[-1].end()))
    return whole, [span for number, span in zip(answers, spans, strict=True) if asked.is_trained(number)]


def with_words(messages: Sequence[Message], answers: Sequence[int], word: str) -> list[Message]:
    """The messages with a word in place of each answer that says something."""
    changed = {number: {**messages[number], "content": word.format(number)} for number in answers if said(messages[number])}
    return [changed.get(number, message) for number, message in enumerate(messages)]


def said(message: Message) -> str:
    return (message.get("content") or "").strip()


def places_of_answers(
    template: ChatTemplate, whole: str, replaced: Sequence[str], messages: Sequence[Message], answers: Sequence[int]
) -> dict[int, Span]:
    """Where each answer that says something stands: the whole text is what is around the words, with the answers between."""
    spoken = [number for number in answers if said(messages[number])]
    patterns = ["|".join(word.format(number) for number in spoken) or "(?!)" for word in WORDS]
    around = [re.split(pattern, text) for pattern, text in zip(patterns, replaced, strict=True)]
    last = spoken[-1] if spoken else answers[-1]
    if any(len(pieces) != len(spoken) + 1 for pieces in around):
        refuse(template, last, "it does not stand once in the text")
    if around[0] != around[1]:
        refuse(template, last, "what is written around it depends on it")
    places, place = {}, len(around[0][0])
    for number, before, after in zip(spoken, around[0], around[0][1:], strict=False):
        answer = messages[number]["content"]
        forms = (answer, answer.strip(), answer.lstrip(), answer.rstrip())
        form = next((form for form in forms if whole.startswith(before + form + after, place - len(before))), None)
        if form is None:
            refuse(template, number, "the template rewrites it, as those do that drop the thinking of earlier turns")
        places[number] = (place, place + len(form))
        place += len(form) + len(after)
    if place != len(whole):
        refuse(template, last, "the template writes more after it than after other answers")
    return places


def refuse(template: ChatTemplate, number: int, reason: str) -> None:
    raise TemplateError(
        f"What the chat template {template.name} trains on cannot be proved, for the answer in message {number + 1}: {reason}. Put "
        "{% generation %} and {% endgeneration %} around what the assistant writes in the template, or give chatml."
    )
