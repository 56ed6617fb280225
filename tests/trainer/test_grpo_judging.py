"""The mode grpo's held-out tasks and its sampler: what has no room is refused at the start, and no failing check costs a finished run."""

import json

import pytest
from preferring_runs import preferring_config
from rich.console import Console

from shared.course.errors import CourseError
from shared.finetune.instructions import Task
from shared.parallel.comm.threads import run_threads
from shared.trainer.modes import rollouts
from shared.trainer.planner.memory import run_memory
from shared.trainer.run import build

QUIET = Console(quiet=True)


def prompt_of(words: int, held_out: bool) -> str:
    """A prompt of so many words, on the side that its hash decides."""
    prompts = (f"{number} " + "and " * words for number in range(1000))
    return next(prompt for prompt in prompts if Task("task", prompt, "1", "number").held_out == held_out)


def test_a_held_out_task_without_room_for_its_answer_is_refused_at_the_start(tmp_path, base):
    file = tmp_path / "tasks.jsonl"

    def opened(words: int) -> None:
        rows = [{"prompt": prompt_of(1, False), "answer": "1"}, {"prompt": prompt_of(words, True), "answer": "1"}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tasks = f"grpo.tasks.sources=[{{path: '{file}'}}]"
        build(preferring_config(tmp_path, base, "grpo", tasks, "grpo.tasks.held_out=1", "grpo.new_tokens=100"), QUIET)

    opened(1)
    with pytest.raises(CourseError, match="with new_tokens 100 do not fit into a row of 128"):
        opened(25)


def test_a_check_that_fails_on_a_held_out_answer_counts_as_0_after_training(tmp_path, base, monkeypatch):
    run = build(preferring_config(tmp_path, base, "grpo"), QUIET)
    run.mode.loaders(run.config, run.strategy)
    monkeypatch.setattr(run.mode.verdicts, "verifiers", lambda calls: ["it raised"] + [1.0] * (len(calls) - 1))
    with pytest.warns(UserWarning, match="it raised.* It counts as 0.0"):
        assert run.mode.check(run.mode.tasks[:3], ["1", "2", "3"]) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("words", "multiple"), [([], 1), (["parallel.sequence_parallel=true"], 2)])
def test_only_sequence_parallelism_pads_the_tokens_of_a_decoding_step(tmp_path, base, words, multiple):
    config = preferring_config(tmp_path, base, "grpo", "parallel.tensor_parallel=2", *words)

    def work(world):
        run = build(config, QUIET, world)
        loader = run.mode.loaders(run.config, run.strategy)[0]
        run.mode.close()
        return loader.sampler.multiple

    assert run_threads(work, 2) == [multiple] * 2


@pytest.mark.parametrize("words", [(), ("adapter.rank=4", "grpo.reference=false")], ids=["whole", "adapter"])
def test_rollouts_copy_weights_for_the_fused_step_where_the_device_has_room(tmp_path, base, monkeypatch, words):
    config = preferring_config(tmp_path, base, "grpo", *words)
    [needed] = run_memory(config)
    for there, copied in ((2 * needed.drawing, True), (needed.drawing, False)):
        monkeypatch.setattr(rollouts, "memory_of", lambda device, there=there: there)
        run = build(config, QUIET)
        sampler = run.mode.loaders(run.config, run.strategy)[0].sampler
        run.mode.close()
        assert sampler.fused == copied
