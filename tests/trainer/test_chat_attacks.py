"""The chat server against requests that ask for too much, and clients that leave, reset or drip: bounds in processor seconds and memory."""

import io
import json
import resource
import socket
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from talking_models import save_model
from test_chat_web import ASK, SETTINGS, lines, request, serving

from shared.course.errors import CourseError
from shared.finetune.chat.encoding import ChatEncoder
from shared.trainer.talk import server as web
from shared.trainer.talk.chat import Talk, open_talk

MEGABYTE = 2**20
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    return open_talk(save_model(tmp_path_factory.mktemp("chat"), template="chatml"), SETTINGS, None)


@pytest.fixture
def server(talk, monkeypatch):
    ended = threading.Semaphore(0)
    shut = web.ChatServer.shutdown_request
    monkeypatch.setattr(web.ChatServer, "shutdown_request", lambda self, connection: [shut(self, connection), ended.release()])
    with serving(talk) as server:
        server.ended = ended  # once for each connection
        yield server


@contextmanager
def within(seconds: float, megabytes: float = 64):
    """Processor time of this process, the server's threads among it, and growth of its peak memory."""
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < megabytes * 1024


def turns(count: int, size: int) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": "a word " * (size // 7)} for number in range(count)]


def test_of_a_long_conversation_only_what_fits_is_tokenized(server, talk):
    said = [*turns(web.MOST_TURNS - 1, 900), {"role": "user", "content": "Again"}]
    with within(seconds=3):  # of all of it, again for each pair that is left out: minutes
        *_, last = lines(request(server, body={"messages": said})[2])
    assert last["dropped"] == web.MOST_TURNS // 2
    assert lines(request(server)[2])[-1]["done"]


def naive_fitting(talk: Talk, turn: dict[str, str]) -> tuple[list[int], int]:
    """Leave out pairs one by one until the rest fits."""
    room, messages, dropped = talk.context - talk.settings.new_tokens, list(talk.messages), 0
    while len(ids := talk.prompt([*messages, turn])) > room and messages:
        messages, dropped = messages[2:], dropped + 1
    return ids, dropped


@pytest.mark.parametrize("size", [7, 21, 56])
def test_as_many_turns_are_left_out_as_where_one_is_left_out_at_a_time(talk, size, monkeypatch):
    for pairs in (*range(8), 40):
        mine = replace(talk, messages=turns(2 * pairs, size), dropped=0)
        turn, read = {"role": "user", "content": "Again"}, []
        ids, dropped = naive_fitting(mine, turn)
        with monkeypatch.context() as patch:
            prompt = ChatEncoder.prompt
            patch.setattr(ChatEncoder, "prompt", lambda *given: read.append(sum(len(m["content"]) for m in given[2])) or prompt(*given))
            assert mine.fitting(turn) == ids and (mine.dropped, len(mine.messages)) == (dropped, 2 * (pairs - dropped))
        assert len(read) <= 8 and max(read) <= 4 * talk.context * 10


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": turns(20_001, 7)}, "messages has 20,001 entries: give at most 1,001."),
        (ASK | {"settings": {"stop": ["a"] * 65}}, "settings.stop has 65 entries: give at most 64."),
        (ASK | {"settings": {"stop": ["ok", "a" * 1001]}}, "stop has a string of 1,001 characters: give at most 1,000."),
        ({"messages": [{"role": "user", "content": "half \ud800"}]}, "messages[0].content is 'half \\ud800', which is not UTF-8"),
        (ASK | {"system": "\udcff"}, "system is '\\udcff', which is not UTF-8"),
        (ASK | {"settings": {"stop": ["\ud800"]}}, "settings.stop[0] is '\\ud800', which is not UTF-8"),
    ],
)
def test_what_is_too_much_or_no_text_is_refused_before_any_work(server, monkeypatch, capfd, body, says):
    monkeypatch.setattr(Talk, "answer", lambda *_: pytest.fail("it was answered"))
    with within(seconds=1):
        status, _, answer = request(server, body=body)
    assert status == 400 and says in json.loads(answer)["error"] and not capfd.readouterr().err


@pytest.mark.parametrize("body", [{"messages": turns(1, 900_000)}, ASK | {"system": "a word " * 130_000}])
def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized(server, monkeypatch, body):
    monkeypatch.setattr(ChatEncoder, "prompt", lambda *_: pytest.fail("it was tokenized"))
    with within(seconds=1):
        [line] = lines(request(server, body=body)[2])
    assert "characters, and the model reads 160 tokens with the answer: write another one" in line["error"]


