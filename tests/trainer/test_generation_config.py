"""How a published model is sampled from lives through a fine-tuning: the defaults and the list of end tokens of generation_config.json."""

import json
import shutil

from rich.console import Console
from transformers import GenerationConfig
from tuned_runs import tuned_config

from shared.trainer.run import train_model


def test_sampling_defaults_and_the_list_of_end_tokens_are_those_of_the_start(tmp_path, base):
    folder = tmp_path / "start"
    shutil.copytree(base / "model", folder)
    said = json.loads((folder / "generation_config.json").read_text())
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps(said | sampling | {"eos_token_id": [said["eos_token_id"], 7]}))
    config = tuned_config(tmp_path, folder, "steps=1")
    train_model(config, Console(quiet=True))
    theirs = GenerationConfig.from_pretrained(config.engine.output / "model")
    assert {name: getattr(theirs, name) for name in sampling} == sampling
    assert isinstance(theirs.eos_token_id, list) and {said["eos_token_id"], 7} <= {*theirs.eos_token_id}
