"""Cleaning prose in several languages: the shipped recipes keep it, and the output says which share each rule dropped."""

import json
import random
from types import SimpleNamespace

import pytest
from rich.console import Console

from shared.corpus import Document
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.typed import configured
from shared.data.cleaning.cleaner import Cleaner, CleaningConfig
from shared.data.cleaning.stages import STOP_WORDS, Language, ProseQuality
from shared.data.prepare import PrepareConfig, fingerprint, prepare
from shared.data.source import Source
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pretrain import Pretraining
from shared.trainer.settings import read_settings

SENTENCES = [
    f"{who} {what} {where}, und {then}."
    for who, what, where, then in zip(
        ["Der alte Müller", "Die Lehrerin", "Ein junger Fischer", "Das Orchester", "Die Nachbarin", "Der Bürgermeister", "Die Köchin"] * 9,
        ["wartete", "sprach lange", "arbeitete", "übte leise", "spazierte", "stritt", "sang", "schwieg", "zeichnete"] * 7,
        [f"{place} nahe der {town}" for place in ("am Ufer", "im Garten", "auf dem Markt", "vor der Kirche", "hinter dem Bahnhof")
         for town in ("Elbe", "Brücke", "Mühle", "Schule", "Grenze", "Stadt", "Post", "Burg", "Au", "Alm", "Halle", "Küste")] + ["da"] * 3,
        ["niemand hörte zu", "der Regen begann", "es wurde spät", "die Kinder lachten", "alle gingen nach Hause"] * 12 + ["es ist so"] * 3,
        strict=True,
    )
]  # fmt: skip
TEXTS = {
    "en": "The house stands at the end of the road, and nobody that we know has been to see it with a lamp at night.",
    "de": "Das Haus steht am Ende der Straße, und niemand, den wir kennen, ist in der Nacht mit einer Lampe dort gewesen.",
    "es": "La casa se encuentra al final de la calle, y nadie que conozcamos ha ido por la noche con una lámpara en los últimos años.",
    "fr": "La maison se trouve au bout de la rue, et personne que nous connaissons n'y est allé la nuit pour voir les arbres.",
    "it": "La casa si trova alla fine della strada, e nessuno che conosciamo è andato di notte con una lampada per vedere il giardino.",
    "nl": "Het huis staat aan het einde van de straat, en niemand die wij kennen is daar in de nacht met een lamp geweest.",
    "pl": "Dom stoi na końcu ulicy i nikt, kogo znamy, nie był w nim w nocy z lampą, bo jest to daleko od miasta.",
    "pt": "A casa fica no fim da rua, e ninguém que conhecemos foi até lá de noite com uma lâmpada para ver o jardim da família.",
}


def paragraphs(count: int) -> list[str]:
    """German texts of one line each, over 1,000 characters."""
    draw = random.Random(0)
    return [" ".join(draw.sample(SENTENCES, 18)) for _ in range(count)]


def cleaned(config: CleaningConfig, texts: list[str]) -> Cleaner:
    cleaner = Cleaner(config)
    documents = (Document(str(number), text.encode()) for number, text in enumerate(texts))
    assert len(list(cleaner.clean(documents))) == cleaner.report.documents_out
    return cleaner


@pytest.mark.parametrize("recipe", ["10_finetuning/language.yaml", "12_grpo/pretrained_language.yaml"])
def test_a_recipe_for_german_keeps_german_paragraphs(recipe):
    given = read_settings(CHECKOUT / "chapters" / recipe)["data"]["prepare"]["cleaning"]
    texts = paragraphs(40)
    assert min(map(len, texts)) > 1000 and len(set(texts)) == 40
    assert cleaned(configured(CleaningConfig, given), texts).report.documents_out == 40
    assert cleaned(CleaningConfig(), texts).report.documents_out == 0, "the rules for code drop them"


@pytest.mark.parametrize("recipe", ["10_finetuning/domain.yaml", "12_grpo/pretrained_domain.yaml"])
def test_a_recipe_for_a_domain_keeps_paragraphs_of_english(recipe):
    given = read_settings(CHECKOUT / "chapters" / recipe)["data"]["prepare"]["cleaning"]
    assert cleaned(configured(CleaningConfig, given), [" ".join([TEXTS["en"]] * 12)]).report.documents_out == 1


@pytest.mark.parametrize("code", sorted(STOP_WORDS))
def test_prose_has_stop_words_of_its_own_language(code):
    language = Language((code,), min_probability=0.5)
    assert language.decide(language.measure(TEXTS[code]).value).reason is None, "py3langid knows the text as one of that language"
    lacks = "fewer than two stop words"
    reasons = {
        wanted: (stage := ProseQuality(wanted, fewest_words=5)).decide(stage.measure(TEXTS[code]).value).reason
        for wanted in ((code,), ("en", code), (), ("en",), ("pl",))
    }
    assert [reasons[wanted] for wanted in ((code,), ("en", code), ())] == [None] * 3
    assert all(reasons[(other,)] == lacks for other in ("en", "pl") if other != code)


def test_the_share_that_each_rule_dropped_is_said_with_what_to_set():
    english = [" ".join([TEXTS["en"]] * 12), "short"]
    report = cleaned(CleaningConfig(text="prose"), paragraphs(6) + english).report
    assert report.in_words() == (
        "Cleaning dropped 7 of 8 documents (87.5%): 75.0% fewer than two stop words (quality); 12.5% shorter than 64 bytes (length). "
        "For prose in other languages, give theirs in prepare.cleaning.stop_words, or [] for any. "
    )
    assert "set prepare.cleaning.text to prose" in cleaned(CleaningConfig(), paragraphs(6)).report.in_words()
    few = cleaned(CleaningConfig(text="prose"), [f"{TEXTS['en']} " * 12 + f"number {n}" * n for n in range(3)] + ["short"]).report
    assert few.in_words().startswith("Cleaning dropped") and few.advice() == "", "nothing to set where no rule is for other text"
    assert cleaned(CleaningConfig(text="prose"), english[:1]).report.in_words() == ""


def test_a_run_says_the_shares_on_its_first_screen(tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*paragraphs(4), "short", TEXTS["en"]]))
    cleaning = CleaningConfig(text="prose", stop_words=("de",))
    text = prepare(PrepareConfig(sources=(Source(str(source)),), cleaning=cleaning, held_out_share=0.5), tmp_path / "out")
    _, remarks = Pretraining.announcement(SimpleNamespace(text=text), TrainerConfig())
    assert remarks.startswith("Cleaning dropped 2 of 6 documents (33.3%): 16.7% shorter than 64 bytes (length); 16.7% fewer than 50 words")
    assert remarks.endswith(f"Examples: {text.folder / 'report.json'}\n")


def test_where_nothing_is_left_the_sentence_says_what_to_set(tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs(4)))
    with pytest.raises(CourseError, match="4 a line over 1000 characters.*for prose, set prepare.cleaning.text to prose. Give other text"):
        prepare(PrepareConfig(sources=(Source(str(source)),)), tmp_path / "out", Console(quiet=True))


def test_stop_words_are_refused_by_name_and_english_ones_change_no_folder():
    with pytest.raises(ValueError, match="There are no stop words of 'xx': give some of en, de, .*or \\[\\] for any language"):
        CleaningConfig(text="prose", stop_words=("xx",))
    with pytest.raises(ValueError, match="stop_words are for prose, and text is code"):
        CleaningConfig(stop_words=("de",))
    names = [fingerprint(PrepareConfig(cleaning=CleaningConfig(text="prose", stop_words=words)), str) for words in (("en",), ("de",), ())]
    assert len(set(names)) == 3
