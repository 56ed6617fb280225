"""`course chat RUN --web`: the server over HTTP. Who may ask, what a line says, what ends an answer; a browser's side is tests/browser."""

import http.client
import json
import re
import socket
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count

import pytest
from click.testing import CliRunner
from talking_models import save_model

from shared.course import terminal
from shared.course.cli import cli
from shared.rl.generation import Drawing
from shared.trainer.talk import server as web
from shared.trainer.talk.chat import AnswerSettings, Talk, open_talk

SETTINGS = AnswerSettings(Drawing(temperature=0.9, top_k=None), new_tokens=12)
ASK = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}]}


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    return open_talk(save_model(tmp_path_factory.mktemp("chat"), template="chatml"), SETTINGS, None)


@contextmanager
def serving(talk: Talk):
    with web.ChatServer(talk, "runs/mine") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(talk):
    with serving(talk) as server:
        yield server


def request(server, method="POST", path="/answer", body=ASK, **headers):
    """Status, headers and body of the answer to the page's own request, but for the headers that are given; None leaves one out."""
    host = f"127.0.0.1:{server.server_port}"
    own = {"Host": host, web.KEY: server.key} | ({"Origin": f"http://{host}"} if method == "POST" else {})
    changed = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {name: value for name, value in (own | changed).items() if value is not None}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    if method == "POST":
        sent.setdefault("Content-Length", str(len(content)))
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host=True)
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(content if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()


def lines(body: bytes) -> list[dict]:
    return [json.loads(line) for line in body.splitlines()]


def test_an_answer_is_what_the_terminal_prints_and_ends_with_its_figures(server, talk):
    settings = {"drawing": {"temperature": 0.9}, "new_tokens": 12, "seed": 3}
    status, headers, body = request(server, body=ASK | {"settings": settings, "system": "Brief."})
    *pieces, last = lines(body)
    expected = replace(talk, settings=replace(SETTINGS, drawing=Drawing(0.9, 40), seed=3), system="Brief.", messages=[])
    assert status == 200 and headers["Content-Type"].startswith("application/x-ndjson")
    assert "".join(each["text"] for each in pieces) == "".join(expected.answer("What is 3 plus 4?"))
    assert {name: last[name] for name in ("done", "tokens", "dropped")} == {"done": True, "tokens": expected.tokens, "dropped": 0}
    assert last["cut_off"] == expected.cut_off and last["seconds"] > 0 and expected.tokens


def test_the_conversation_is_the_pages_own_and_old_turns_leave_whole(server, talk):
    said = [{"role": role, "content": f"{role} {number} says this"} for number in range(12) for role in ("user", "assistant")]
    question = {"role": "user", "content": "Again"}
    *_, last = lines(request(server, body={"messages": [*said, question], "system": "Be brief."})[2])
    expected = replace(talk, settings=AnswerSettings(), messages=said, system="Be brief.")
    expected.fitting(question)
    assert last["done"] and last["dropped"] == expected.dropped > 0
    assert lines(request(server)[2])[-1]["dropped"] == 0 and not talk.messages


def test_what_does_not_fit_is_a_sentence_and_the_next_message_is_answered(server):
    [line] = lines(request(server, body={"messages": [{"role": "user", "content": "word " * 500}]})[2])
    assert "write another one" in line["error"]
    assert lines(request(server)[2])[-1]["done"]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"Host": "evil.example:80"}, "its own address"),  # DNS rebinding
        ({"Host": "127.0.0.1"}, "its own address"),
        ({"Host": None}, "its own address"),
        ({"Origin": "http://evil.example"}, "another page"),
        ({"Origin": "null"}, "another page"),
        ({"Origin": None}, "another page"),
        ({web.KEY: None}, "lacks its key"),
        ({web.KEY: "é" * 32}, "lacks its key"),
    ],
)
def test_others_get_no_answer(server, headers, says, monkeypatch):
    monkeypatch.setattr(Talk, "answer", lambda *_: pytest.fail("it was answered"))
    status, _, body = request(server, **{name.replace("-", "_"): value for name, value in headers.items()})
    assert status == 403 and says in json.loads(body)["error"]


