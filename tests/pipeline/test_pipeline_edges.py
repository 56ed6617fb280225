"""Facts about stages that equal losses and gradients do not show: what is compiled, what is said once a run, what an option changes."""

import json

import pytest
from memory_table import ADAMW, SMALL
from pipeline_cost_table import STEP, layout_of
from pipeline_runs import on_ranks, runner_of
from trainer_runs import TINY

from shared.parallel.config import ParallelConfig
from shared.parallel.pipeline.schedules import make_schedule
from shared.parallel.pipeline.simulate import Times, make_timeline
from shared.parallel.planning.memory import estimate_memory
from shared.parallel.planning.pipeline_costs import estimate_ranks, pipeline_exchanges
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.layout import pipeline_line, predicted_traffic
from shared.trainer.planner.memory import memory_needed
from shared.trainer.settings import merged, parse_text


def config_of(**changes) -> TrainerConfig:
    return parse_text(TrainerConfig, json.dumps(merged(TINY, changes)))


def test_each_block_of_a_stage_is_compiled():
    def compiled(run):
        run.parallel.model.compile(backend="eager")
        return {name: block._compiled_call_impl is not None for name, block in run.plain.stack.blocks.items()}

    assert on_ranks(compiled, "pp2") == [{"0": True, "1": True}, {"2": True, "3": True}]


def test_names_of_totals_travel_in_the_first_step_alone():
    def gathered(run):
        group, calls = runner_of(run).pp, []
        gather = group.gather_objects
        group.gather_objects = lambda value: calls.append(run.step) or gather(value)
        run.train(3)
        return calls

    assert on_ranks(gathered, "pp2") == [[0], [0]]


@pytest.mark.parametrize("dropout", [0.0, 0.1])  # with it there is no formula for activations
@pytest.mark.parametrize("counts", [[1, 15], [15, 1]])
def test_the_memory_of_a_run_is_what_its_dearest_stage_needs(dropout, counts):
    model = {"hidden_dropout": dropout, "num_hidden_layers": 16}
    one, two = (config_of(model=model, parallel=parallel) for parallel in ({}, {"pipeline_parallel": 2, "pipeline_layers": counts}))
    assert memory_needed(two) > 0.8 * memory_needed(one)


def test_traffic_by_formula_counts_the_bytes_of_every_call():
    config = config_of(data={"batch_size": 8, "micro_batch_size": 2}, parallel={"pipeline_parallel": 2})
    assert predicted_traffic(config)["send over pp, by formula"] == "4 calls, 0.10 MB"  # each of 2 rows of 96 positions of 32 numbers


def test_micro_batches_are_worth_while_up_to_four_for_each_rank():
    for rows, advised in ((14, True), (16, False)):
        config = config_of(data={"batch_size": rows, "micro_batch_size": 2}, parallel={"pipeline_parallel": 2})
        assert ("a smaller one makes more micro-batches" in pipeline_line(config)) == advised


def test_a_ranks_own_bubble_is_of_its_own_work():
    """F 1, F 2, B 4, B 2: of nine seconds the ranks compute three and six."""
    timeline = make_timeline(make_schedule("1f1b", 2, 1), 1, 1, Times(stages=(1.0, 2.0)))
    assert timeline.seconds == 9 and [timeline.bubble(rank) for rank in (0, 1)] == [2.0, 0.5]


def test_options_of_the_formulas_change_the_stages_that_they_concern():
    """Logits stand on the last stage; the copies of packed rows in every block, of two micro-batches on rank 0 and of one on rank 1."""
    layout = layout_of("pp2", "1f1b")

    def more(options: dict) -> list[float]:
        with_it, without = (
            [*estimate_ranks(SMALL, layout, ADAMW, STEP, **given), estimate_memory(SMALL, ParallelConfig(), ADAMW, STEP, **given)]
            for given in (options, {})
        )
        return [mine.activations - theirs.activations for mine, theirs in zip(with_it, without, strict=True)]

    first, last, whole = more({"sliced": False})
    assert first == 0 and last == whole > 0
    first, last, whole = more({"packed": True})
    assert first == 2 * last == whole > 0
    *_, totals = pipeline_exchanges(SMALL, layout, STEP, metrics=3)
    assert totals.part == "totals" and totals.bytes == 8 * 5
