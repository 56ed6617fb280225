"""The modes reward, dpo and ppo as a user starts them: reports, exports, resumed runs, layouts that train what one process trains."""

import json
import math

import pytest
import torch
from preferring_runs import preferring_config, trained, went_on
from rich.console import Console

from shared.course.errors import CourseError, SettingError
from shared.model.counting import parameter_counts
from shared.model.hf.pretrained import load_pretrained
from shared.preference.rollout import Sample
from shared.preference.reward_model import load_reward_model, score
from shared.preference.sampler import Completion
from shared.trainer.planner.memory import memory_needed, run_memory
from shared.trainer.weights import find_initial_weights
from shared.trainer.modes.rollouts import reward_by
from shared.trainer.run import build, train_model

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def reward_run(tmp_path_factory, base):
    config = preferring_config(tmp_path_factory.mktemp("reward"), base, "reward")
    return config, train_model(config, QUIET)


def test_a_reward_run_reports_accuracy_and_calibration_and_exports_what_transformers_scores(reward_run):
    import transformers

    config, results = reward_run
    summary = results.judged.summary
    assert {"held-out pairs ranked right", "expected calibration error", "held-out loss on pairs"} <= summary.keys()
    assert (config.engine.output / "figures" / "calibration.png").is_file() and "calibration" in results.report.read_text()
    folder = config.engine.output / "model"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = [5, 9, 33, 7, 12]
    with torch.no_grad():
        found = theirs(torch.tensor([ids])).logits
    assert score(load_reward_model(folder), [ids]) == pytest.approx(found[0].tolist(), abs=1e-4) and theirs.config.num_labels == 1


def test_a_policy_is_rewarded_for_prompt_and_answer_as_transformers_scores_them_padded(tmp_path, base, reward_run):
    import transformers

    config = preferring_config(tmp_path, base, "ppo", "ppo.reward=model", f"ppo.reward_model={reward_run[0].engine.output}")
    run = build(config, QUIET)
    end, folder = run.mode.end_ids[0], reward_run[0].engine.output / "model"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    answers = [([5, 9, 33], [7, 12, end], True), ([8], [21, end], True), ([5, 9], [33, 7], False)]
    found = reward_by(run.mode.rewards, run.config, run.strategy)(
        [Sample(0, prompt, Completion(ids, [0.0] * len(ids), ended)) for prompt, ids, ended in answers]
    )
    texts = [[*prompt, *ids] for prompt, ids, _ in answers]
    padded = torch.tensor([text + [theirs.config.pad_token_id] * (6 - len(text)) for text in texts])
    with torch.no_grad():
        assert found == pytest.approx(theirs(padded).logits[:, 0].tolist(), abs=1e-4)


def test_a_reward_model_is_no_model_that_writes(reward_run):
    with pytest.raises(SettingError, match="is a reward model, which writes no text"):
        find_initial_weights(reward_run[0].engine.output)
    with pytest.raises(SettingError, match="is a checkpoint of a reward model, which writes no text"):
        find_initial_weights(max((reward_run[0].engine.output / "checkpoints").iterdir()))


def test_a_dpo_run_reports_win_rates_and_its_first_loss_is_that_of_an_equal_reference(tmp_path, base):
    config = preferring_config(tmp_path, base, "dpo")
    results = train_model(config, QUIET)
    summary = results.judged.summary
    assert summary["trained parameters"] and 0 <= summary["win rate over the first model, by the hidden preference"] <= 1
    assert len(results.judged.preferred) == 6 and sum(row[1] for row in results.judged.wins() if row[0] != "all") == 6
    page = results.report.read_text()
    for shown in ("Held-out prompts", "win rate", "Answers side by side", "ranked_right"):
        assert shown in page
    assert results.metrics[1]["train/loss"] == pytest.approx(math.log(2), abs=0.02)  # dropout: the policy is not quite its reference
    assert "preferred" in json.loads((config.engine.output / "results.json").read_text())


