"""What the modes on preferences start from: models trained first, pairs of one's own, checkpoints of PPO, exports with adapters."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from preferring_runs import preferring_config, preferring_file
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import settings_file, train
from tuned_runs import tuned_file

from shared.model.hf.pretrained import load_pretrained
from shared.trainer.launch import start
from shared.trainer.run import train_model
from shared.trainer.talk.chat import AnswerSettings, open_talk
from shared.trainer.weights import find_initial_weights

QUIET = Console(quiet=True)


def chain(folder: Path) -> list[Path]:
    """Configurations as the course's: PPO from a fine-tuned model and a reward model, which starts from the fine-tuned model too."""
    sft = tuned_file(folder / "sft", folder / "base" / "run", start_config="../base/tiny.yaml", steps=3, schedule={"decay_steps": 0})
    settings_file(folder / "base", folder / "prepared", steps=3, schedule={"decay_steps": 0}, model={"max_position_embeddings": 128})
    more = {"start_config": "../sft/tuned.yaml", "steps": 2, "schedule": {"decay_steps": 0}}
    reward = preferring_file(folder / "reward", folder / "sft" / "run", "reward", **more)
    by_model = {"reward": "model", "reward_model": str(folder / "reward" / "run"), "reward_config": "../reward/preferring.yaml"}
    ppo = preferring_file(folder / "ppo", folder / "sft" / "run", "ppo", ppo=by_model, **more)
    return [folder / "base" / "tiny.yaml", sft, reward, ppo]


def finish(config: str) -> None:
    """What a run leaves, as far as others look for it."""
    model = Path(yaml.safe_load(Path(config).read_text())["engine"]["output"]) / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")


def test_what_a_run_starts_from_is_trained_first_where_it_is_not_there(tmp_path, monkeypatch, capsys):
    _, sft, reward, ppo = chain(tmp_path)
    started: list[str] = []

    def run(command, check):
        started.append(command[2])
        finish(command[2])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(start.subprocess, "run", run)
    (tmp_path / "sft" / "run").mkdir()  # an interrupted run is no model yet
    words = start.with_start([str(ppo)])
    assert [Path(each).resolve() for each in started] == [sft, reward]
    assert words[1:] == [f"start_from={tmp_path / 'sft' / 'run'}", f"ppo.reward_model={tmp_path / 'reward' / 'run'}"]
    assert f"{tmp_path / 'sft' / 'run'} is not there yet: tuned.yaml trains it first." in capsys.readouterr().out
    assert start.with_start([str(ppo)]) == [str(ppo)] and len(started) == 2, "they are there now"


def test_what_a_file_names_stands_beside_it_also_where_another_folders_file_extends_it(tmp_path, monkeypatch):
    _, sft, _, ppo = chain(tmp_path / "course")
    (tmp_path / "mine").mkdir()
    mine, started = tmp_path / "mine" / "my.yaml", []
    mine.write_text(f"extends: {ppo}\nsteps: 3\n")
    monkeypatch.setattr(start.subprocess, "run", lambda command, check: started.append(command[2]) or SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit):
        start.with_start([str(mine)])
    assert [Path(each).resolve() for each in started] == [sft]


def test_settings_of_the_model_wait_for_the_model_that_they_are_of(tmp_path, monkeypatch):
    """Three heads fit into some hidden sizes, though not into the default one."""
    started = []
    monkeypatch.setattr(start.subprocess, "run", lambda command, check: started.append(command[2]) or SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit) as ended:
        start.with_start([str(chain(tmp_path)[-1]), "model.num_attention_heads=3"])
    assert started and ended.value.code == 1


@pytest.mark.parametrize("word", ["ppo.promts=4", "steps=many", "ppo.prompts=0", "grpo.rewards=[{name: nubmer}]", "nothing"])
def test_bad_settings_are_refused_before_the_model_that_they_start_from_is_trained(word, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start.subprocess, "run", lambda *command, **how: pytest.fail("it was trained"))
    with pytest.raises(SystemExit) as ended:
        start.with_start([str(chain(tmp_path)[-1]), word])
    assert ended.value.code == 2 and word.split("=")[0].split(".")[-1] in capsys.readouterr().err


@pytest.mark.slow
def test_one_command_trains_the_base_the_fine_tuned_the_reward_model_and_the_policy(tmp_path):
    done = train(chain(tmp_path)[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is not there yet") == 3 and (tmp_path / "ppo" / "run" / "report.html").is_file()


def pairs_of_ones_own(folder: Path) -> str:
    records = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n}"} for n in range(120)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return f"preferences.sources=[{{path: {folder / 'mine.jsonl'}}}]"


def test_pairs_of_ones_own_in_every_mode(tmp_path, base):
    mine, short = pairs_of_ones_own(tmp_path), ("steps=2", "schedule.decay_steps=0")
    results = train_model(preferring_config(tmp_path / "reward", base, "reward", mine, "adapter.rank=4", *short), QUIET)
    assert "".join(piece for piece, trained in results.judged.example if trained).endswith("<|im_end|>")
    reward = tmp_path / "reward" / "run"
    assert (reward / "model").is_dir() and any("score" in name for name in load_file(reward / "adapter" / "adapter_model.safetensors"))
    results = train_model(preferring_config(tmp_path / "dpo", base, "dpo", mine, *short), QUIET)
    assert not results.judged.preferred and len(results.judged.samples) == 8 and "before:" in results.judged.samples[0][1]
    words = ["ppo.reward=model", f"ppo.reward_model={reward}", "ppo.prompts=4", "ppo.new_tokens=2", *short]
    results = train_model(preferring_config(tmp_path / "ppo", base, "ppo", mine, *words), QUIET)
    assert results.judged.samples and "rollout/gold_reward" not in results.metrics[2]


def test_a_policy_and_its_checkpoint_are_talked_to_and_started_from(tmp_path, base):
    config = preferring_config(tmp_path, base, "ppo", "steps=2", "schedule.decay_steps=0")
    train_model(config, QUIET)
    output = config.engine.output
    checkpoint = find_initial_weights(output / "checkpoints" / "step-00000002").load()
    exported = load_pretrained(output / "model")
    assert all((mine == theirs).all() for mine, theirs in zip(checkpoint.parameters(), exported.parameters(), strict=True))
    assert isinstance("".join(open_talk(output, AnswerSettings(new_tokens=4), None).answer("What is 3 plus 4?")), str)
