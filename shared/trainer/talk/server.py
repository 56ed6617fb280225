"""Chapter 12. HTTP server of the chat page: streaming answers of one model to browsers on this machine (`course chat RUN --web`).

    GET /         the page, with page.js and page.css beside it
    GET /model    what is talked to, and the settings to begin with
    POST /answer  {messages, settings, system} -> a line of JSON for each token, then one with "done", or with "error"

The page keeps the conversation and sends it whole, so the server remembers nothing, and several pages do not mix. Answers are drawn one at
a time; a page that closes its connection ends its answer.

Who may ask: the server listens on 127.0.0.1. A web site that the user visits could still send requests there, or give its own name this
address (DNS rebinding), and other users of the machine could. So each request must name this machine as its Host, a POST must come from
the page's own Origin, and both paths of the model need the key that only the printed address has, behind its #: browsers send that
nowhere.
What a model writes is text in the page, never HTML, and the Content-Security-Policy allows no script but the page's own.
"""

import io
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from shared.course import terminal
from shared.course.bounds import Length, checked
from shared.course.errors import CourseError, SettingError
from shared.course.typed import configured
from shared.model.counting import count_parameters
from shared.output_files import system_reason
from shared.trainer.talk.chat import AnswerSettings, Talk

ADDRESS = "127.0.0.1"
KEY = "X-Key"
MOST_BYTES, MOST_TURNS = 2**20, 1_001  # of a request
PATIENCE = 30.0  # seconds: for the answer before this one, for a whole request, and for a browser that does not read
FILES = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript"), "/page.css": ("page.css", "text/css")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
@checked
class Said:
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True)
@checked
class Question:
    """What the page asks: the conversation so far, which ends with the user's message.

    Raises:
        ValueError: the messages do not take turns.
    """

    messages: Annotated[tuple[Said, ...], Length(MOST_TURNS)]
    settings: AnswerSettings = AnswerSettings()
    system: str | None = None

    def __post_init__(self) -> None:
        roles = [each.role for each in self.messages]
        if not roles or roles != [("user", "assistant")[place % 2] for place in range(len(roles))] or roles[-1] != "user":
            raise ValueError("messages must begin and end with one of the user, and take turns.")


