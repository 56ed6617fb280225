"""Checkpoints and exports of experts over ranks: every ep resumes every other, and a file for Hugging Face is that of one process."""

from dataclasses import replace

import pytest
import torch
import transformers
from layout_runs import largest_difference
from mixture_runs import MODEL, MixtureRun, alone
from safetensors.torch import load_file

from shared.engine.checkpoint.folder import CheckpointError
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.moe.builders import MIXTURE
from shared.parallel.comm.communicator import SingleRankCommunicator
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout

LAYOUTS = ("one", "dp2_ep2", "fsdp4_ep2", "dp4_ep4_zero1", "fsdp2", "dp4_ep2_zero2", "dp2_fsdp2_ep4", "pp2_dp2_ep2", "fsdp2_ep2")
AFTER = list(zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], ["adamw", "muon"] * 5, strict=False))  # each layout writes and reads
MORE = list(zip(LAYOUTS, LAYOUTS[4:] + LAYOUTS[:4], ["muon", "adamw"] * 5, strict=False))


def run(word: str, work, *arguments, **settings) -> list:
    layout = parse_layout(word)
    on_rank = lambda world: work(MixtureRun(world, layout, *arguments, **settings))  # noqa: E731
    return [on_rank(SingleRankCommunicator())] if layout.ranks == 1 else run_threads(on_rank, layout.ranks)


@pytest.mark.parametrize("writer, reader, optimizer", AFTER + [pytest.param(*each, marks=pytest.mark.slow) for each in MORE])
def test_another_layout_resumes(writer, reader, optimizer, tmp_path):
    """Weights, the routers' biases, the optimizer's state and the loader, as if the run had never been saved."""
    run(writer, lambda run: run.train(2).save(tmp_path, asynchronous=False), optimizer)
    found = run(reader, lambda run: run.restore(tmp_path).train(1).weights(), optimizer, seed=9)
    merged = {name: tensor for each in found for name, tensor in each.items()}
    assert largest_difference(merged, alone(optimizer)["weights"]) < 1e-9


def test_a_missing_rank_of_experts_is_damage(tmp_path):
    run("dp2_ep2", lambda run: run.train(1).save(tmp_path, asynchronous=False))
    folder = tmp_path / "step-00000001"
    (folder / "weights-rank-00001.safetensors").unlink()
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("weights-rank-00001", "weights-rank-00000"))
    with pytest.raises(CheckpointError):
        run("one", lambda run: run.restore(tmp_path))


PUBLISHED = {  # dots.llm1, which has DeepSeek-V3's router; Mixtral
    "dots1": replace(MODEL, qk_norm=True, experts=replace(MODEL.experts, scoring="sigmoid", capacity_factor=None)),
    "mixtral": replace(
        MODEL, experts=replace(MODEL.experts, capacity_factor=None, bias_update_rate=None, num_shared_experts=0, first_k_dense=0)
    ),
}


@pytest.mark.parametrize("kind, word", [("dots1", "fsdp4_ep2"), ("dots1", "pp2_dp2_ep2"), ("mixtral", "dp2_ep2")])
def test_an_export_is_one_processs(kind, word, tmp_path):
    """The ranks' experts, put together, in float32; and transformers computes the same logits."""

    def export(folder):
        def work(run):
            save_pretrained(run.parallel.module, folder, weights=run.parallel.weights())

        return work

    config, plain = PUBLISHED[kind], {"dtype": torch.float32}
    for each, folder in (("one", tmp_path / "one"), (word, tmp_path / "ranks")):
        run(each, export(folder), config=config, **plain)
    ours, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ranks", "one"))
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ranks")
    assert theirs.config.model_type == kind
    ids = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(0))
    loaded = load_pretrained(tmp_path / "ranks", builders=MIXTURE).eval()
    torch.testing.assert_close(theirs(ids).logits, loaded(ids), rtol=0, atol=1e-5)
