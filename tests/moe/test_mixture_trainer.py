"""The trainer with a mixture of experts: a run from YAML, its log, its export in transformers, a restart; layouts that are refused."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from mixture_runs import MODEL, MixtureRun
from rich.console import Console
from trainer_runs import settings_file, train

from shared.engine.metrics.flops import model_flops_per_token
from shared.model.context import AttentionContext
from shared.model.counting import active_feed_forward_size, count_parameters, parameter_counts
from shared.model.hf.pretrained import load_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig
from shared.moe.layer import MixtureLayer
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import ParallelConfig
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pretrain import Pretraining
from shared.trainer.run import announce
from shared.trainer.settings import parse_text, parse_words

EXPERTS = {
    "num_experts": 4, "moe_intermediate_size": 24, "scoring": "sigmoid", "bias_update_rate": 0.01, "num_shared_experts": 1,
    "first_k_dense": 1, "z_coefficient": 0.001, "capacity_factor": 1.5,
}  # fmt: skip


class SimpleStore(list):
    token_count = 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    model = {"experts": EXPERTS, "qk_norm": True, "hidden_dropout": 0.0}
    file = settings_file(folder, folder / "prepared", model=model, parallel={"activation_checkpointing": "full"})
    done = train(file)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, file


def test_a_run_logs_the_load_of_each_expert_and_the_biases_move(finished):
    rows = [json.loads(line) for line in (finished[0] / "run" / "metrics.jsonl").read_text().splitlines()]
    loads = [rows[-1][f"experts/load/1.{expert}"] for expert in range(4)]
    assert sum(loads) == pytest.approx(4) and rows[-1]["experts/max_load"] == max(loads) >= 1
    assert "norm/gradient.expert" in rows[-1] and rows[-1]["train/loss"] < rows[0]["train/loss"]
    model = load_pretrained(finished[0] / "run" / "model", builders=MIXTURE)
    moves = model.stack.blocks["1"].feed_forward.router.bias / 0.01
    assert moves.any() and torch.allclose(moves, moves.round(), atol=1e-4) and moves.abs().max() <= 6


def test_the_report_shows_the_load_as_a_map(finished):
    assert (finished[0] / "run" / "figures" / "expert_load.png").stat().st_size > 1000


def test_the_exported_model_has_the_same_logits_in_transformers(finished):
    folder = finished[0] / "run" / "model"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "dots1"
    ours, theirs = load_pretrained(folder, builders=MIXTURE).eval(), transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(512, (2, 17), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)


def test_the_settings_that_a_run_keeps_begin_the_same_run(finished):
    config = parse_text(TrainerConfig, (finished[0] / "run" / "config.yaml").read_text())
    assert config.model.experts == parse_words(TrainerConfig, [str(finished[1])]).model.experts


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["parallel.tensor_parallel=2", "model.experts.moe_intermediate_size=25"], "does not divide model.experts.moe"),
        (["parallel.context_parallel=2"], "capacity_factor with parallel.context_parallel"),
        (["parallel.tensor_parallel=2", "parallel.backend=torch"], "parallelize_module has no style for a stack of experts"),
        (["model.experts.num_expert=3"], "num_experts"),
        (["model.experts.first_k_dense=2"], "first_k_dense"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words, named, finished, capsys):
    with pytest.raises(SystemExit):
        parse_words(TrainerConfig, [str(finished[1]), *words])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("experts", "constant"),
    [
        (MixtureConfig(4, 24, num_experts_per_tok=1), True),
        (MixtureConfig(4, 24, num_experts_per_tok=1, norm_topk_prob=False), False),
        (MixtureConfig(4, 24, num_experts_per_tok=2), False),
        (None, False),
    ],
)
def test_routers_without_a_gradient_of_the_text_are_announced(experts, constant, finished):
    config = parse_words(TrainerConfig, [str(finished[1])])
    config = replace(config, model=replace(config.model, experts=experts))
    report = SimpleNamespace(unreadable={}, held_out_in_training=0, in_words=lambda: "")
    text = SimpleNamespace(report=report, training=SimpleStore(), held_out=[], folder=None)
    console = Console(file=io.StringIO())
    mode = Pretraining.__new__(Pretraining)
    mode.text = text
    announce(config, mode, None, torch.device("cpu"), console)
    assert ("gives the routers no gradient" in console.file.getvalue()) == constant
    if experts is not None:
        layer, x = MixtureLayer(config.model.resolved(), MIXTURE, 1), torch.randn(2, 5, config.model.hidden_size)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        layer.router.weight.grad = None
        layer.mix(x, layer.router(x), AttentionContext({})).square().sum().backward()
        assert (layer.router.weight.grad.abs().max() < 1e-5) == constant, "that is so"


def test_a_checkpoint_of_shards_goes_on_in_one_process(tmp_path):
    """Stacks of experts, routers and their biases, with the optimizer's state: as if the run had never been saved."""
    run_threads(lambda world: MixtureRun(world, ParallelConfig(fully_sharded=2), "muon").train(2).save(tmp_path), 2)
    one = MixtureRun(SingleRankCommunicator(), ParallelConfig(), "muon").restore(tmp_path).train(1).weights()
    whole = MixtureRun(SingleRankCommunicator(), ParallelConfig(), "muon").train(3).weights()
    for name, value in one.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12, msg=name)


def test_parameters_and_flops_are_counted_by_role_and_by_what_a_token_passes():
    assert parameter_counts(MODEL) == count_parameters(TransformerModel(MODEL, MIXTURE))
    resolved, matrix = MODEL.resolved(), 3 * 24 * 16
    assert active_feed_forward_size(resolved, 0) == 3 * 24 * 40 and active_feed_forward_size(resolved, 1) == 24 * 4 + 3 * matrix
    more = replace(MODEL, experts=replace(MODEL.experts, num_experts_per_tok=3))
    assert model_flops_per_token(more, 8) - model_flops_per_token(MODEL, 8) == 6 * 3 * matrix, "in three layers one expert more"
