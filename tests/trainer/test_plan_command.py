"""`course plan`: every shipped configuration, what the files say of themselves, measured memory and traffic, JSON, and refusals."""

import json
import re
from collections import Counter
from dataclasses import replace

import memory_table
import pytest
import torch
from click.testing import CliRunner
from memory_table import ADAMW, ROWS, SMALL, measure

from shared.course.cli import cli
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.moe.config import MixtureModelConfig
from shared.parallel.comm.threads import run_threads
from shared.parallel.config import parse_layout
from shared.parallel.planning.activations import whole_of
from shared.parallel.planning.data_costs import weights_of
from shared.trainer.config import DataConfig, TrainerConfig
from shared.trainer.pipeline.stages import read_pipeline
from shared.trainer.planner.hardware import parse_hardware
from shared.trainer.planner.memory import step_sizes
from shared.trainer.planner.opening import open_planned, reward_shape
from shared.trainer.planner.plan import Plan, plan_run, trained_of
from shared.trainer.planner.traffic import stage_traffic

FOLDER, SEQ = CHECKOUT / "chapters" / "12_grpo", 40
OF_OTHERS = ("run.yaml", "grpo_study.yaml", "scaling.yaml", "pretrained_temperature.yaml")
OF_THE_TRAINER = [path for path in sorted(FOLDER.glob("*.yaml")) if path.name not in OF_OTHERS]
SAID = re.compile(r"`course plan`: a card holds at most ([\d.]+) GB, and the run takes ([\d.]+) hours on ([\w-]+)")


def plan_of(name: str, hardware: str, *words: str, layout: str | None = None) -> Plan:
    config = open_planned(FOLDER / name, words, layout)
    return plan_run(config, parse_hardware(hardware), reward_shape(config))


def called(*words: str) -> tuple[int, str]:
    """Exit code and output of the command line, in this process."""
    done = CliRunner().invoke(cli, ["plan", *words], prog_name="course")
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("file", OF_THE_TRAINER, ids=lambda path: path.stem)
def test_every_shipped_configuration_can_be_planned_without_its_data_and_fits(file):
    plan = plan_of(file.name, "2x3090" if file.name.startswith("two") else "3090")
    assert plan.fits and plan.seconds.total > 0 and plan.parameters.trained <= plan.parameters.total


@pytest.mark.parametrize("file", sorted(FOLDER.glob("two_3090s*.yaml")), ids=lambda path: path.stem)
def test_the_files_say_what_they_hold_and_take(file):
    """To the digits of the comment, which stands on one line or several."""
    [(gigabytes, hours, hardware)] = SAID.findall(file.read_text(encoding="utf-8").replace("\n# ", " "))
    plan = plan_of(file.name, hardware)
    assert (f"{plan.held.peak / 1e9:.1f}", f"{plan.hours:.1f}") == (gigabytes, hours)


@pytest.mark.parametrize("name, hardware", [("laptop", "3090"), ("two_3090s", "2x3090")])
def test_every_stage_of_the_shipped_pipelines_fits(name, hardware):
    """With the words that the pipeline gives to a stage, and the model of its first one."""
    stages = read_pipeline(FOLDER / "pipelines" / f"{name}.yaml").stages
    model = replace(stages[0].config.model, vocab_size=stages[0].config.data.prepare.vocab_size)
    for stage in stages:
        plan = plan_run(replace(stage.config, model=model), parse_hardware(hardware))
        assert plan.fits and plan.ranks == (1 if name == "laptop" else 2), stage.name


def config_of(layout: str) -> TrainerConfig:
    data = DataConfig(seq=SEQ, batch_size=2 * ROWS * parse_layout(layout).data_ranks, micro_batch_size=ROWS)
    model = MixtureModelConfig(**vars(SMALL))
    return TrainerConfig(model=model, data=data, parallel=parse_layout(layout), optimizer=ADAMW, precision="float32")


