"""`start_from`: runs that begin with the weights of a Hugging Face folder, of a run, or of a checkpoint, in one process and over ranks."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import settings_file, train

from shared.course.errors import CourseError
from shared.data.tokenizer import TextTokenizer
from shared.finetune.vocabulary import MeanRows, part_of
from shared.model.hf.pretrained import load_pretrained, logical_parameters, save_pretrained
from shared.model.init import materialize
from shared.model.transformer import TIED, TIED_TO, TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.mesh import Mesh
from shared.parallel.parallelize import apply_parallel
from shared.trainer.config import DataConfig, TrainerConfig
from shared.trainer.models import RUN_AXES, plain_model
from shared.trainer.modes.pretrain import with_tokenizer_of
from shared.trainer.run import build
from shared.trainer.settings import parse_words
from shared.trainer.weights import find_initial_weights

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES = {
    "llama": MixtureModelConfig(vocab_size=70, **SIZES, tie_word_embeddings=True, max_position_embeddings=96),
    "untied": MixtureModelConfig(vocab_size=70, **SIZES, max_position_embeddings=96, qk_norm=True, head_dim=16),
    "gpt2": MixtureModelConfig(
        vocab_size=70, **SIZES | {"num_key_value_heads": 4}, max_position_embeddings=96, position="learned", norm="layer_norm", gated=False,
        hidden_act="gelu_tanh", attention_bias=True, attention_output_bias=True, mlp_bias=True, tie_word_embeddings=True,
    ),
    "mixture": MixtureModelConfig(
        vocab_size=70, **SIZES, max_position_embeddings=96, norm_eps=1e-5, rope_theta=1e6,
        experts=MixtureConfig(4, 48, balance_coefficient=0.0),
    ),
}  # fmt: skip
LAYOUTS = ("dp2", "tp2", "fsdp2", "pp2", "dp2_ep2", "tp2_fsdp2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prepared):
    """A run of 6 steps, its folder and its configuration."""
    folder = tmp_path_factory.mktemp("finished")
    file = settings_file(folder, prepared)
    done = train(file)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def saved(folder, family: str):
    """A published model in many small files."""
    model = TransformerModel(FAMILIES[family], MIXTURE, seed=3)
    save_pretrained(model, folder, max_shard_bytes=20_000)
    assert (folder / "model.safetensors.index.json").exists()
    return model


def tuned(folder, prepared, start, *words, **changes) -> TrainerConfig:
    """The tiny run from other weights: its section `model` is theirs."""
    file = settings_file(folder, prepared, start_from=str(start), **changes)
    text = [line for line in file.read_text().splitlines()]
    first = text.index("model:")
    rest = next((i for i in range(first + 1, len(text)) if not text[i].startswith(" ")), len(text))
    file.write_text("\n".join(text[:first] + text[rest:]))
    return parse_words(TrainerConfig, [str(file), *words])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_begins_with_the_files_weights_and_new_rows_at_their_mean(tmp_path, family):
    model = saved(tmp_path / "published", family)
    start = find_initial_weights(tmp_path / "published")
    wanted = {name: parameter.detach().clone() for name, parameter in logical_parameters(model).items()}
    for name in {TIED_TO, TIED} & wanted.keys():
        wanted[name] = torch.cat([wanted[name], wanted[name].double().mean(0, keepdim=True).float().expand(5, -1)])
    data = DataConfig(seq=96, batch_size=16, micro_batch_size=4)
    config = TrainerConfig(model=MixtureModelConfig(**vars(start.model) | {"vocab_size": 75}), data=data)
    alone = logical_parameters(start.load(config.model))
    assert alone.keys() == wanted.keys() and all(torch.equal(alone[name], wanted[name]) for name in wanted)
    for layout in LAYOUTS:
        if layout.endswith("ep2") and family != "mixture":
            continue
        parallel = parse_layout(layout)

        def work(world, parallel=parallel):
            mesh = Mesh(parallel, world)
            there = TrainerConfig(model=config.model, parallel=parallel, data=data)
            strategy = apply_parallel(plain_model(there, mesh, torch.device("cpu"), start), mesh, axes=RUN_AXES)
            return strategy.full_weights()

        whole = run_threads(work, parallel.ranks)[0]
        assert whole.keys() == wanted.keys() and all(torch.equal(whole[name], wanted[name]) for name in wanted), layout


def test_a_model_that_transformers_saved_is_one_to_start_from(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    theirs = Qwen2ForCausalLM(Qwen2Config(vocab_size=40, **shape, tie_word_embeddings=True)).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    ours, ids = find_initial_weights(tmp_path / "theirs").load().eval(), torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
        resized = find_initial_weights(tmp_path / "theirs")
        bigger = resized.load(type(resized.model)(**vars(resized.model) | {"vocab_size": 43})).eval()
        theirs.resize_token_embeddings(43, mean_resizing=False)
        theirs.get_input_embeddings().weight[40:] = theirs.get_input_embeddings().weight[:40].mean(0)
        torch.testing.assert_close(bigger(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_text_gets_the_tokenizer_of_the_weights_unless_another_one_is_given():
    start, config = SimpleNamespace(tokenizer=Path("theirs")), TrainerConfig()
    assert with_tokenizer_of(config, start).data.prepare.tokenizer == Path("theirs")
    mine = replace(config, data=replace(config.data, prepare=replace(config.data.prepare, tokenizer=Path("mine"))))
    assert with_tokenizer_of(mine, start).data.prepare.tokenizer == Path("mine")


def test_a_run_a_checkpoint_and_an_export_are_the_same_start(finished):
    newest = finished / "checkpoints" / "step-00000006"
    starts = [find_initial_weights(path) for path in (finished, finished / "model", newest, finished / "checkpoints")]
    exported = dict(load_pretrained(finished / "model").named_parameters())
    for start in starts:
        weights = dict(start.load().named_parameters())
        assert weights.keys() == exported.keys() and all(torch.equal(weights[name], exported[name]) for name in weights)
        assert start.text_tokenizer().identity == TextTokenizer.load(finished / "model").identity
    assert [start.is_checkpoint for start in starts] == [False, False, True, True]


def test_a_checkpoint_of_many_ranks_is_one_to_start_from(tmp_path, prepared):
    from shared.trainer.launch import start
    from shared.trainer.modes.pretrain import loaders

    config = parse_words(TrainerConfig, [str(settings_file(tmp_path, prepared)), "parallel.fully_sharded=2", "report.export=false"])
    assert start.command_of("fsdp2", [str(tmp_path / "tiny.yaml")])[1] == 2

    def work(world):
        run = build(config, Console(quiet=True), world)
        run.engine.fit(*loaders(run.config, run.text, run.strategy.mesh), steps=2)
        return run.strategy.full_weights()

    wanted = run_threads(work, 2)[0]
    model = find_initial_weights(tmp_path / "run").load()
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in logical_parameters(model).items())


def test_a_run_goes_on_from_another_and_is_resumed_only_from_the_same_weights(tmp_path, prepared, finished):
    shutil.copytree(finished / "model", tmp_path / "base")
    words = ("steps=2", "optimizer.name=adamw", "schedule.warmup_steps=0", "schedule.decay_steps=0")
    config = tuned(tmp_path, prepared, tmp_path / "base", *words)
    assert config.model.hidden_size == 32 and config.model.num_hidden_layers == 2
    run = build(config, Console(quiet=True))
    base = load_pretrained(tmp_path / "base")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(run.engine.model.parameters(), base.parameters(), strict=True))
    assert run.mode.tokenizer.identity == TextTokenizer.load(tmp_path / "base").identity
    run.engine.fit(*run.mode.loaders(run.config, run.strategy), steps=2)
    moved = tmp_path / "moved"
    (tmp_path / "base").rename(moved)
    again = tuned(tmp_path, prepared, moved, *words)
    build(again, Console(quiet=True))  # the same weights in another place
    other = TransformerModel(base.config, MIXTURE, seed=8)
    save_pretrained(other, moved)
    with pytest.raises(CourseError, match=r"began with other weights than start_from=.*moved has now"):
        build(again, Console(quiet=True))


def test_an_older_run_is_not_taken_for_one_that_started_elsewhere(tmp_path, prepared, finished):
    for name, change in (("absent", lambda path: path.unlink()), ("null", lambda path: None)):
        shutil.copytree(finished, tmp_path / name / "run")
        change(tmp_path / name / "run" / "start.json")
        done = train(settings_file(tmp_path / name, prepared))
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"hidden_size": 64}, "model.hidden_size is 64, and the model in start_from"),
        ({"num_hidden_layers": 3}, "has 2: leave it out"),
        ({"experts": {"num_experts": 2, "moe_intermediate_size": 8}}, "model.experts is"),
        ({"tie_word_embeddings": True}, "model.tie_word_embeddings is True"),
        ({"hiden_size": 64}, "Did you mean 'model.hidden_size'?"),
        ({"num_key_value_heads": None, "hidden_dropout": 0.25, "max_position_embeddings": 128, "vocab_size": 5}, None),
    ],
)
def test_a_model_section_that_contradicts_the_weights_is_refused_by_name(tmp_path, finished, prepared, section, says, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"start_from": str(finished), "model": section, "data": {"seq": 96}}))
    if says:
        with pytest.raises(SystemExit):
            parse_words(TrainerConfig, [str(file)])
        said = " ".join(capsys.readouterr().err.split())
        assert says in said
        if "leave it out" in said:  # as no word of a command line could, where the file inherits it
            assert "(model=null " in said and parse_words(TrainerConfig, [str(file), "model=null"]).model.hidden_size == 32
    else:
        model = parse_words(TrainerConfig, [str(file)]).model
        assert (model.hidden_dropout, model.max_position_embeddings, model.num_key_value_heads, model.hidden_size) == (0.25, 128, 1, 32)


def test_experts_losses_may_differ_and_their_number_may_not(tmp_path, capsys):
    saved(tmp_path / "mixture", "mixture")
    file = tmp_path / "run.yaml"
    words = ["model.experts.balance_coefficient=0.5", "model.experts.num_experts=8"]
    file.write_text(json.dumps({"start_from": str(tmp_path / "mixture"), "data": {"seq": 96}}))
    assert parse_words(TrainerConfig, [str(file), words[0]]).model.experts.balance_coefficient == 0.5
    with pytest.raises(SystemExit):
        parse_words(TrainerConfig, [str(file), *words])
    assert "model.experts is" in capsys.readouterr().err


def test_another_vocabulary_is_refused_and_a_longer_one_is_taken(tmp_path, prepared, finished):
    tokenizer = TextTokenizer.load(finished / "model")
    tokenizer.tokenizer.add_special_tokens(["<|new|>"])
    tokenizer.save_pretrained(tmp_path / "longer", 96)
    other = TextTokenizer.train(["some other text " * 50], 512, 4)
    other.save_pretrained(tmp_path / "other", 96)
    run = build(tuned(tmp_path / "a", prepared, finished, f"data.prepare.tokenizer={tmp_path / 'longer'}"), Console(quiet=True))
    rows = run.engine.model.embedding.tokens.weight
    assert len(rows) == 513 and torch.equal(rows[512], rows[:512].double().mean(0).float())
    with pytest.raises(CourseError, match="another vocabulary than the model in start_from"):
        build(tuned(tmp_path / "b", prepared, finished, f"data.prepare.tokenizer={tmp_path / 'other'}"), Console(quiet=True))


def test_a_damaged_checkpoint_and_what_is_no_model_are_refused(tmp_path, finished):
    shutil.copytree(finished, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-00000006"
    with open(step / "weights.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(CourseError, match="weights.safetensors has 1000 bytes"):
        find_initial_weights(step).load()
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    for name, says in (("empty", "which is not a model"), ("none", "which does not exist"), ("broken", "is missing, and a llama model")):
        with pytest.raises(CourseError, match=says):
            find_initial_weights(tmp_path / name)
    assert load_file(finished / "model" / "model.safetensors")  # the run itself was left alone
    materialize(find_initial_weights(finished / "model").open(), "cpu", 0)


def test_rows_that_are_kept_apart_are_the_same_in_every_slice():
    table = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    rows = MeanRows(partial(part_of, table), table.shape, apart=True)
    whole = rows((0, 0), (10, 8))
    assert torch.equal(whole[:6], table) and len({tuple(row) for row in whole[6:].tolist()}) == 4
    for first, count, column, width in [(0, 5, 0, 8), (5, 5, 0, 8), (7, 3, 4, 4), (0, 10, 3, 2)]:
        assert torch.equal(rows((first, column), (count, width)), whole[first : first + count, column : column + width])


def test_a_model_with_new_rows_keeps_what_its_special_ids_mean(tmp_path):
    """An encoder-decoder's decoder would begin with another token, and an answer would not end."""
    ids = {"eos_token_id": 5, "pad_token_id": 3}
    save_pretrained(TransformerModel(FAMILIES["llama"]), tmp_path, token_ids=ids)
    start = find_initial_weights(tmp_path)
    bigger = start.load(type(start.model)(**vars(start.model) | {"vocab_size": 75}))
    assert len(bigger.embedding.tokens.weight) == 75 and bigger.token_ids.items() >= ids.items()
