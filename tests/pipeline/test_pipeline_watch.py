"""What chapter 08's run says of a pipeline (bubbles, times, kept activations) against timelines made by hand; and how one is drawn."""

import io
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from rich.console import Console

from chapters import pipeline_watch
from chapters.pipeline_watch import Kept, KeptBytes, Stamped, formula, report, seconds_of
from shared.course import figures
from shared.parallel.config import ParallelConfig
from shared.parallel.pipeline.schedules import Action, make_schedule
from shared.parallel.pipeline.simulate import Span, Times, make_timeline

CHUNKS = ParallelConfig(data_parallel=2, pipeline_parallel=2, pipeline_schedule="interleaved", pipeline_chunks=2)
UNEVEN = Times(0.1, 0.1, 0.2, stages=(1.0, 2.0, 3.0, 5.0))


def told(timeline, began: float = 100.0) -> list[dict]:
    """By rank of a pipeline, what its watch says."""
    rows = [[[*action, began + begin, began + end] for action, begin, end in row] for row in timeline.rows]
    return [{"activations": 1e6 * (rank + 1), "graphs": timeline.most[rank], "actions": row} for rank, row in enumerate(rows)]


def text_of(table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_a_run_of_uneven_stages_is_told_with_its_own_times(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "draw_pipeline", lambda axes, rows, *options, **names: drawn.append((rows, options)))
    timeline = make_timeline(make_schedule("interleaved", 2, 4, 2), 4, 2, UNEVEN)
    first, last = told(timeline)
    nobody = {"activations": 0, "graphs": 0, "actions": [["F", 0, 0, 0.0, 99.0]]}  # the other replica's ranks
    (*said, table), bubbles = report([first, nobody, last, nobody], CHUNKS, 4, tmp_path / "timeline.png")
    busy = [4 * 0.4 * (1 + 3), 4 * 0.4 * (2 + 5)]
    waits = 2 * timeline.seconds / sum(busy) - 1
    assert list(bubbles.values()) == pytest.approx([1 / 8, 1 / 8, waits, waits]) and waits > 0.3
    assert [line for line in said if line.startswith("  ")][:4] == [f"  {share:6.1%}  {which}" for which, share in bubbles.items()]
    rows = [line.split("│")[1:-1] for line in text_of(table).splitlines() if line.startswith("│")]
    for rank, cells in enumerate(rows):
        ms = [f"{1e3 * each:.0f}" for each in (busy[rank], timeline.seconds - busy[rank])]
        most = str(timeline.most[rank])
        assert [cell.strip() for cell in cells] == [str(rank), most, most, f"{rank + 1}.00", *ms]
    (even, _), (measured, (unit, *_)) = drawn
    assert [row[-1].end for row in even] == [row[-1].end for row in make_timeline(make_schedule("interleaved", 2, 4, 2), 4, 2).rows]
    assert unit == "milliseconds"
    assert [row[0].begin for row in measured] == pytest.approx([1e3 * row[0].begin for row in timeline.rows])
    assert [row[-1].end for row in measured] == pytest.approx([1e3 * row[-1].end for row in timeline.rows])


def test_without_times_the_simulation_alone_is_told(tmp_path):
    ranks = [{"activations": 1}, {"activations": 2}]
    (*said, _), bubbles = report(ranks, ParallelConfig(pipeline_parallel=2), 4, tmp_path / "timeline.png")
    assert list(bubbles.values()) == [1 / 4, 1 / 4] and not any("measured" in line for line in said)


def test_zero_bubbles_formula_holds_from_as_many_micro_batches_as_ranks():
    """Qi et al. 2023, table 1, of three parts that take equally long: shorter by two of three."""
    assert list(formula("zero_bubble", 4, 4, 1).values()) == [3 / 12] and formula("zero_bubble", 4, 3, 1) == {}
    assert make_timeline(make_schedule("zero_bubble", 4, 4), 4).bubble() == pytest.approx(3 / 12)


def test_one_slow_action_does_not_change_what_such_actions_take():
    rows = [[Span(Action("F", number, 1), 0.0, seconds) for number, seconds in enumerate((1.0, 2.0, 9.0))] for _ in range(3)]
    assert seconds_of(rows) == {("F", stage): 2.0 for stage in (3, 4, 5)}


def test_an_action_begins_when_its_message_has_arrived(monkeypatch):
    clock = count()
    monkeypatch.setattr(pipeline_watch.time, "perf_counter", lambda: next(clock))
    actions = Stamped(["waits", "does not"])
    receive = actions.after(lambda *arguments: None)
    for action in actions:
        if action == "waits":
            receive()
    assert actions.times == [(1, 2), (3, 4)]
    assert list(actions) == ["waits", "does not"] and len(actions.times) == 2  # of the last time alone


def test_a_kept_tensor_counts_once_and_weights_do_not():
    model = torch.nn.Linear(8, 8)
    kept, tensor = KeptBytes(model), torch.zeros(10, 4)
    two = [Kept(kept, tensor), Kept(kept, tensor[:2]), Kept(kept, model.weight.detach().T)]
    assert (kept.now, kept.most) == (160, 160)
    del two[0]
    assert kept.now == 160
    del two[0]
    assert (kept.now, kept.most) == (0, 160)
    two.append(Kept(kept, torch.zeros(5)))
    assert (kept.now, kept.most) == (20, 160)


def test_pytorchs_pipeline_is_not_watched_action_by_action():
    watch = pipeline_watch.PipelineWatch(SimpleNamespace(module=torch.nn.Linear(2, 2), engines=[object()]), 4)
    with watch.measured_bytes():
        torch.nn.functional.silu(torch.zeros(16, requires_grad=True) * 1)
    assert watch.told() == {"activations": 64}


def test_a_drawn_pipeline_has_a_block_for_each_action_where_it_took_place():
    timeline = make_timeline(make_schedule("interleaved", 2, 2, 2), 2, 2, Times(1.0, 1.0, 2.0, transfer=0.5))
    axes = Figure().subplots()
    figures.draw_pipeline(axes, timeline.rows, "seconds", width=100)
    boxes = [(box.get_x(), round(box.get_y(), 2), box.get_width(), round(box.get_height(), 2), box.get_facecolor()) for box in axes.patches]
    colors = {name: to_rgba(color) for name, color in figures.PASSES.items()}
    spans = [(rank, *span) for rank, row in enumerate(timeline.rows) for span in row]
    expected = [(begin, rank - 0.4, end - begin, 0.8, colors[action.kind]) for rank, action, begin, end in spans]
    assert [box for box in boxes if box[3] == 0.8 and box[2] < timeline.seconds] == expected
    bars = [(box[0], box[2]) for box in boxes if box[3] == 0.1]
    assert bars == [(begin, end - begin) for _, action, begin, end in spans if action.chunk]
    assert [box[:4] for box in boxes if box[2] == timeline.seconds] == [(0, rank - 0.4, timeline.seconds, 0.8) for rank in (0, 1)]
    assert [text.get_text() for text in axes.texts] == [f"{action.kind}{action.microbatch}" for _, action, *_ in spans]
    assert [text.get_position()[0] for text in axes.texts] == [(begin + end) / 2 for *_, begin, end in spans]
    assert axes.get_xlim() == (0, timeline.seconds) and axes.get_ylim() == (1.5, -0.5) and axes.get_xlabel() == "time, in seconds"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]


@pytest.mark.parametrize("width, text", [(3.0, "F7"), (1.5, "7"), (0.8, "")])
def test_a_blocks_text_is_as_long_as_there_is_room(width, text):
    axes = Figure().subplots()
    figures.draw_pipeline(axes, [[Span(Action("F", 7), 0.0, 1.0), Span(Action("B", 7), 1.0, 10.0)]], width=width)
    assert axes.texts[0].get_text() == text and [each.get_color() for each in axes.texts] == ["black", "white"]
