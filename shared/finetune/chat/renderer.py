"""Chapter 10. Sandboxed jinja2 rendering of chat templates, as a process of its own with limits on time and memory.

A template comes with a model, so from a stranger. jinja2's sandbox refuses the attributes that lead from a text to the interpreter. It
does not bound what a template computes, by nested loops for instance, or by a list that holds the same list many times. So rendering
happens in a process that the kernel ends after `SECONDS` of computing, that gets `MEMORY` bytes, and that can open no file and start no
process.

    stdin:  a JSON line with the template; then one for each example: what to render, and two characters that mark generated text
    stdout: a JSON line for each of these: for each text the text, or why there is none

Templates find the same helpers as in transformers (`utils/chat_template_utils.py`), for which they are written.
"""

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2.debug  # imported by jinja2 at the first error otherwise, when no file can be opened any more
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 2.0  # of computing, for each example
MEMORY = 2**30  # bytes
LONGEST = 2**24  # characters of a text


class Generation(Extension):
    """`{% generation %}`: the text in it is what the model writes. It comes out between two marks, which the caller takes out again."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        opened, closed = self.environment.marks
        return f"{opened}{caller()}{closed}"


class PlainNamespace(Namespace):
    """`namespace()` without names that begin with an underscore, behind which the interpreter lies."""

    def __init__(*arguments: Any, **values: Any):
        self, *rest = arguments
        values = dict(*rest, **values)
        for name in values:
            refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_private(name)
        super().__setitem__(name, value)


def refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace has no name {name!r}")


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON without HTML's escapes, which jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControls])
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    made.globals |= {"namespace": PlainNamespace, "dict": lambda *values, **named: dict(*values, **named)}
    return made


def attempt(make: Any) -> dict[str, Any]:
    """The text that a template renders, or an error message: its expressions may raise anything."""
    try:
        made = make()
    except TemplateError as error:
        return {"error": str(error.message or type(error).__name__)}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY // 2**20} MiB"}
    except Exception as error:  # a template's expressions raise what Python's do
        return {"error": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__}
    return {"text": made} if len(made) <= LONGEST else {"error": f"it writes more than {LONGEST:,} characters"}


def limit(**limits: int) -> None:
    """Set resource limits of this process, as far as the system has them."""
    import resource

    for name, most in limits.items():
        with suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (most, most))


def main() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks; when that one ends, so does the input here
    limit(RLIMIT_AS=MEMORY, RLIMIT_CORE=0)
    datetime.now().astimezone()  # reads the time zone's file, which later cannot be opened
    made, template = environment(), None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # the signal ends this process, also within an operation of C
        request = json.loads(line)
        if template is None:

            def compiled() -> str:
                nonlocal template
                template = made.from_string(request["template"])  # noqa: B023
                return ""

            answer = [attempt(compiled)]
            limit(RLIMIT_NOFILE=0, RLIMIT_NPROC=0, RLIMIT_FSIZE=0)  # compiling imports modules
        else:
            made.marks = request["marks"]
            answer = [attempt(lambda: template.render(**call)) for call in request["calls"]]  # noqa: B023
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
