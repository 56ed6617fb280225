"""Chapter 10. Chat templates (jinja2, `apply_chat_template`): messages with roles rendered as the text that a model reads.

A template is Hugging Face's: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`. ChatML is the default. Texts equal
those of transformers. A template that fails or never ends is rejected with an error (`shared.finetune.chat.renderer`).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.course.errors import CourseError
from shared.data.tokenizer import CONTROL
from shared.finetune.chat.messages import Message
from shared.model.hf.files import PretrainedError, read_json
from shared.output_files import write_atomically

FILE = "chat_template.jinja"
TOOL_USE = "tool_use"  # the name of a model's template for conversations with tools, where it has two
OTHERS = "additional_chat_templates"  # a folder of templates by name, as transformers 5 writes them
RENDERER = Path(__file__).with_name("renderer.py")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
WORD = "Quorvane"  # stands for a content: no template writes it
OTHER = {"type": "function", "function": {"name": WORD, "arguments": {}}}
PRIVATE = range(0xF0000, 0xFFFFE)  # characters that Unicode leaves to private use

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') }}
{{- 'These functions may be called:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nA call is JSON with name and arguments, between <tool_call> and </tool_call>.<|im_end|>\\n' }}
{%- if messages[0].role == 'system' %}{%- set messages = messages[1:] %}{%- endif %}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class TemplateError(CourseError):
    """A chat template that cannot be used, or messages that it cannot render: which, why, and what to do."""


@dataclass(frozen=True)
class Rendered:
    """A text, and from which character to which the template says that the model writes it."""

    text: str
    generated: list[tuple[int, int]]


class ChatTemplate:
    """A chat template.

    Args:
        source: in jinja2.
        name: what messages call it: a file, or "chatml".
        variables: what templates may name beside messages, such as `bos_token`.
        tool_use: the source of another template, for conversations with tools.

    Attributes:
        says_generated: whether it marks what the model writes, with `{% generation %}`.
        special_names: of the special tokens that it spells, such as <|im_end|>.
        tool_use: the template for conversations with tools, None where it is this one.
    """

    def __init__(self, source: str, name: str, variables: Mapping[str, str] | None = None, tool_use: str | None = None):
        self.source, self.name, self.variables = source, name, dict(variables or {})
        self.says_generated = GENERATION.search(source) is not None
        self.special_names = list(dict.fromkeys(CONTROL.findall(source + (tool_use or ""))))
        self.tool_use = ChatTemplate(tool_use, f"{name} ({TOOL_USE})") if tool_use is not None else None
        if self.tool_use:
            self.tool_use.variables = self.variables
        self.shows: dict[str, bool] = {}  # whether it shows tools, and calls of them, as far as that is known
        self.takes_parts: bool | None = None  # not known yet
        self.process: subprocess.Popen | None = None
        self.owner = 0  # the process that started it: one forked from that leaves it alone

    @classmethod
    def load(cls, path: Path | str, beside: Path | None = None) -> "ChatTemplate":
        """The template of a model's folder, of a `tokenizer_config.json`, or of a file of its own. "chatml" is the default one.

        Args:
            beside: the folder whose `tokenizer_config.json` names the special tokens, where `path` lies elsewhere.
        """
        path = Path(path).expanduser()
        folder = path if path.is_dir() else path.parent
        if str(path) != "chatml" and not path.exists():
            raise TemplateError(f"There is no chat template at {path.absolute()}: correct the path, or give chatml.")
        try:
            config = (beside or folder) / "tokenizer_config.json"
            said = read_json(config) if config.exists() else {}
            variables = {name: text for name, token in said.items() if name.endswith("_token") and isinstance(text := spelt(token), str)}
            if str(path) == "chatml":
                return cls(CHATML, "chatml", variables)
            file = folder / FILE if path.is_dir() or path.name == "tokenizer_config.json" else path
            if file.exists():
                other = folder / OTHERS / f"{TOOL_USE}.jinja"
                of_tools = other.read_text(encoding="utf-8") if file.name == FILE and other.exists() else None
                return cls(file.read_text(encoding="utf-8"), str(file), variables, of_tools)
            own = read_json(folder / config.name) if (folder / config.name).exists() and path in (folder, folder / config.name) else {}
        except (PretrainedError, OSError, ValueError) as error:
            raise TemplateError(f"The chat template of {path} cannot be read ({error}): copy it again.") from None
        source, of_tools = chosen(own.get("chat_template"), path)
        return cls(source, str(folder / config.name), variables, of_tools)

    def save(self, folder: Path) -> None:
        """Write `chat_template.jinja` where transformers looks for it, which is beside the tokenizer."""
        write_atomically(Path(folder) / FILE, self.source.encode())
        if self.tool_use:
            (Path(folder) / OTHERS).mkdir(exist_ok=True)
            write_atomically(Path(folder) / OTHERS / f"{TOOL_USE}.jinja", self.tool_use.source.encode())

    def for_tools(self, tools: Any) -> "ChatTemplate":
        """The template that transformers takes for a conversation with these tools, None or empty for none."""
        return self.tool_use if tools and self.tool_use else self

    def require_shown(self, call: dict[str, Any]) -> None:
        """Refuse a template whose text is the same without the tools of this call, or with other calls of tools. Each is asked once.

        Raises:
            TemplateError: a model would learn calls of functions that its prompt does not name, or lose its calls.
        """
        if call["tools"]:
            self.require("tools", call, call | {"tools": None})
        if any(message.get("tool_calls") for message in call["messages"]):
            changed = [message | ({"tool_calls": [OTHER]} if message.get("tool_calls") else {}) for message in call["messages"]]
            self.require("calls of tools", call, call | {"messages": changed})

    def require(self, name: str, call: dict[str, Any], other: dict[str, Any]) -> None:
        if name not in self.shows:
            try:
                text = self.render_all([call])[0]
            except TemplateError:
                return  # rendering it raises the same
            try:
                self.shows[name] = text != self.render_all([other])[0]
            except TemplateError:  # it reads them, and cannot do without
                self.shows[name] = True
        if not self.shows[name]:
            raise TemplateError(
                f"The chat template {self.name} shows no {name}, and the record has some: give one that does, such as chatml, or leave "
                f"the {name} out of the records."
            )

    def render(self, messages: Sequence[Message], generation_prompt: bool = False, tools: Any = None) -> str:
        """The text of messages; with a generation prompt, up to where the assistant's answer begins."""
        return self.for_tools(tools).render_all([call_of(messages, generation_prompt, tools)])[0].text

    def render_all(self, calls: Sequence[dict[str, Any]]) -> list[Rendered]:
        """Several texts in one request, each as `call_of` describes it.

        Raises:
            TemplateError: the first that the template does not render.
        """
        if self.takes_parts is None:
            self.takes_parts = self.shows_parts_alone()
        if self.takes_parts:
            calls = [call | {"messages": [in_parts(message) for message in call["messages"]]} for call in calls]
        opened, closed = unused_characters(calls, 2)
        answer = self.ask({"calls": [self.variables | call for call in calls], "marks": [opened, closed]})
        if any("error" in each for each in answer) and (changed := [call | {"messages": with_text(call)} for call in calls]) != calls:
            second = self.ask({"calls": [self.variables | call for call in changed], "marks": [opened, closed]})
            answer = answer if any("error" in each for each in second) else second
        if reason := next((each["error"] for each in answer if "error" in each), None):
            raise TemplateError(f"The chat template {self.name} refuses these messages: {reason.strip().rstrip('.')}.")
        return [without_marks(each["text"], opened, closed) for each in answer]

    def shows_parts_alone(self) -> bool:
        """Whether a content stands in its text only as a list of parts, as templates of vision models have it."""
        asked = {"role": "user", "content": WORD}
        calls = [self.variables | call_of([message]) for message in (asked, in_parts(asked))]
        return [WORD in each.get("text", "") for each in self.ask({"calls": calls, "marks": unused_characters(calls, 2)})] == [False, True]

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request to the rendering process, which is started with the first one."""
        if self.process is None or self.owner != os.getpid():
            self.owner = os.getpid()
            command = [sys.executable, "-I", str(RENDERER)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if reason := self.ask({"template": self.source})[0].get("error"):
                self.close()
                raise TemplateError(f"The chat template {self.name} is not one that jinja2's sandbox takes: {reason.rstrip('.')}.")
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer.endswith("\n"):
            from shared.finetune.chat.renderer import MEMORY, SECONDS  # imports jinja2, which only that process needs otherwise

            self.close()
            raise TemplateError(
                f"The chat template {self.name} was stopped: it computes for more than {SECONDS:g} seconds or takes more than "
                f"{MEMORY // 2**20} MiB. Give another template."
            )
        return json.loads(answer)

    def close(self) -> None:
        """End the rendering process; the next request starts a new one."""
        if self.process is not None:
            process, self.process = self.process, None
            if self.owner == os.getpid():
                process.kill()
                process.communicate()

    __del__ = close


def call_of(messages: Sequence[Message], generation_prompt: bool = False, tools: Any = None) -> dict[str, Any]:
    """The variables that a template sees. Keys whose value is None are left out, as in transformers."""
    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return {"messages": plain, "tools": tools, "documents": None, "add_generation_prompt": generation_prompt}


def in_parts(message: Message) -> Message:
    """A message with its content as a list of one part."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_text(call: dict[str, Any]) -> list[Message]:
    """The messages of a call with arguments of tools as JSON text, which templates of DeepSeek's kind join to their own."""
    changed = []
    for message in call["messages"]:
        calls = [dict(each) for each in message.get("tool_calls") or []]
        for each in calls:
            function = each.get("function", each)
            text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
            each |= {"function": function | {"arguments": text}} if "function" in each else {"arguments": text}
        changed.append(message | ({"tool_calls": calls} if calls else {}))
    return changed


