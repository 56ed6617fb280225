"""The study of scale as a reader starts it, made so small that it shows nothing but that it runs, continues, and says what it did."""

import json
from importlib import import_module

import pytest
import yaml
from scaling_runs import EQUAL, around_optima
from trainer_runs import SOURCE

from chapters import scaling_grid, scaling_page
from shared.course.errors import CourseError

scaling = import_module("chapters.12_grpo.scaling")

SMALL = {
    "grid": {
        "sizes": [{"width": 16, "layers": 1}, {"width": 32, "layers": 1}, {"width": 48, "layers": 1}],
        "budgets": [1.0e8, 2.0e8, 4.0e8], "shortest": 2, "longest": 40, "big": {"width": 48, "layers": 2}, "big_flops": 4.0e9,
        "seeds": 2, "repeated": [48],
    },
    "data": {
        "prepare": {"sources": [{"path": str(SOURCE), "suffixes": [".py"]}], "vocab_size": 512, "sentinels": 4, "held_out_share": 0.2},
        "seq": 64, "batch_size": 4, "micro_batch_size": 4, "epochs": 1, "held_out_rows": 8,
    },
    "model": {"max_position_embeddings": 64, "tie_word_embeddings": True},
    "optimizer": {"name": "muon", "scaling": "original", "lr": 0.02, "adamw_lr": 0.01},
    "schedule": {"warmup_steps": 1, "minimum": 0.0},
    "precision": "float32",
    "engine": {"device": "cpu", "evaluate_every": 0, "trackers": ["jsonl"], "checkpoint": {"every": 5, "keep_last": 1, "keep_best": False}},
}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder's maker: the words of a study with this name, all of them on one prepared text."""
    folder = tmp_path_factory.mktemp("scaling")

    def words(name, **grid):
        settings = SMALL | {"grid": SMALL["grid"] | {"output": str(folder / name)} | grid}
        settings["data"] = SMALL["data"] | {"prepared": str(folder / "prepared")}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
        return str(folder / f"{name}.yaml"), folder / name

    return words


