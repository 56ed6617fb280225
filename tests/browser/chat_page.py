"""The chat page in a real browser: `python tests/browser/chat_page.py RUN FOLDER` writes screenshots to FOLDER, fails where a claim does.

RUN is any run with a chat template. What a hostile model would write is put into its mouth.
"""

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import sleep
from unittest.mock import patch

from devtools import Page, open_browser

from shared.rl.generation import Drawing
from shared.trainer.talk.chat import AnswerSettings, Talk, open_talk
from shared.trainer.talk.server import ChatServer

HOSTILE = "<script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>\n</p><b>bold</b> &amp; \u202eevil\u202c <iframe>"
IDLE = "document.getElementById('stop-button').disabled && document.getElementById('log').getAttribute('aria-busy') === 'false'"
LAST = "document.querySelector('#log article:last-child .said').textContent"


def ask(page: Page, text: str) -> str:
    """Type a message, send it with Enter, and wait for the whole answer."""
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")
    page.wait(IDLE)
    return page.run(LAST)


def click(page: Page, name: str) -> None:
    page.run(f"document.getElementById('{name}').click()")


def check_conversation(page: Page, talk: Talk, folder: Path, url: str) -> None:
    """Answers are the terminal's, by turns; regenerate, reset, settings, and both keys."""
    page.open(url, 1200)
    page.wait("document.title !== 'Chat'")
    page.run("document.getElementById('seed').value = 5, document.getElementById('temperature').value = 0")
    expected = replace(talk, settings=replace(talk.settings, drawing=Drawing(0.0, 40)), messages=[])
    for text in ("What is 3 plus 4?", "And 5 plus 6?"):
        assert ask(page, text) == "".join(expected.answer(text)), text
    page.screenshot(folder / "chat_1200.png")
    click(page, "again")
    page.wait(IDLE)
    assert page.run("document.querySelectorAll('article').length") == 4
    assert page.run(LAST) == expected.messages[-1]["content"]
    page.run("document.getElementById('text').focus()")
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.run("document.getElementById('text').value") == "one\ntwo"
    page.run("document.getElementById('temperature').value = -1")
    page.press("Enter")
    assert page.run("document.getElementById('settings').open") and page.run("document.querySelectorAll('article').length") == 4
    page.screenshot(folder / "settings_1200.png")
    page.run("document.getElementById('temperature').value = 0, document.getElementById('text').value = ''")
    click(page, "reset")
    assert page.run("document.querySelectorAll('article').length") == 0
    assert ask(page, "What is 3 plus 4?") == expected.messages[1]["content"]
    page.run("document.getElementById('text').value = ''")
    said = ask(page, "word " * 2000)
    assert "write another one" in page.run("document.getElementById('status').textContent") and said == expected.messages[1]["content"]
    assert page.run("document.getElementById('text').value").startswith("word ")


def check_hostile(page: Page, folder: Path, url: str) -> None:
    """What a model writes stays text, however it reads."""
    with patch.object(Talk, "answer", lambda self, text: iter(HOSTILE)):
        page.open(url, 390, dark=True)
        page.wait("document.title !== 'Chat'")
        assert ask(page, HOSTILE) == HOSTILE
    assert page.run("document.querySelectorAll('#log img, #log script, #log b, #log iframe').length") == 0
    assert page.run("window.harmed") is None and not page.overflows()
    page.screenshot(folder / "hostile_390_dark.png")
    page.run("document.getElementById('settings').open = true")
    assert not page.overflows()
    page.screenshot(folder / "settings_390_dark.png")


def check_stop(page: Page, folder: Path, url: str) -> None:
    """Stop, by the button and by Escape, ends the answer on the server too, and keeps what was written."""
    drawn, ended = [], []

    def endless(self: Talk, text: str) -> Iterator[str]:
        try:
            for number in count():
                drawn.append(number)
                yield f"{number} "
                sleep(0.02)
        finally:
            ended.append(True)

    page.open(url, 390)
    page.wait("document.title !== 'Chat'")
    with patch.object(Talk, "answer", endless):
        for how in (lambda: click(page, "stop-button"), lambda: page.press("Escape")):
            page.run("document.getElementById('text').focus()")
            page.type("Count.")
            page.press("Enter")
            page.wait(f"document.querySelector('#log article:last-child.assistant') && {LAST}.includes(' 19 ')")
            page.screenshot(folder / "streaming_390.png")
            how()
            page.wait(IDLE)
            sleep(0.5)
            assert ended.pop() and page.run("document.getElementById('status').textContent") == "Stopped."
            assert page.run(LAST).startswith("0 1 2 ")


def check_key(page: Page, url: str) -> None:
    page.open(url.partition("#")[0], 390)
    page.wait("document.getElementById('status').textContent.includes('lacks its key')")


def main(run: str, folder: str) -> None:
    talk = open_talk(Path(run), AnswerSettings(new_tokens=24), None)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with ChatServer(talk, run) as server, open_browser() as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check_conversation(page, talk, Path(folder), server.url)
        check_hostile(page, Path(folder), server.url)
        check_stop(page, Path(folder), server.url)
        assert not page.messages, page.messages  # neither exceptions nor refusals by the Content-Security-Policy
        check_key(page, server.url)
        server.shutdown()
    print(f"The page holds. Screenshots: {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