def spelt(token: Any) -> Any:
    """A token's name, which a configuration gives alone or among its properties."""
    return token.get("content") if isinstance(token, dict) else token


def has_template(folder: Path) -> bool:
    """Whether a model's folder has a chat template."""
    config = folder / "tokenizer_config.json"
    return (folder / FILE).is_file() or (config.is_file() and bool(read_json(config).get("chat_template")))


def chosen(given: Any, path: Path) -> tuple[str, str | None]:
    """The templates of a configuration: the only one, or of several with names the one called default; and the one for tools."""
    of_tools = None
    if isinstance(given, list) and all(isinstance(each, dict) for each in given):
        given = {each.get("name"): each.get("template") for each in given}
    if isinstance(given, dict):
        if "default" not in given:
            raise TemplateError(f"{path} has no chat template called default, only {', '.join(map(str, given))}: give one as a file.")
        given, of_tools = given["default"], given.get(TOOL_USE)
    if not isinstance(given, str) or not isinstance(of_tools, str | None):
        raise TemplateError(f"{path} has no chat template: give a file that holds one ({FILE}), or chatml.")
    return given, of_tools


def unused_characters(values: Any, count: int) -> list[str]:
    """Characters that occur in none of the values."""
    there = set(json.dumps(values, ensure_ascii=False))
    return [character for number in PRIVATE[: count + len(there)] if (character := chr(number)) not in there][:count]


def without_marks(text: str, opened: str, closed: str) -> Rendered:
    """Remove the marks, and return their positions."""
    pieces = re.split(f"([{opened}{closed}])", text)
    plain, place, generated, start = [], 0, [], 0
    for piece in pieces:
        if piece == opened:
            start = place
        elif piece == closed:
            generated.append((start, place))
        else:
            plain.append(piece)
            place += len(piece)
    return Rendered("".join(plain), generated)
