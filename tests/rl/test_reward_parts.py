"""The parts of a reward reach the metrics: the mean over all ranks' answers, and each with its own answer when groups are thrown away."""

from dataclasses import replace
from statistics import fmean

from grpo_runs import GRPO, GRPORun
from lora_runs import layout_of
from ppo_runs import scripted

from shared.parallel.comm.threads import run_threads


class Parts:
    """Whether an answer ended; its length is a part as well."""

    def __call__(self, samples):
        self.parts = [{"length": float(len(each.completion.ids)), "ended": float(each.completion.ended)} for each in samples]
        return [each["ended"] for each in self.parts]


def rolled_out(world, layout, **settings):
    run = GRPORun(world, layout, sampler=scripted, **settings)
    run.loader.reward = Parts()
    return run.loader.roll_out()


def mean_length(opened) -> float:
    return fmean(len(each.completion.ids) for each in opened.samples)


def test_every_rank_knows_the_means_over_all_answers():
    [one] = run_threads(lambda world: rolled_out(world, layout_of("one")), 1)
    for opened in run_threads(lambda world: rolled_out(world, layout_of("dp2")), 2):
        assert opened.metrics["reward/length"] == one.metrics["reward/length"] == mean_length(one)
        assert opened.metrics["reward/ended"] == opened.metrics["ended"] == opened.metrics["reward"]


def test_a_group_that_is_kept_keeps_its_parts():
    [opened] = run_threads(lambda world: rolled_out(world, layout_of("one"), grpo=replace(GRPO, rounds=3)), 1)
    assert opened.metrics["rounds"] > 1 and opened.metrics["reward/length"] == mean_length(opened)