@pytest.fixture(scope="module")
def finished(study):
    file, output = study("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "DRAWS", 4)
        scaling.main([file])
    return file, output


def rows_of(output):
    rows = json.loads((output / "grid.json").read_text())
    return {(row["variant"], row["seed"]): row["figures"]["bits per byte"] for row in rows}


def test_a_study_leaves_what_it_promises(finished):
    _, output = finished
    rows = rows_of(output)
    assert len(rows) == 10 and {seed for _, seed in rows} == {0, 1}, "eight cells, and both of width 48 twice"
    prediction, big = (json.loads((output / name).read_text()) for name in ("prediction.json", "big.json"))
    assert prediction["written"] <= big["finished"] and prediction["flops"] == big["flops"] > 8 * 4.1e8
    page, fit = (output / "SCALING.md").read_text(), json.loads((output / "scaling_fit.json").read_text())
    error = prediction["bits per byte"] / big["bits per byte"] - 1
    assert f"The prediction is {abs(error):.2%} too {'high' if error > 0 else 'low'}." in page
    assert scaling_page.method(prediction) in page and ("frontier" in prediction) == ("That of the law" in page)
    assert all(f"| {loss:.4f} |" in page for loss in rows.values()) and f"| alpha | {fit['law']['alpha']:.4g} |" in page
    assert fit["unit"] == "bits per byte" and 1.5 < fit["bytes_per_token"] < 3
    assert (output / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_approach_2_predicts_where_three_budgets_show_a_minimum():
    law, runs = EQUAL, around_optima(EQUAL, (1e18, 1e19, 1e20, 1e21))
    best, tokens = law.optimum(1e22)
    assert scaling.by_frontier(runs[:10], best, tokens) is None
    found = scaling.by_frontier(runs, best, tokens)
    low, high = found["interval"]
    assert found[scaling.LOSS] == pytest.approx(law.loss(best, tokens), rel=1e-3) and low <= found[scaling.LOSS] <= high
    by_law = {scaling.LOSS: 3.0, "interval": (2.9, 3.1)}
    said = [scaling_page.method(each | {"law": by_law}) for each in (found, by_law)]
    assert said[0].startswith("Approach 2 predicts here") and "3.0000 (2.9000 to 3.1000)" in said[0] and "fewer than three" in said[1]
    told = scaling_page.miss(found | {"law": by_law, "written": "before"}, {scaling.LOSS: 2.5, "finished": "after"})
    share = found[scaling.LOSS] / 2.5 - 1
    assert told.endswith(f"{abs(share):.2%} too {'high' if share > 0 else 'low'}. That of the law, 3.0000, is 20.00% too high.")


def test_a_finished_study_trains_nothing_again_and_keeps_its_prediction(finished, capsys):
    file, output = finished
    before = {name: (output / name).read_bytes() for name in ("grid.json", "prediction.json", "big.json", "scaling_fit.json")}
    scaling.main([file])
    assert before == {name: (output / name).read_bytes() for name in before}
    assert "stays as it was written before" in capsys.readouterr().out


def test_a_branch_of_the_trunk_is_the_whole_run_of_its_length(finished, tmp_path):
    file, output = finished
    grid = scaling.read_grid([file])
    cell = next(cell for cell in grid.cells().values() if cell["width"] == 16 and cell["steps"] > 10)
    whole = scaling_grid.measured(grid, grid.config(scaling_grid.Size(16, 1), cell["steps"], 0, tmp_path), cell["steps"])
    assert whole["bits per byte"] == rows_of(output)[f"16x1, {cell['steps']} steps", 0]


@pytest.mark.parametrize("call", [2, 5])
def test_a_study_that_was_killed_continues_to_the_same_losses(call, study, finished, monkeypatch):
    """Between two trainings of a cell: before a branch, and before a trunk grows."""
    file, output = study(f"killed-{call}", seeds=1, repeated=[])
    calls, fitted = [], scaling_grid.fitted

    def killed(*given, **named):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return fitted(*given, **named)

    monkeypatch.setattr(scaling_grid, "fitted", killed)
    monkeypatch.setattr(scaling_grid, "cost", lambda grid: "")
    with pytest.raises(KeyboardInterrupt):
        scaling.main([file, "--grid"])
    assert len(rows_of(output)) == (call - 1) // 2 if call > 2 else not (output / "grid.json").exists()
    scaling.main([file, "--grid"])
    undisturbed = rows_of(finished[1])
    assert rows_of(output) == {key: loss for key, loss in undisturbed.items() if key[1] == 0}


def runs_that_gain(*lost, width=64):
    """Runs of one size whose lengths double, and what each doubling gains."""
    losses = [3.0 - sum(lost[:number]) for number in range(len(lost) + 1)]
    return [{"width": width, "layers": 1, "seed": 0, "steps": 10 * 2**n, "tokens": 640 * 2**n, scaling_grid.LOSS: loss}
            for n, loss in enumerate(losses)]  # fmt: skip


def test_runs_before_the_bend_are_too_short_for_the_law():
    """What a doubling gains can only shrink in B / tokens^beta; here it grows until the runs of 40 and of 10 steps."""
    assert scaling_page.too_short(runs_that_gain(0.3, 0.2, 0.1)) == []
    assert [row["steps"] for row in scaling_page.too_short(runs_that_gain(0.1, 0.2, 0.3, 0.2))] == [10, 20, 40]
    several = runs_that_gain(0.1, 0.2, 0.1, width=32) + runs_that_gain(0.3, 0.2)
    said = scaling_page.remark(several)
    assert said.startswith("2 of the 7 runs are too short") and "raise grid.shortest above 20" in said
    law = lambda tokens: 1.5 + 40 * tokens**-0.3  # noqa: E731
    follows = [row | {scaling_grid.LOSS: law(row["tokens"])} for row in runs_that_gain(0.1, 0.2, 0.3, 0.2)]
    assert scaling_page.too_short(follows) == [] and "as the law's form demands" in scaling_page.remark(follows)


def test_stages_that_need_others_say_which(study, finished):
    file, _ = study("empty")
    with pytest.raises(CourseError, match="0 of the grid's 10 runs are done: .* --grid"):
        scaling.main([file, "--predict"])
    with pytest.raises(CourseError, match="no prediction with these settings: .* --predict"):
        scaling.main([file, "--big"])
    with pytest.raises(CourseError, match="no prediction with these settings"):
        scaling.main([finished[0], "--big", "optimizer.lr=0.03"])


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("grid.sizes=[{width: 20, layers: 1}]", "width 20 and layers 1: give a multiple of 16"),
        ("grid.sizes=[{width: 16, layers: 1}]", "at least three sizes"),
        ("grid.repeated=[96]", "96, which is the width of no size"),
        ("grid.budget=[1]", "Did you mean 'budgets'"),
        ("optimizer.rate=1", "optimizer.rate"),
        ("grid.decay=2.0", "a decay between 0 and 1"),
        ("other.yaml", "Two configurations cannot be given"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_any_work(word, sentence, study, capsys):
    with pytest.raises(SystemExit) as left:
        scaling.main([study("refused")[0], word])
    assert left.value.code == 2 and sentence in capsys.readouterr().err


def test_a_grid_with_too_few_runs_is_refused(study):
    with pytest.raises(CourseError, match="Only 2 runs have between 12 and 40 steps"):
        scaling.main([study("few")[0], "grid.shortest=12", "--grid"])


def test_a_file_without_a_grid_is_refused(tmp_path, capsys):
    (tmp_path / "none.yaml").write_text("steps: 3\n")
    with pytest.raises(SystemExit):
        scaling.main([str(tmp_path / "none.yaml")])
    assert "There is no section grid" in capsys.readouterr().err
