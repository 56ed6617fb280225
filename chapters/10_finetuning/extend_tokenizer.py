"""Extend a tokenizer by merges trained on text of a new language or domain, and write it into a folder of its own.

python chapters/10_finetuning/extend_tokenizer.py --tokenizer runs/laptop/model --text my_texts --new_tokens 4000 --output runs/extended
make run CONFIG=chapters/10_finetuning/language.yaml               then continues the training of the model with it
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.course.launch import launch


@dataclass
class ExtensionConfig:
    """Append merges to a byte-level BPE tokenizer.

    Args:
        tokenizer: a tokenizer.json, the folder of a model that holds one, a GGUF file, or smollm2.
        text: a file, a folder, or the name of a dataset on the Hugging Face hub.
        text_field: the field, or column, that holds the text of a record.
        limit: at most this many documents are read; null for all.
        new_tokens: how many tokens are added; the old ones keep their ids.
        output: the folder that gets tokenizer.json and tokenizer_config.json.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
    """

    tokenizer: Path = Path("runs/laptop/model")
    text: str = "embedded"
    text_field: str = "text"
    limit: int | None = None
    new_tokens: int = 1000
    output: Path = Path("runs/extended_tokenizer")
    impl: Literal["reference", "mine", "mixed"] = "reference"


def run(config: ExtensionConfig) -> None:
    from rich.console import Console

    from shared.course.errors import CourseError
    from shared.data.source import Source
    from shared.data.sources import open_source
    from shared.data.tokenizer import TextTokenizer
    from shared.finetune.chat.prepare import folder_of
    from shared.finetune.chat.template import ChatTemplate, has_template
    from shared.finetune.gguf.packaged import is_gguf
    from shared.finetune.gguf.unpack import unpacked
    from shared.finetune.vocabulary import extend_tokenizer
    from shared.model.hf.files import PretrainedError
    from shared.output_files import require_writable

    console = Console(markup=False, emoji=False, highlight=False)
    require_writable(config.output)
    try:
        given = unpacked(config.tokenizer) if is_gguf(config.tokenizer) else config.tokenizer
    except PretrainedError as error:
        raise CourseError(f"tokenizer: {error}") from None
    old = TextTokenizer.load(given)
    source = Source(path=config.text, text_field=config.text_field, limit=config.limit)
    unreadable: list[str] = []
    with console.status("Reading the text ..."):
        documents = open_source(source, lambda name, reason: unreadable.append(f"{name} ({reason})"))
        texts = [document.content.decode("utf-8", errors="replace") for document in documents]
    if unreadable:
        console.print(f"Left out, for there was no text in it: {len(unreadable):,}, such as {unreadable[0]}.")
    with console.status("Training merges ..."):
        extended = extend_tokenizer(old, texts, config.new_tokens).tokenizer
    characters = max(1, sum(map(len, texts[:100])))
    before, after = (sum(len(tokenizer.encode(text)) for text in texts[:100]) for tokenizer in (old, extended))
    extended.save_pretrained(config.output, 10**6)
    if has_template(folder_of(given)):
        ChatTemplate.load(folder_of(given)).save(config.output)
    console.print(f"{extended.vocab_size - old.vocab_size:,} tokens added to {old.vocab_size:,}, in {config.output}.")
    console.print(f"Characters in a token of this text: {characters / max(1, before):.2f} before, {characters / max(1, after):.2f} now.")


if __name__ == "__main__":
    launch(run, ExtensionConfig, Path(__file__).with_name("extend_tokenizer.yaml"))
