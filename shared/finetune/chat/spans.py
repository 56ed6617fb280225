"""Chapter 10. Answer spans of a rendered chat (assistant-only loss): found and proved for any chat template.

A span begins where the generation prompt ends, which is where a model begins to write, and holds the answer and the end token after it.
A template with `{% generation %}` says where its spans are. For another they are found by rendering again, and proved:

    the answers replaced by words of no meaning     nothing else may change, and each answer stands there once, as it is
    the messages before an answer, and a prompt     is how the whole text begins, an empty thinking part aside
    nothing after an answer, and a user's turn      both begin with a special token, which ends the answer

A span holds what stands between prompt and answer, such as thinking. Spaces at an answer's ends may be missing, as some templates strip
them. A template that rewrites its answers is refused, or a model would be trained on answers that it never gives; one that drops the
thinking of earlier turns trains on the last answer, and the earlier ones are only read.
"""

import re
from collections.abc import Sequence
from os.path import commonprefix

from shared.finetune.chat.datasets import Conversation
from shared.finetune.chat.messages import Message
from shared.finetune.chat.template import ChatTemplate, TemplateError

Span = tuple[int, int]
THOUGHT = "</think>"  # ends a thinking part within an answer
THINKING = re.compile(r"(\s|</?think>)*")  # an empty one
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
        ended = with_words(messages[: number + 1], [number], WORDS[0])
        following = ended if ended[-1].get("tool_calls") else [*ended, {"role": "user", "content": "."}]
        calls += [asked.call(messages[:number], prompt=True)] if number else []
        calls += [asked.call(ended), asked.call(following)]
    whole, *rest = (rendered.text for rendered in template.render_all(calls))
    places = places_of_answers(template, whole, rest[:2], messages, answers)
    texts, spans = iter(rest[2:]), []
    for number in answers:
        prompt = next(texts) if number else whole[: places.get(number, (0, 0))[0]]
        endings = [ending_of(text, number, messages[number], prompt) for text in (next(texts), next(texts))]
        if number not in places and said(messages[number]):
            continue
        start = common_start(template, special, number, prompt, whole, places)
        if start is None and number != answers[-1]:
            continue  # the model reads earlier turns with their thinking when it writes this answer
        if start is None:
            refuse(template, number, "what comes before it in the text is not its generation prompt")
        stop = places[number][1] if number in places else start + THINKING.match(whole[start:]).end()
        spans.append((number, (start, stop + ending_length(template, special, number, [whole[stop:], *endings]))))
    return whole, [span for number, span in spans if asked.is_trained(number)]


def common_start(
    template: ChatTemplate, special: re.Pattern, number: int, prompt: str, whole: str, places: dict[int, Span]
) -> int | None:
    """Where the model begins to write: after the generation prompt, without a thinking part that this text has not. None where the prompt
    has another such part before."""
    start = len(commonprefix([prompt, whole]))
    place = places.get(number, (start,))[0]
    if THINKING.fullmatch(special.sub("", prompt[start:])) and start <= place:
        return start
    if THINKING.sub("", prompt) != THINKING.sub("", whole[:place]):
        refuse(template, number, "what comes before it in the text is not its generation prompt")
    return None


def ending_of(text: str, number: int, message: Message, prompt: str) -> str:
    """What follows an answer in a text where a word stands for it; of an answer that says nothing, all that follows its prompt."""
    if said(message):
        return text.rpartition(WORDS[0].format(number))[2]
    rest = text[len(commonprefix([prompt, text])) :]
    return rest[THINKING.match(rest).end() :]


def ending_length(template: ChatTemplate, special: re.Pattern, number: int, endings: list[str]) -> int:
    """The characters after an answer that end it. The first ending is that of the text; the others, where nothing follows and where a turn
    does, have the same tokens, or each begins with one of its own, as gpt-oss ends the last answer."""
    if ends := list(special.finditer(commonprefix(endings))):
        return ends[-1].end()
    first = [special.match(ending) for ending in endings]
    if not all(first):
        silent = endings[1].strip() == ""
        reason = "the template writes nothing after a last answer" if silent else "no special token ends it wherever it stands"
        refuse(template, number, f"{reason}, so a model would not learn to stop")
    return first[0].end()


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
        called = (number for number in spoken if messages[number].get("tool_calls"))
        if (lost := next((number for number in called if WORDS[0].format(number) not in replaced[0]), None)) is not None:
            refuse(template, lost, "the template leaves out what it says beside its calls of tools")
        refuse(template, last, "it does not stand once in the text")
    if around[0] != around[1]:
        refuse(template, last, "what is written around it depends on it")
    places, place = {}, 0
    for number, before, after in zip(spoken, around[0], around[0][1:], strict=False):
        answer, is_last = messages[number]["content"], number == last
        start = place + len(commonprefix([before, whole[place:]]))
        form = next((form for form in forms_of(answer) if whole.startswith(before + form + after, place)), None)
        if form is not None:
            stop = start + len(form)
        else:
            stop = len(whole) - len(after) if is_last else whole.find(after, start)
            if THOUGHT not in answer or not after or stop < start:
                refuse(template, number, "the template rewrites it")
            if is_last and answer.partition(THOUGHT)[0].removeprefix("<think>").strip() not in whole[start:stop]:
                refuse(template, number, "the template leaves its thinking out")
        if form is not None or is_last:  # an earlier answer has lost its thinking: it is only read
            places[number] = (start, stop)
        place = stop
    if place + len(around[0][-1]) != len(whole):
        refuse(template, last, "the template writes more after it than after other answers")
    return places


def forms_of(answer: str) -> tuple[str, ...]:
    """An answer as templates write it: some strip spaces at its ends."""
    return answer, answer.strip(), answer.lstrip(), answer.rstrip()


def refuse(template: ChatTemplate, number: int, reason: str) -> None:
    raise TemplateError(
        f"What the chat template {template.name} trains on cannot be proved, for the answer in message {number + 1}: {reason}. Put "
        "{% generation %} and {% endgeneration %} around what the assistant writes in the template, or give chatml."
    )