def test_a_message_in_the_terminal_that_is_not_utf8_is_a_sentence(talk):
    with pytest.raises(CourseError, match="not UTF-8"):
        next(replace(talk, messages=[]).answer("half \udcff"))


@pytest.mark.parametrize(
    "settings", [{"new_tokens": 10**9}, {"stop": [("a" * number) + "b" for number in range(936, 1000)], "new_tokens": 100}]
)
def test_settings_at_their_bounds_cost_little(server, settings):
    with within(seconds=5):
        *pieces, last = lines(request(server, body=ASK | {"settings": settings})[2])
    assert last["done"] and len(pieces) >= last["tokens"] > 0


def test_a_token_costs_the_decoding_of_its_own_characters(talk, monkeypatch):
    whole, decode = [], type(talk.tokenizer).decode
    monkeypatch.setattr(type(talk.tokenizer), "decode", lambda self, ids, **how: whole.append(len(ids)) or decode(self, ids, **how))
    mine = replace(talk, messages=[])
    said = "".join(mine.answer("What is 3 plus 4?"))
    assert len(whole) == 1 and said == mine.messages[-1]["content"] and mine.tokens


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port))


def head(server, length: int, **changed: str) -> bytes:
    host = f"127.0.0.1:{server.server_port}"
    sent = {"Host": host, "Origin": f"http://{host}", web.KEY: server.key, "Content-Length": str(length)} | changed
    return "".join(["POST /answer HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in sent.items()), "\r\n"]).encode()


@pytest.mark.parametrize("moment", ["header", "body", "refusal"])
def test_a_reset_connection_leaves_the_terminal_as_it_was(server, capfd, moment):
    refused = head(server, MEGABYTE, Host="evil") + b"a" * 200_000
    sent = {"header": head(server, 100)[:40], "body": head(server, 100) + b"{", "refusal": refused}
    with connected(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.sendall(sent[moment])
    assert server.ended.acquire(timeout=60)
    assert lines(request(server)[2])[-1]["done"] and capfd.readouterr().err == ""


def test_other_errors_keep_their_tracebacks(server, capfd, monkeypatch):
    monkeypatch.setattr(web.ChatServer, "model", lambda self: 1 / 0)
    with pytest.raises(Exception):  # noqa: B017 (of http.client: the connection ended)
        request(server, "GET", "/model")
    assert server.ended.acquire(timeout=60) and "ZeroDivisionError" in capfd.readouterr().err


def test_a_page_that_leaves_while_it_waits_is_not_answered(server, monkeypatch):
    asked = []
    answer = Talk.answer
    monkeypatch.setattr(Talk, "answer", lambda talk, text: asked.append(text) or answer(talk, text))
    waiting, acquire = threading.Event(), server.drawing.acquire

    class Watched:
        """The lock of the model; says that a request waits for it."""

        release = server.drawing.release

        def acquire(self, timeout):
            waiting.set()
            return acquire(timeout=timeout)

    body = json.dumps(ASK).encode()
    server.drawing, lock = Watched(), server.drawing
    with lock, connected(server) as connection:
        connection.sendall(head(server, len(body)) + body)
        assert waiting.wait(60)
        connection.shutdown(socket.SHUT_RDWR)
    assert server.ended.acquire(timeout=60) and not asked
    assert lines(request(server)[2])[-1]["done"] and len(asked) == 1


def test_a_request_that_drips_is_cut_after_its_seconds_in_all(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(web.time, "monotonic", lambda: now[0])

    class Dripping:
        """A byte every four seconds."""

        def settimeout(self, seconds):
            self.seconds = seconds

        def recv_into(self, buffer):
            now[0] += min(4.0, self.seconds)
            if self.seconds < 4:
                raise TimeoutError
            buffer[:1] = b"a"
            return 1

    reader = io.BufferedReader(web.Incoming(Dripping(), 30.0))
    assert [reader.read1(1) for _ in range(7)] == [b"a"] * 7
    with pytest.raises(TimeoutError):
        reader.read(100)
    assert now[0] == 30.0


def test_each_request_is_read_with_such_a_bound(server, monkeypatch):
    monkeypatch.setattr(web, "PATIENCE", 0.2)
    with connected(server) as connection:
        connection.sendall(head(server, 100) + b"{")
        connection.settimeout(15)
        assert connection.recv(100) == b""  # cut, without an answer


def test_the_page_sends_no_more_turns_than_the_server_takes():
    assert f"const MOST_TURNS = {web.MOST_TURNS};" in web.Path(web.__file__).with_name("page.js").read_text()