def test_a_ppo_run_rewarded_by_a_model_reports_its_curves_and_exports_the_policy_alone(tmp_path, base, reward_run):
    model = reward_run[0].engine.output
    config = preferring_config(tmp_path, base, "ppo", f"ppo.reward_model={model}", "ppo.reward=model")
    results = train_model(config, QUIET)
    assert {"rollout/gold_reward", "rollout/kl_to_reference", "train/value_loss", "train/clip_fraction"} <= results.metrics[6].keys()
    drawn = {path.stem for path in (config.engine.output / "figures").iterdir()}
    assert {"reward", "kl", "length", "value_loss", "clip_fraction", "reward_over_kl"} <= drawn
    assert results.metrics[1]["rollout/kl_to_reference"] == pytest.approx(0.0, abs=1e-5)
    policy = load_pretrained(config.engine.output / "model")
    assert not hasattr(policy.head, "value")
    whole, again = went_on(config, after=2)
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("reward", []),
        ("dpo", []),
        ("dpo", ["dpo.loss=kto", "dpo.reference=beside"]),
        pytest.param("dpo", ["dpo.loss=simpo"], marks=pytest.mark.slow),
        pytest.param("dpo", ["dpo.loss=kto", "dpo.reference=beside", "adapter.rank=4"], marks=pytest.mark.slow),
        ("dpo", ["adapter.rank=4", "adapter.dropout=0.1"]),
        ("reward", ["adapter.rank=4"]),
        ("ppo", ["adapter.rank=4"]),
    ],
)
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, base, mode, words):
    config = preferring_config(tmp_path, base, mode, *words)
    train_model(config, QUIET)
    whole, again = went_on(config, after=2)
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_cached_reference_says_what_the_model_kept_beside_says(tmp_path, base):
    cached, beside = (trained(tmp_path / kind, base, "dpo", "", f"dpo.reference={kind}") for kind in ("cached", "beside"))
    assert all((cached[name] - beside[name]).norm() <= 2e-5 * beside[name].norm() for name in beside)


LAYOUTS = [("dpo", "fsdp2"), ("reward", "tp2"), ("ppo", "dp2")]
MORE = [(mode, layout) for mode in ("reward", "dpo", "ppo") for layout in ("dp2", "dp2_zero1", "fsdp2", "tp2", "pp2")]


@pytest.mark.parametrize(
    ("mode", "layout"), [*LAYOUTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE if each not in LAYOUTS)]
)
def test_layouts_train_what_one_process_trains(tmp_path, base, mode, layout):
    words = ["dpo.reference=beside"] if mode == "dpo" else []
    alone, found = (trained(tmp_path, base, mode, each, *words) for each in ("", layout))
    assert found.keys() == alone.keys()
    for name, weight in alone.items():
        assert (found[name] - weight).norm() <= 2e-5 * weight.norm() + 1e-7, name


@pytest.mark.parametrize(
    ("mode", "words", "sentence"),
    [
        ("dpo", ["start_from=null"], "mode is dpo and start_from is null"),
        ("dpo", ["ppo.clip=0.3"], "the section ppo is for mode ppo"),
        ("reward", ["dpo.beta=0.3"], "the section dpo is for mode dpo"),
        ("dpo", ["chats.system=Be brief."], "the section chats is for mode sft"),
        ("dpo", ["parallel.context_parallel=2"], "parallel.context_parallel is 2, and mode dpo needs each answer whole"),
        ("ppo", ["adapter.kind=prompt"], "adapter.kind is prompt, and mode ppo trains low-rank updates alone"),
        ("ppo", ["ppo.reward=model"], "ppo.reward is model and ppo.reward_model is null"),
        ("ppo", ["ppo.reward_model=x"], "reward is gold, which asks no reward_model"),
        ("ppo", ["preferences.sources=[{path: a.jsonl}]"], "no hidden preference is known for prompts of your own"),
        ("dpo", ["dpo.beta=0"], "dpo.beta"),
        ("dpo", ["mode=sft"], "the section preferences is for mode reward or dpo or ppo"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path, base, capsys, mode, words, sentence):
    with pytest.raises(SystemExit) as left:
        preferring_config(tmp_path, base, mode, *words)
    assert left.value.code == 2 and sentence in " ".join(capsys.readouterr().err.split())


def test_the_memory_estimate_counts_models_that_are_kept_beside(tmp_path, base, reward_run):
    def needed(mode: str, *words: str) -> float:
        return memory_needed(preferring_config(tmp_path, base, mode, *words))

    config = preferring_config(tmp_path, base, "dpo")
    weights = 4 * sum(parameter_counts(config.model).values())
    head = 16 * config.model.hidden_size
    assert needed("dpo", "dpo.reference=beside") - needed("dpo") == pytest.approx(weights)
    [ppo] = run_memory(preferring_config(tmp_path, base, "ppo"))
    assert ppo.beside == pytest.approx(weights + head) and ppo.training - needed("dpo") == pytest.approx(weights + head)
    assert needed("ppo") == pytest.approx(max(ppo.training, ppo.drawing)) and ppo.cache > 0
    by_model = needed("ppo", "ppo.reward=model", f"ppo.reward_model={reward_run[0].engine.output}")
    assert by_model - needed("ppo") > weights / 2  # the reward model has no language-model head, and more rows
    assert needed("dpo", "dpo.reference=beside", "adapter.rank=4") == pytest.approx(needed("dpo", "adapter.rank=4"))


@pytest.mark.parametrize(("where", "sentence"), [("none", "holds no model"), ("base", "is a language model")])
def test_what_is_no_reward_model_is_refused(tmp_path, base, where, sentence):
    model = base if where == "base" else tmp_path / "none"
    with pytest.raises(CourseError, match=sentence):
        train_model(preferring_config(tmp_path, base, "ppo", "ppo.reward=model", f"ppo.reward_model={model}"), QUIET)
