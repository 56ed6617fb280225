"""`course chat`: conversations over a pipe, history by whole turns, plain continuation, virtual tokens, and sentences for errors."""

import io
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from trainer_runs import train
from tuned_runs import tuned_config, tuned_file

from shared.course.cli import cli
from shared.course.errors import CourseError
from shared.rl.generation import Drawing
from shared.trainer import weights
from shared.trainer.run import train_model
from shared.trainer.talk.chat import AnswerSettings, open_talk

LIKELIEST = AnswerSettings(Drawing(temperature=0.0), new_tokens=8)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("tuned")
    assert train(tuned_file(folder, base, report={"new_tokens": 4}), "instructions.tasks=6").returncode == 0
    return folder / "run"


def chat(run: Path, said: str, *options: str):
    return CliRunner().invoke(cli, ["chat", str(run), "--temperature", "0", "--new-tokens", "8", *options], input=said)


def test_lines_are_answered_and_the_end_of_input_ends_it(tuned):
    done = chat(tuned, "What is 3 plus 4?\n\n/reset\nAgain\n", "--system", "Be brief.")
    assert done.exit_code == 0 and "Forgotten." in done.output
    talk = open_talk(tuned, LIKELIEST, "Be brief.")
    assert done.output.startswith("".join(talk.answer("What is 3 plus 4?")))


def test_plain_continues_the_text_without_a_template(tuned):
    plain = open_talk(tuned, LIKELIEST, "Unused.", plain=True)
    assert plain.template is None and plain.system is None
    wanted = "".join(plain.answer("What is 3 plus"))
    assert wanted != "".join(open_talk(tuned, LIKELIEST, None).answer("What is 3 plus"))
    done = CliRunner().invoke(cli, ["sample", str(tuned), "What is 3 plus", "--plain", "--temperature", "0", "--new-tokens", "8"])
    assert done.exit_code == 0 and done.output == wanted + "\n" and chat(tuned, "What is 3 plus\n", "--plain").output == done.output


def test_what_was_said_is_part_of_the_next_prompt_and_old_turns_leave_whole(tuned):
    talk = open_talk(tuned, LIKELIEST, "Be brief.")
    rooms = []
    for number in range(6):
        list(talk.answer(f"What is {number} plus 4?"))
        rooms.append((len(talk.messages), talk.dropped))
    prompt = talk.tokenizer.decode(talk.prompt(talk.messages), keep_special=True)
    assert rooms[1] == (4, 0) and talk.dropped > 0 and len(talk.messages) == 2 * (6 - talk.dropped)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>") and talk.messages[0]["role"] == "user"
    assert len(talk.fitting({"role": "user", "content": "And more?"})) < talk.context
    with pytest.raises(CourseError, match="write another one"):
        list(talk.answer("word " * 500))
    talk.reset()
    assert not talk.messages and not talk.dropped


def test_a_name_of_a_special_token_in_a_message_ends_no_turn(tuned):
    talk = open_talk(tuned, LIKELIEST, None)
    end = talk.tokenizer.special("<|im_end|>")
    assert talk.prompt([{"role": "user", "content": "<|im_end|>"}]).count(end) == 1


def test_a_pretrained_model_continues_and_a_checkpoint_is_enough(base, tuned):
    talk = open_talk(base, LIKELIEST, "Unused.")
    assert talk.template is None and talk.system is None and talk.prompt([{"content": "def "}]) == talk.tokenizer.encode("def ")
    assert chat(base, "def \n").exit_code == 0
    newest, exported = (open_talk(path, LIKELIEST, None) for path in (tuned / "checkpoints" / "step-00000006", tuned))
    assert newest.stops == exported.stops and "".join(newest.answer("Hello")) == "".join(exported.answer("Hello"))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("words", [("sample", "RUN", "def "), ("chat", "RUN"), ("eval", "RUN", "--data", "TEXT")])
def test_a_checkpoint_that_a_run_removes_while_it_is_opened_is_chosen_again(tmp_path, base, monkeypatch, words, read):
    """The newest one goes once it is chosen; read: once it was found intact as well, and before its weights are read."""
    run, text = shutil.copytree(base, tmp_path / "run", ignore=shutil.ignore_patterns("model")), tmp_path / "text.txt"
    text.write_text("def answer(question):\n" * 4)
    checked, removed = weights.require_weights, []

    def raced(folder, shapes):
        if read:
            checked(folder, shapes)
        if not removed:
            removed.append(shutil.rmtree(folder))
        if not read:
            checked(folder, shapes)

    monkeypatch.setattr(weights, "require_weights", raced)
    done = CliRunner().invoke(cli, [str({"RUN": run, "TEXT": text}.get(word, word)) for word in words], input="def \n")
    assert done.exit_code == 0 and removed, done.output
    newest = max((run / "checkpoints").iterdir())
    shutil.rmtree(newest)
    done = CliRunner().invoke(cli, ["sample", str(newest), "def "])
    assert done.exit_code == 64 and f"RUN is {newest}, which does not exist" in " ".join(done.output.split())


def test_a_run_whose_checkpoints_all_go_while_they_are_read_is_a_sentence(tmp_path, base, monkeypatch):
    run = shutil.copytree(base, tmp_path / "run", ignore=shutil.ignore_patterns("model"))

    def raced(folder, shapes):
        (step := folder.with_name(f"step-{int(folder.name[5:]) + 1:08d}")).mkdir()
        (step / "state.json").touch()
        shutil.rmtree(folder)
        raise CourseError(f"There is no checkpoint {folder}.")

    monkeypatch.setattr(weights, "require_weights", raced)
    with pytest.raises(CourseError, match="removed 5 checkpoints while they were read: wait until it ends"):
        open_talk(run, LIKELIEST, None)


def test_control_characters_of_a_model_do_not_reach_the_terminal(tuned, monkeypatch):
    monkeypatch.setattr("shared.trainer.talk.chat.Talk.answer", lambda *_: iter(["\x1b[2J\x9bm\u202e", "é\u3000\t", "漢\a\n🙂\r"]))
    assert chat(tuned, "Hello\n").output == "\ufffd[2J\ufffdm\ufffdé\u3000\t漢\ufffd\n🙂\ufffd\n"


def test_the_interrupt_key_ends_it_politely(tuned, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("shared.trainer.talk.chat.Talk.answer", interrupted)
    done = chat(tuned, "Hello\n")
    assert done.exit_code == 0 and "Traceback" not in done.output


def test_virtual_tokens_are_read_before_every_prompt(tmp_path, base):
    words = ("adapter.kind=prompt", "adapter.virtual_tokens=5", "instructions.tasks=6", "optimizer.name=adamw")
    config = tuned_config(tmp_path, base, *words)
    results = train_model(config, Console(file=io.StringIO()))
    talk = open_talk(tmp_path / "run", AnswerSettings(Drawing(temperature=0.0), config.report.new_tokens), None)
    for task in results.judged.answered[:2]:
        talk.reset()
        assert "".join(talk.answer(task.prompt)) == task.after


@pytest.mark.parametrize(("name", "says"), [("none", "RUN is"), (".", "which is not a model")])
def test_what_is_no_model_is_a_sentence(tmp_path, name, says):
    done = chat(tmp_path / name, "Hello\n")
    assert done.exit_code == 64 and says in done.output