def test_the_models_description_needs_the_key_and_the_page_does_not(server):
    assert request(server, "GET", "/model", **{"X_Key": None})[0] == 403
    about = json.loads(request(server, "GET", "/model")[2])
    assert about["name"] == "runs/mine" and about["template"] and about["settings"]["drawing"]["temperature"] == 0.9
    for path in ("/", "/page.js", "/page.css"):
        status, headers, body = request(server, "GET", path, **{"X_Key": None})
        policy = headers["Content-Security-Policy"]
        assert status == 200 and server.key.encode() not in body
        assert "default-src 'none'; script-src 'self';" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert request(server, "GET", path, Host=f"evil.example:{server.server_port}")[0] == 403
    assert request(server, "GET", "/../server.py")[0] == 404 and server.url.endswith(f"/#{server.key}")


def test_the_page_makes_no_html_of_text():
    script = web.Path(web.__file__).with_name("page.js").read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "setHTML", "DOMParser"):
        assert word not in script
    page = web.Path(web.__file__).with_name("page.html").read_text()
    assert "http" not in page + script and "style=" not in page and "onclick" not in page  # no other machine; what the policy would refuse


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        ({"messages": []}, "take turns"),
        ({}, "messages is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "system", "content": "a"}]}, "role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "take turns"),
        (ASK | {"settings": {"drawing": {"temperature": -1}}}, "temperature is -1"),
        (ASK | {"settings": {"drawing": {"min_p": 2}}}, "min_p is 2"),
        (ASK | {"settings": {"new_tokens": 0}}, "new_tokens is 0"),
        (ASK | {"settings": {"seed": 2**64}}, "seed is"),
        (ASK | {"settings": {"stop": [""]}}, "empty string"),
        (ASK | {"setings": {}}, "settings"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(server, body, says):
    status, _, answer = request(server, body=body)
    assert status == 400 and says in json.loads(answer)["error"]


def test_the_length_of_a_request_is_said_and_bounded(server):
    assert request(server, Content_Length="2x")[0] == 411
    assert request(server, Content_Length=str(web.MOST_BYTES + 1), body=b"")[0] == 413


def test_a_page_that_leaves_ends_its_answer_and_the_next_one_begins(server, monkeypatch):
    ended = threading.Event()

    def endless(talk: Talk, text: str):
        try:
            for number in count():
                yield f"{number} "
        finally:
            ended.set()

    with monkeypatch.context() as patch:
        patch.setattr(Talk, "answer", endless)
        body = json.dumps(ASK).encode()
        host = f"127.0.0.1:{server.server_port}"
        headers = {"Host": host, "Origin": f"http://{host}", web.KEY: server.key, "Content-Length": len(body)}
        head = "".join(["POST /answer HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items()), "\r\n"])
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(head.encode() + body)
            received = connection.recv(100)
            assert received.startswith(b"HTTP/1.0 200")
            while b'"0 ' not in received:  # one that leaves before its answer begins gets none
                received += connection.recv(100)
        assert ended.wait(60)
    assert lines(request(server)[2])[-1]["done"]


def test_one_answer_is_drawn_at_a_time_and_who_waits_too_long_gets_a_sentence(server, monkeypatch):
    monkeypatch.setattr(web, "PATIENCE", 0.05)
    with server.drawing:
        [line] = lines(request(server)[2])
    assert "another page" in line["error"]
    assert lines(request(server)[2])[-1]["done"]


def test_it_listens_on_this_machine_alone_and_a_taken_port_is_a_sentence(server, tmp_path):
    assert server.server_address[0] == "127.0.0.1"
    done = CliRunner().invoke(cli, ["chat", str(save_model(tmp_path)), "--web", "--port", str(server.server_port)])
    assert done.exit_code == 64 and "--port" in done.output and "in use" in done.output


def test_a_model_without_a_template_continues_the_last_text_alone(tmp_path):
    talk = open_talk(save_model(tmp_path), SETTINGS, None)
    with serving(talk) as server:
        assert not json.loads(request(server, "GET", "/model")[2])["template"]
        *pieces, last = lines(request(server, body=ASK | {"system": "Unused.", "settings": {"new_tokens": 5}})[2])
    expected = replace(talk, settings=AnswerSettings(new_tokens=5))
    assert last["tokens"] == 5 and last["cut_off"]
    assert "".join(each["text"] for each in pieces) == "".join(expected.answer("What is 3 plus 4?"))


def test_the_port_that_the_system_chose_is_the_one_that_is_printed(talk, monkeypatch, capsys):
    def interrupted(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(web.ChatServer, "serve_forever", interrupted)
    web.serve(terminal.open_console(), talk, "runs/mine", 0)
    printed = capsys.readouterr().out
    port = re.search(r"http://127\.0\.0\.1:(\d+)/", printed)[1]
    assert port != "0" and f"ssh -L {port}:127.0.0.1:{port} HOST" in " ".join(printed.split())