class ChatServer(ThreadingHTTPServer):
    """Serves the page of one model. port: 0 for any free one. key: what requests must bring."""

    daemon_threads = True  # an answer that is being drawn does not keep the process

    def __init__(self, talk: Talk, name: str, port: int = 0):
        super().__init__((ADDRESS, port), Handler)
        self.talk, self.name = talk, name
        self.key = secrets.token_urlsafe(24)
        self.drawing = threading.Lock()
        self.hosts = {f"{host}:{self.server_port}" for host in (ADDRESS, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone: the terminal keeps the page's address in sight."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/#{self.key}"

    def model(self) -> dict[str, Any]:
        """What the page shows before the first answer."""
        talk = self.talk
        return {
            "name": self.name, "parameters": sum(count_parameters(talk.model).values()), "context": talk.context,
            "template": talk.template is not None, "system": talk.system or "", "settings": asdict(talk.settings),
        }  # fmt: skip

    def answer(self, question: Question, gone: Callable[[], bool] = lambda: False) -> Iterator[dict[str, Any]]:
        """The lines of an answer. One at a time: others wait for a while. gone: whether the page that asked has left meanwhile."""
        if not self.drawing.acquire(timeout=PATIENCE):
            yield {"error": "The model is answering another page: stop that answer, or wait, and send this again."}
            return
        try:
            if gone():
                return
            *before, asked = (asdict(each) for each in question.messages)
            system = question.system if self.talk.template else None
            talk = replace(self.talk, settings=question.settings, system=system, messages=before, dropped=0)
            began = time.perf_counter()
            for piece in talk.answer(asked["content"]):
                yield {"text": piece}
            yield {
                "done": True, "tokens": talk.tokens, "seconds": time.perf_counter() - began,
                "dropped": talk.dropped, "cut_off": talk.cut_off,
            }  # fmt: skip
        except CourseError as error:
            yield {"error": str(error)}
        finally:
            self.drawing.release()


class Incoming(io.RawIOBase):
    """Reads a request within so many seconds in all: a byte now and then does not hold a thread."""

    def __init__(self, connection: socket.socket, seconds: float):
        self.connection, self.end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.connection.settimeout(max(1e-3, self.end - time.monotonic()))
        return self.connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """One request. HTTP/1.0: an answer ends where its connection does."""

    server: ChatServer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(Incoming(self.connection, PATIENCE))

    def do_GET(self) -> None:
        if self.refuses_host():
            return
        if self.path == "/model":
            if not self.refuses_key():
                self.reply(HTTPStatus.OK, json.dumps(self.server.model()).encode(), "application/json")
        elif self.path in FILES:
            name, kind = FILES[self.path]
            self.reply(HTTPStatus.OK, Path(__file__).with_name(name).read_bytes(), kind)
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_POST(self) -> None:
        if self.refuses_host() or self.refuses_origin() or self.refuses_key():
            return
        if self.path != "/answer":
            return self.refuse(HTTPStatus.NOT_FOUND, "There is no such page.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return self.refuse(HTTPStatus.LENGTH_REQUIRED, "The request does not say how long it is.")
        if int(length) > MOST_BYTES:
            return self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The conversation is too long: reset it, or write a shorter message.")
        try:
            question = configured(Question, json.loads(self.rfile.read(int(length))))
        except SettingError as error:
            return self.refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ValueError, RecursionError):
            return self.refuse(HTTPStatus.BAD_REQUEST, "The request is not JSON.")
        self.stream(self.server.answer(question, self.gone))

    def gone(self) -> bool:
        """Whether the browser has closed its connection."""
        self.connection.setblocking(False)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        finally:
            self.connection.settimeout(PATIENCE)

    def stream(self, lines: Iterator[dict[str, Any]]) -> None:
        """Send lines as they come. A browser that has gone, or no longer reads, ends them."""
        try:
            self.start(HTTPStatus.OK, "application/x-ndjson")
            for line in lines:
                self.wfile.write(json.dumps(line).encode() + b"\n")
        except OSError:
            self.close_connection = True
        finally:
            lines.close()

    def refuses_host(self) -> bool:
        if self.headers.get("Host", "").lower() in self.server.hosts:
            return False
        self.refuse(HTTPStatus.FORBIDDEN, "This server answers to its own address alone: open the one that the terminal printed.")
        return True

    def refuses_origin(self) -> bool:
        if self.headers.get("Origin", "").lower().removeprefix("http://") in self.server.hosts:
            return False
        self.refuse(HTTPStatus.FORBIDDEN, "This request comes from another page.")
        return True

    def refuses_key(self) -> bool:
        if secrets.compare_digest(self.headers.get(KEY, "").encode(), self.server.key.encode()):
            return False
        self.refuse(HTTPStatus.FORBIDDEN, "This page's address lacks its key: open the whole address that the terminal printed.")
        return True

    def refuse(self, status: HTTPStatus, sentence: str) -> None:
        self.reply(status, json.dumps({"error": sentence}).encode(), "application/json")

    def reply(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.start(status, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def start(self, status: HTTPStatus, kind: str, more: dict[str, str] | None = None) -> None:
        self.connection.settimeout(PATIENCE)  # for what is written
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "course"

    def log_message(self, *_: Any) -> None:
        """Log nothing: what a user writes is private."""


def serve(console: Console, talk: Talk, name: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    try:
        server = ChatServer(talk, name, port)
    except OSError as error:
        raise CourseError(f"Port {port} cannot be used ({system_reason(error)}): give another one with --port, or --port 0.") from None
    with server:
        console.print(server.url, soft_wrap=True)
        port = server.server_port
        terminal.say(console, "Open this address in a browser on this machine; its end is a key, so keep it to yourself. Ctrl-C ends it.")
        terminal.say(console, f"From another machine: ssh -L {port}:{ADDRESS}:{port} HOST, then the same address there.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