def test_memory_is_what_one_process_holds(monkeypatch):
    """Of packed rows, by chapter 06's meter, which knows nothing of the formulas."""
    inner = memory_table.batch

    def packed(rows: int = ROWS, seq: int = SEQ) -> dict[str, torch.Tensor]:
        places = torch.arange(seq).expand(rows, seq)
        return inner(rows, seq) | {"documents": places // 10, "positions": places % 10}

    monkeypatch.setattr(memory_table, "batch", packed)
    config = config_of("one")
    [(found, _)] = run_threads(measure, 1, config.parallel, ADAMW, 2, "float32", SMALL, SEQ)
    held = plan_run(config, parse_hardware("3090")).held
    counters = 4 * len(weights_of(SMALL, config.parallel, whole_of(SMALL)))  # AdamW counts the steps of each parameter
    assert {kind: getattr(held, kind) for kind in vars(found)} == vars(found) | {"optimizer": found.optimizer - counters}


@pytest.mark.parametrize("layout", ["dp2_zero1", "fsdp2", "tp2_sp", "pp2"])
def test_traffic_is_the_ledger_of_a_real_step(layout):
    config = config_of(layout)
    traces = [trace for _, trace in run_threads(measure, 2, config.parallel, ADAMW, 2, "float32", SMALL, SEQ)]
    step, hardware = step_sizes(config), parse_hardware("2x3090")
    for stage in range(config.parallel.pipeline_parallel):
        calls, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for each in stage_traffic(config, hardware, step, trained_of(config), stage):
            calls[each.operation, each.axis] += each.calls
            sizes[each.operation, each.axis] += each.calls * each.bytes
        assert (calls, sizes) == (traces[stage].calls(), traces[stage].bytes())


def test_the_report_says_what_fits_what_limits_and_where_bytes_go():
    code, said = called(str(FOLDER / "two_3090s_tp2.yaml"), "--hardware", "2x3090")
    assert code == 0 and "layout tp2_sp, bfloat16" in said and "It fits, with 17." in said and "reduce_scatter of layers tp 2" in said
    code, said = called(str(FOLDER / "two_3090s_ep2.yaml"), "data.micro_batch_size=16", "--hardware", "2x3090")
    assert code == 1 and "It does not fit" in said and "What limits: memory" in said and "parallel.activation_checkpointing=full: " in said


def test_json_has_every_number():
    done = CliRunner().invoke(cli, ["plan", str(FOLDER / "two_3090s.yaml"), "--hardware", "2x8xH100", "--layout", "dp16", "--json"])
    found = json.loads(done.output)
    assert done.exit_code == 0 and found["fits"] and found["layout"] == "dp16" and found["ranks"] == 16
    assert found["seconds"]["total"] == pytest.approx(sum(value for name, value in found["seconds"].items() if name != "total"))
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"]["total"])
    assert found["memory"][0]["peak"] >= found["memory"][0]["weights"] and found["traffic"][0][0]["operation"] == "all_reduce"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--hardware", "2x3080"), "There is no hardware '2x3080'"),
        (("--hardware", "3090"), "The layout has 2 ranks and 3090 has 1 card"),
        (("--layout", "dp3", "--hardware", "8xH100"), "cannot be shared equally among 3 ranks"),
        (("--layout", "tp5", "--hardware", "8xH100"), "parallel.tensor_parallel 5 does not divide num_attention_heads 12"),
        (("--layout", "xx2"), "The layout 'xx2' is not understood"),
        (("model.hidden_sizes=3",), "Did you mean"),
        (("--model", "llama-9"), "--model is llama-9: give a folder with a model, or one of"),
        (("fast",), "'fast' is not a setting: write key=value."),
    ],
)
def test_what_cannot_be_is_refused_in_the_trainers_own_sentence(words, sentence):
    done = CliRunner().invoke(cli, ["plan", str(FOLDER / "two_3090s.yaml"), *words], standalone_mode=False)
    said = str(done.exception) if isinstance(done.exception, CourseError) else done.output
    assert sentence in said and done.exit_code


def test_a_model_of_another_name_takes_its_place():
    small, large = (plan_run(open_planned(FOLDER / "two_3090s_qlora.yaml", model=name), parse_hardware("2x3090"))
                    for name in ("llama-3.2-1b", "llama-3.1-8b"))  # fmt: skip
    assert 1.2e9 < small.parameters.total < 1.3e9 and 8.0e9 < large.parameters.total < 8.1e9
    assert plan_of("two_3090s_qlora.yaml", "2x3090").parameters == large.parameters  # whose name start_from has
