"""Floor 12: the layout search finds what trying everything finds, names every layout's fate, and its words give the configuration back."""

import json
from dataclasses import asdict, replace
from itertools import product

import pytest
import yaml
from click.testing import CliRunner
from products import layouts as parity_layouts

from shared.course.cli import cli
from shared.course.paths import CHECKOUT
from shared.moe.config import MixtureConfig, MixtureModelConfig
from shared.optim.config import OptimizerConfig
from shared.parallel.config import layout_name
from shared.trainer.config import DataConfig, TrainerConfig
from shared.trainer.planner import budget
from shared.trainer.planner.budget import HEADS, Law, laws, propose, sized
from shared.trainer.planner.command import run_words, seconds_of
from shared.trainer.planner.hardware import parse_hardware
from shared.trainer.planner.opening import open_planned
from shared.trainer.planner.plan import plan_run
from shared.trainer.planner.scaling_law import CHINCHILLA, FrontierLaw, write_fit
from shared.trainer.planner.search import RECOMPUTED, SCHEDULES, layouts, products, search_layouts

FILE = CHECKOUT / "chapters" / "12_grpo" / "two_3090s.yaml"
MODEL = MixtureModelConfig(vocab_size=8192, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1536)
CONFIG = TrainerConfig(
    precision="bfloat16", model=replace(MODEL, max_position_embeddings=512), optimizer=OptimizerConfig("adamw"),
    data=DataConfig(seq=512, batch_size=8, micro_batch_size=2),
)  # fmt: skip
EXPERTS = replace(CONFIG, model=replace(CONFIG.model, experts=MixtureConfig(4, 256)))


def with_memory(word: str, gigabytes: float):
    hardware = parse_hardware(word)
    return replace(hardware, device=replace(hardware.device, memory=gigabytes * 1e9 + 1.5e9))


def everything(config: TrainerConfig, hardware, ranks: int) -> dict:
    """Layout -> the shortest step of all its schedules, micro-batches and recomputations that fit, or None. Without layouts refused."""
    found: dict[str, float | None] = {}
    for layout in layouts(config.parallel, ranks, config.model.experts is not None):
        for (schedule, chunks), rows, how in product(SCHEDULES, (1, 2, 4, 8), RECOMPUTED):
            try:
                parallel = replace(layout, pipeline_schedule=schedule, pipeline_chunks=chunks, activation_checkpointing=how)
                plan = plan_run(replace(config, parallel=parallel, data=replace(config.data, micro_batch_size=rows)), hardware)
            except ValueError:
                continue
            best = found.setdefault(layout_name(layout))
            if plan.fits:
                found[layout_name(layout)] = min(plan.seconds.total, best or plan.seconds.total)
    return found


@pytest.mark.parametrize("gigabytes", [24, 0.25])
@pytest.mark.parametrize("config, word", [(CONFIG, "2x3090"), (EXPERTS, "2xA100"), pytest.param(CONFIG, "4x3090", marks=pytest.mark.slow)])
def test_the_search_finds_what_trying_everything_finds(config, word, gigabytes):
    """Within the hundredth that is left to the file's own settings."""
    hardware = with_memory(word, gigabytes)
    found, expected = search_layouts(config, hardware, hardware.ranks), everything(config, hardware, hardware.ranks)
    fit = {layout: seconds for layout, seconds in expected.items() if seconds is not None}
    assert {each.plan.layout for each in found.best} == fit.keys()
    assert all(fit[each.plan.layout] <= each.seconds <= fit[each.plan.layout] / 0.99 for each in found.best)
    assert [each.seconds for each in found.best] == sorted(each.seconds for each in found.best)
    assert len(found.too_large) == len(expected) - len(fit) and all(missing > 0 for missing in found.too_large)
    if gigabytes < 1:
        assert 0 < len(fit) < len(expected)


