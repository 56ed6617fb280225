"""Conversations that are none, and chat templates that fail or attack, through the trainer's settings and the library."""

import json
from pathlib import Path

from hostile import Row, call, trainer

TALK = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is four."}]}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def prepare() -> None:
    """Prepares the row's conversations, with its template if it has one."""
    from shared.data.tokenizer import TextTokenizer
    from shared.finetune.chat.prepare import ChatConfig, ChatSource, prepare_chats

    TextTokenizer.train(["What is it? It is four."], 500).save_pretrained(Path("model"), 64)
    [source] = Path().glob("a.*")
    template = "odd.jinja" if Path("odd.jinja").exists() else "chatml"
    prepare_chats(ChatConfig((ChatSource(str(source)),), template, Path("model")), Path("out"), 64)


def chats(name: str, content: object, says: str | tuple[str, ...], file: str = "a.jsonl") -> Row:
    """Conversations of this content: the bytes of a file, or one record."""
    written = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Row(name, call(prepare), says, code=1, make=lambda folder: (folder / file).write_bytes(written) and None)


def template(name: str, source: str, says: str | tuple[str, ...]) -> Row:
    """A conversation with this template."""

    def make(folder: Path) -> None:
        (folder / "a.jsonl").write_text(json.dumps(TALK))
        (folder / "odd.jinja").write_text(source)

    return Row(name, call(prepare), says, code=1, make=make)


ROWS = [
    Row("no conversation held out", trainer("chats.held_out_share=0"), "held_out_share is 0"),
    Row("a limit of no conversations", trainer("chats.sources=[{path: a.jsonl, limit: 0}]"), "limit is 0"),
    Row("an unknown kind of conversations", trainer("chats.sources=[{path: a.jsonl, kind: xml}]"), "kind is 'xml'"),
    chats("conversations without the columns", {"text": "x", "label": 3}, ("a.jsonl:1", "'text', 'label'", "messages")),
    chats("a role that nobody has", {"messages": [{"role": "boss", "content": "x"}]}, ("a.jsonl:1, message 1", "'boss'")),
    chats("half a character", {"prompt": "\ud800", "completion": "x"}, "a.jsonl:1"),
    chats("conversations cut short", b'{"messages": [{"role": "us', "a.jsonl:1 is not JSON"),
    chats("conversations in damaged Parquet", b"PAR1PAR1", "is not a whole Parquet file", file="a.parquet"),
    template("a template that is no jinja", "{% if %}", "odd.jinja"),
    template("a template that raises", "{{ raise_exception('Not so.') }}", ("a.jsonl:1", "odd.jinja", "Not so.")),
    template("a template that looks for the interpreter", "{{ ''.__class__.__mro__ }}", ("a.jsonl:1", "unsafe")),
    template("a template without end", LOOP, ("odd.jinja was stopped", "2 seconds")),
    template("a template of a huge text", "{{ 'a' * 10**10 }}", ("odd.jinja", "MiB")),
    template("a template that ends no answer", "{% for m in messages %}{{ m.content }}{% endfor %}", ("odd.jinja", "cannot be proved")),
]
