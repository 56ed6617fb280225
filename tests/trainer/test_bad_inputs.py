"""Bad inputs to every mode and command (`tests/tables/bad_inputs.py`), and values of the wrong kind in a model's config.json."""

import json

import bad_inputs
import pytest

from shared.course.errors import CourseError
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.trainer.config import TrainerConfig
from shared.trainer.settings import parse_words
from shared.trainer.weights import find_initial_weights

VALUES = [7, -1, 0, 0.5, 1e30, float("nan"), True, None, "x", "", [], [7], {}, {"a": 1}]
KEYS = ("architectures", "quantization_config", "rope_parameters", "rope_scaling", "layer_types", "sliding_window", "torch_dtype")


@pytest.mark.slow
def test_every_bad_input_is_refused_in_a_sentence_that_names_its_place(tmp_path):
    found = [*bad_inputs.verdicts(tmp_path)]
    assert len(found) > 500
    assert not (faults := [each for each in found if each.fault]), "\n".join(f"{each.fault}: {each.given}\n{each.said}" for each in faults)


def test_settings_layouts_and_pipelines_are_refused_when_they_are_read(tmp_path, monkeypatch):
    """Those that nothing but the settings is needed for; the slow test has the others, and what is only refused later."""
    monkeypatch.setattr(bad_inputs, "train_model", lambda config, console: None)
    found = [*bad_inputs.verdicts(tmp_path, ["words.pretrain", "yaml", "layout", "pipeline"])]
    late = [each.given for each in found if each.fault == "ACCEPTED"]
    assert len(found) > 190 and len(late) < 30, late
    assert not [each for each in found if each.fault not in ("", "ACCEPTED")]


def test_values_of_another_kind_in_a_models_config_are_refused_or_harmless(tmp_path):
    model = TransformerModel(ModelConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    save_pretrained(model, tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    scaled = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    given = [whole | {key: value} for key in (*whole, *KEYS) for value in VALUES]
    given += [whole | {"rope_parameters": scaled | {key: value}} for key in (*scaled, "rope_theta", "beta_fast") for value in VALUES]
    refused = []
    for each in [*given, *VALUES]:
        (tmp_path / "config.json").write_text(json.dumps(each))
        try:
            find_initial_weights(tmp_path)
        except CourseError as error:
            refused.append(str(error))
    assert len(refused) > len(given) / 3 and all(str(tmp_path) in said for said in refused)
    for said in ("rope_parameters is 7: give an object", "rope_theta is True: give a number", "hidden_size is 1e+30: give a whole number"):
        assert any(said in each for each in refused), said


def test_a_settings_file_that_is_all_right_is_read(tmp_path):
    """Or every refusal above could be that of the base file."""
    inputs = bad_inputs.Inputs(tmp_path)
    assert parse_words(TrainerConfig, [str(inputs.file("pretrain"))]).steps == 1
