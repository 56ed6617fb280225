"""What lm-eval's tasks ask of generation, against its own class for transformers on the same weights."""

import json

import pytest
from evaluated_models import model_folder
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, processors

from shared.course.errors import CourseError
from shared.trainer.evaluation.lm_eval_adapter import CourseLM
from shared.trainer.evaluation.measures import open_subject

TEMPLATE = (
    "{% for m in messages %}<{{m.role}}>{{m.content}}</{{m.role}}>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPT = "over the river bank near " * 3


@pytest.fixture
def folder(tmp_path):
    made = model_folder(tmp_path / "m", "llama")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def both(folder):
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1), CourseLM(open_subject(folder))


def answers(model, asked):
    return model.generate_until([Instance("generate_until", {}, (PROMPT, {"until": [], "max_gen_toks": 20} | asked), 0)])


@pytest.mark.parametrize(
    "asked", [{}, {"do_sample": False, "temperature": 0.7}, {"repetition_penalty": 3.0}, {"do_sample": False, "num_beams": 1}]
)
def test_answers_are_those_of_its_own_class(asked, folder):
    theirs, mine = both(folder)
    assert answers(mine, asked) == answers(theirs, asked)


def test_the_models_own_repetition_penalty_counts_for_greedy_answers(folder):
    plain = answers(both(folder)[1], {})
    said = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(said | {"repetition_penalty": 3.0}))
    theirs, mine = both(folder)
    assert answers(mine, {}) == answers(theirs, {}) != plain


def test_what_is_not_built_is_refused_by_name(folder):
    with pytest.raises(CourseError, match="asks for generation with num_beams 3, which is not built here"):
        answers(both(folder)[1], {"num_beams": 3})


@pytest.mark.parametrize("begun", ["the", "the ", " the"])
def test_a_begun_answer_stays_open(begun, folder):
    theirs, mine = both(folder)
    turns = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": begun}]
    assert mine.apply_chat_template(list(turns), False) == theirs.apply_chat_template(list(turns), False)
    assert mine.apply_chat_template(turns[:1]) == theirs.apply_chat_template(turns[:1])


def with_beginning(folder, adds: bool) -> int:
    """Give the tokenizer a beginning token, which its post-processor adds or not. Returns its id."""
    tokenizer, name = Tokenizer.from_file(str(folder / "tokenizer.json")), "<|extra_0|>"
    number = tokenizer.token_to_id(name)
    if adds:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, number)])
    tokenizer.save(str(folder / "tokenizer.json"))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"bos_token": name}))
    return number


@pytest.mark.parametrize("adds", [True, False], ids=["adds one", "adds none"])
def test_plain_text_begins_as_its_own_class_lets_it_begin(adds, folder):
    """Texts longer than the context too; its rolling likelihood has the beginning token twice where the tokenizer adds it."""
    with_beginning(folder, adds)
    theirs, mine = both(folder)
    pairs = [("the quick", " brown fox"), ("", "the quick"), (PROMPT * 9, "lazy dog"), ("near the quiet ", "river")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    wanted, found = theirs.loglikelihood(asked), mine.loglikelihood(asked)
    assert [each[0] for each in found] == pytest.approx([each[0] for each in wanted], abs=1e-4)
    spaces, none = (Instance("loglikelihood", {}, pair, 0) for pair in (("  ", "quick"), ("", "  quick")))  # its own class takes none
    assert mine.loglikelihood([spaces]) == mine.loglikelihood([none])
    texts = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(("the quick brown fox", PROMPT * 9))]
    assert mine.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-6, abs=1e-4)


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"], ids=["by the tokenizer", "by the template"])
@pytest.mark.parametrize("adds", [True, False], ids=["adds one", "adds none"])
def test_a_chat_begins_as_its_own_class_lets_it_begin(written, adds, folder):
    """With the beginning token once, or never where neither the tokenizer nor the template writes it."""
    beginning = with_beginning(folder, adds)
    (folder / "chat_template.jinja").write_text(written + TEMPLATE)
    theirs, mine = both(folder)
    turns = [{"role": "user", "content": "the quick"}]
    chats = [model.apply_chat_template(list(turns)) for model in (theirs, mine)]
    assert chats[0] == chats[1] and mine.encode(chats[1]) == theirs.tok_encode(chats[0])
    assert mine.encode(chats[1]).count(beginning) == (adds or bool(written))
    asked = [[Instance(kind, {}, (chats[0], more), 0)] for kind, more in (
        ("loglikelihood", " brown fox"), ("generate_until", {"until": [], "max_gen_toks": 12}),
    )]  # fmt: skip
    assert mine.loglikelihood(asked[0])[0][0] == pytest.approx(theirs.loglikelihood(asked[0])[0][0], abs=1e-4)
    assert mine.generate_until(asked[1]) == theirs.generate_until(asked[1])