def test_what_is_missing_is_the_least_that_any_setting_needs():
    hardware = with_memory("2x3090", 0.01)
    found = search_layouts(CONFIG, hardware, 2)
    assert not found.best
    small = replace(CONFIG, data=replace(CONFIG.data, micro_batch_size=1))
    every = [replace(each, activation_checkpointing=how) for each in layouts(CONFIG.parallel, 2, False) for how in RECOMPUTED]
    least = min(plan_run(replace(small, parallel=each), hardware).held.peak - found.usable for each in every)
    assert min(found.too_large) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_layouts_are_those_of_the_parity_table_but_for_two_contradictions(ranks):
    parts = lambda word: {part.rstrip("0123456789") for part in word.split("_")}  # noqa: E731
    contradicts = lambda word: {"zero", "fsdp"} <= parts(word) or ("pp" in parts(word) and "zero2" in word)  # noqa: E731
    expected = {word for word in parity_layouts(ranks) if not contradicts(word)}
    assert {layout_name(each) for each in layouts(CONFIG.parallel, ranks, True)} == expected


def test_many_ranks_leave_out_only_what_needs_more_for_the_same():
    names = {layout_name(each) for each in layouts(CONFIG.parallel, 64, False)}
    assert len(list(products(64, 5))) == 210  # ways to put six factors of 2 on five axes
    assert {"dp64_zero1", "fsdp64", "pp8_dp4_tp2_zero1_sp", "fsdp8_tp8_sp"} <= names
    assert not any("tp" in name and "_sp" not in name for name in names) and "dp64" not in names


def test_a_refused_layout_is_counted_under_the_trainers_own_sentence():
    one_head = replace(CONFIG.model, num_attention_heads=1, num_key_value_heads=1)
    found = search_layouts(replace(CONFIG, model=one_head), parse_hardware("2x3090"), 2)
    ((_, sentences),) = [(kind, each) for kind, each in found.refused.items() if "num_attention_heads" in kind]
    assert len(sentences) == 2 and sentences[0].startswith("parallel.tensor_parallel 2 does not divide num_attention_heads 1")
    assert found.layouts == 8


def test_words_give_the_configuration_back():
    config = open_planned(FILE, (), "one")
    for each in search_layouts(config, parse_hardware("2x3090"), 2).best:
        again = open_planned(FILE, each.words(config), each.plan.layout)
        assert plan_run(again, parse_hardware("2x3090")) == each.plan
        assert run_words(each, config, FILE).startswith(f"make run LAYOUT={each.plan.layout} CONFIG={FILE}")


def course(*words: str):
    return CliRunner().invoke(cli, ["plan", str(FILE), "--hardware", "2x3090", *words])


def test_the_command_lists_layouts_and_says_how_to_run_the_best():
    shown = course("--search")
    assert shown.exit_code == 0 and "8 layouts of 2 ranks, 8 fit" in shown.output and "The fastest: make run LAYOUT=fsdp2" in shown.output
    rows = {line.split()[0]: line.split()[-1] for line in shown.output.splitlines() if line.strip().startswith(("pp2", "dp2 "))}
    assert rows["pp2"] in ("gpipe", "1f1b", "zero_bubble", "interleaved") and rows["dp2"] not in ("gpipe", "1f1b", "zero_bubble")
    found = json.loads(course("--search", "--json").stdout)
    assert found["best"][0]["layout"] == "fsdp2" and found["refused"] == [] and found["missing"] == []
    none = course("--search", "model.hidden_size=8192", "model.num_attention_heads=64", "model.num_key_value_heads=64")
    assert none.exit_code == 1 and "need more than the 22.5 GB of a card, by at least" in none.output


