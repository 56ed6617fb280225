"""Pairs of whole conversations beside a prompt: the prompt is what both begin with, once, and what they share is only read."""

import pytest

from shared.finetune.chat.messages import ChatError
from shared.preference.datasets import preference_of

SHARED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "0+2?"}]
PAIR = {"chosen": [*SHARED, {"role": "assistant", "content": "2"}], "rejected": [*SHARED, {"role": "assistant", "content": "no"}]}


def contents(answer):
    return [message["content"] for message in answer.messages]


@pytest.mark.parametrize("prompt", ["0+2?", "0+2?\n", SHARED, [SHARED[-1] | {"id": "a"}], None])
def test_a_prompt_that_the_conversations_hold_is_not_said_twice(prompt):
    chosen, rejected = preference_of(PAIR | ({"prompt": prompt} if prompt else {}), "pairs.jsonl:1").answers
    assert (contents(chosen), contents(rejected)) == (["Hi", "Hello", "0+2?", "2"], ["Hi", "Hello", "0+2?", "no"])
    assert [number for number in range(4) if chosen.is_trained(number)] == [3]


def test_a_system_message_in_the_conversations_is_part_of_the_prompt():
    system = {"role": "system", "content": "S"}
    pair = {name: [system, *answer] for name, answer in PAIR.items()}
    assert contents(preference_of(pair | {"prompt": "0+2?"}, "pairs.jsonl:1").answers[0])[0] == "S"


def test_another_prompt_than_the_conversations_is_refused_by_place():
    with pytest.raises(ChatError, match="pairs.jsonl:1 has a prompt that is not the end of what its two conversations have in common"):
        preference_of(PAIR | {"prompt": "1+1?"}, "pairs.jsonl:1")
    with pytest.raises(ChatError, match="has a prompt, and an answer that begins with another question"):
        preference_of(PAIR | {"prompt": "1+1?", "rejected": "no"}, "pairs.jsonl:1")


def test_a_pair_that_says_of_itself_that_it_is_not_trained_on_is_refused_by_place():
    assert not preference_of(PAIR | {"weight": 1}, "pairs.jsonl:1").answers[0].unread
    with pytest.raises(ChatError, match="pairs.jsonl:1 has the weight 0 for a whole record"):
        preference_of(PAIR | {"weight": 0}, "pairs.jsonl:1")
