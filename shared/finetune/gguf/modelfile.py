"""Chapter 10. Ollama's Modelfile for a GGUF file: the chat template in Go's syntax, the text that ends an answer, the system prompt.

    ollama create NAME -f FILE.Modelfile

A template is recognised by what it renders. If it is not ChatML, the Modelfile has none: a guess would change what the model reads.
"""

from pathlib import Path

from shared.finetune.chat.template import ChatTemplate, TemplateError, has_template
from shared.output_files import write_atomically

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
CHATML = f'''TEMPLATE """{{{{- range .Messages }}}}{OPEN}{{{{ .Role }}}}
{{{{ .Content }}}}{CLOSE}
{{{{ end }}}}{OPEN}assistant
"""
PARAMETER stop {CLOSE}
'''
CHAT = [("system", "Be brief."), ("user", "Two and two?"), ("assistant", "4"), ("user", "And three?")]


def write_modelfile(folder: Path, file: Path) -> tuple[Path, str]:
    """Write the Modelfile beside a GGUF file.

    Args:
        folder: the model's, with its chat template.
        file: in GGUF.

    Returns:
        The Modelfile, and what it says of the template in a sentence.
    """
    path, lines = file.with_suffix(".Modelfile"), [f"FROM ./{file.name}\n"]
    if not has_template(folder):
        lines.append("TEMPLATE {{ .Prompt }}\n")
        said = "it continues a text, as the model has no chat template"
    elif (system := chatml_system(ChatTemplate.load(folder))) is None:
        lines.append("# The chat template is not ChatML, and is not written here: give TEMPLATE and PARAMETER stop in Ollama's syntax.\n")
        said = "without the chat template, which is not ChatML: give it in Ollama's syntax"
    else:
        lines += [CHATML, *([f'SYSTEM """{system}"""\n'] if system else [])]
        said = "with the chat template ChatML" + (" and the model's own system prompt" if system else "")
    write_atomically(path, "".join(lines).encode())
    return path, said


def chatml_system(template: ChatTemplate) -> str | None:
    """The system prompt that a ChatML template adds by itself, or an empty text; None where it is another template."""
    messages = [{"role": role, "content": content} for role, content in CHAT]
    try:
        whole, alone = (template.render(each, generation_prompt=True) for each in (messages, messages[1:]))
    except TemplateError:  # some refuse system prompts
        return None
    if whole != chatml(CHAT):
        return None
    begins, ends = f"{OPEN}system\n", f"{CLOSE}\n{chatml(CHAT[1:])}"
    if alone == chatml(CHAT[1:]):
        return ""
    return alone[len(begins) : -len(ends)] if alone.startswith(begins) and alone.endswith(ends) and '"""' not in alone else None


def chatml(messages: list[tuple[str, str]]) -> str:
    """Messages in ChatML, up to where the assistant's answer begins."""
    return "".join(f"{OPEN}{role}\n{content}{CLOSE}\n" for role, content in messages) + f"{OPEN}assistant\n"