def test_layouts_whose_memory_has_no_formula_are_not_listed():
    """Adapters in a pipeline or over a cut context; and tensor parallelism with sequence parallelism over a frozen base is planned."""
    config = open_planned(FILE.with_name("two_3090s_qlora.yaml"), (), "one")
    found = search_layouts(config, parse_hardware("2x3090"), 2)
    assert {each.plan.layout for each in found.best} == {"dp2", "dp2_zero1", "dp2_zero2", "fsdp2", "tp2", "tp2_sp"} and found.unknown == 2
    assert len({each.plan.parameters.trained for each in found.best}) == 1
    shown = CliRunner().invoke(cli, ["plan", str(FILE.with_name("two_3090s_qlora.yaml")), "--hardware", "2x3090", "--search"]).output
    assert "For 2 there is no formula" in shown and "short-lived buffers are not counted" in shown


@pytest.mark.parametrize("words, says", [
    (("--search", "--layout", "dp2"), "choose the layout"), (("--budget", "soon"), "give a time such as 90m, 8h or 3d"),
    (("--search", "model.num_attention_heads=7"), "num_attention_heads"),
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(words, says):
    failed = course(*words)
    assert failed.exit_code != 0 and says in failed.output and "Traceback" not in failed.output


def test_a_budget_gets_the_rung_with_the_lowest_loss():
    """Beside every rung of the ladder, each in its best layout."""
    hardware, seconds = parse_hardware("3090"), seconds_of("2h")
    law = Law("a law", CHINCHILLA, "nats", 1e18)
    (found,) = propose(CONFIG, hardware, 1, seconds, [law])
    losses = {}
    for heads in HEADS:
        best = search_layouts(replace(CONFIG, model=sized(CONFIG.model, heads)), hardware, 1).best
        if best:
            losses[heads] = float(CHINCHILLA.loss(best[0].plan.parameters.total, best[0].plan.tokens_per_second * seconds))
    assert found.loss == pytest.approx(min(losses.values())) and len(losses) > 5
    assert found.beyond == pytest.approx(6 * found.parameters * found.tokens / 1e18)
    assert found.steps * found.best.plan.tokens == pytest.approx(found.tokens, rel=0.01)


def test_a_budget_takes_your_own_fit_before_the_published_ones(tmp_path, monkeypatch):
    written = yaml.safe_load(FILE.with_name("scaling.yaml").read_text())["grid"]["output"]
    assert budget.FIT == CHECKOUT / written / "scaling_fit.json"
    monkeypatch.setattr(budget, "FIT", tmp_path / "fit.json")
    assert [law.name for law in laws()] == ["Hoffmann et al. 2022", "Besiroglu et al. 2024"]
    write_fit(budget.FIT, CHINCHILLA, unit="bits per byte", largest={"flops": 2e12})
    by_law = Law("your runs, approach 3", CHINCHILLA, "bits per byte", 2e12)
    assert laws()[0] == by_law and len(laws()) == 3
    best = FrontierLaw(1.0, 50.0, 0.1, 0.3, 0.5, 0.1)
    write_fit(budget.FIT, CHINCHILLA, unit="bits per byte", largest={"flops": 2e12}, frontier=asdict(best))
    assert laws()[:2] == [Law("your runs, approach 2", best, "bits per byte", 2e12), by_law] and len(laws()) == 4


def test_a_frontier_law_proposes_the_size_that_it_calls_the_best():
    """k flops^a, but for the steps of the ladder: a rung is about 1.8 times the one before it."""
    best = FrontierLaw(0.5, 100.0, 0.1, 0.1, 0.5, 0.1)
    (found,) = propose(CONFIG, parse_hardware("3090"), 1, seconds_of("8h"), [Law("a frontier", best, "nats", 1e18)])
    assert 0.4 < found.parameters / (best.k * found.flops**best.a) < 2.5


def test_a_longer_budget_gets_a_larger_model_and_more_tokens():
    law = Law("a law", CHINCHILLA, "nats", 1e18)
    short, long = (propose(CONFIG, parse_hardware("3090"), 1, seconds_of(word), [law])[0] for word in ("1h", "3d"))
    assert short.parameters < long.parameters and short.tokens < long.tokens and long.loss < short.loss
