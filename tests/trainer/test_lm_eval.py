"""Evaluation beside lm-eval's own class for transformers: same weights, tasks and files, same likelihoods, strings and figures."""

import os

import pytest
import torch
from evaluated_models import RECORDS, SHAPES, model_folder, write_tasks

from shared.trainer.evaluation.command import evaluate_subject
from shared.trainer.evaluation.lm_eval_adapter import run_tasks
from shared.trainer.evaluation.measures import open_subject, pairs_of
from shared.trainer.evaluation.tasks import load_task

FIGURES = {"choosing": ("acc", "acc_norm", "acc_bytes"), "rolling": ("bits_per_byte",), "writing": ("exact_match",)}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module", params=SHAPES)
def compared(request, tasks, tmp_path_factory):
    """A model's folder, and lm-eval's results by its own class and by ours."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = model_folder(tmp_path_factory.mktemp(request.param), request.param)
    torch.manual_seed(0)
    theirs = simple_evaluate(
        HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, max_length=64), tasks=list(RECORDS),
        task_manager=TaskManager(include_path=str(tasks / "harness"), include_defaults=False), bootstrap_iters=2, verbosity="ERROR",
    )  # fmt: skip
    return folder, theirs, run_tasks(open_subject(folder), list(RECORDS), str(tasks / "harness"), None, None, False)


def responses(results, task):
    """Of each record, what the model gave to each of its requests."""
    return [[each[0] for each in sample["resps"]] for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])]


def test_the_adapter_gives_what_lm_evals_own_class_gives(compared):
    _, theirs, ours = compared
    for wanted, given in zip(responses(theirs, "choosing"), responses(ours, "choosing"), strict=True):
        assert [each[0] for each in given] == pytest.approx([each[0] for each in wanted], abs=1e-4)
        assert [each[1] for each in given] == [each[1] for each in wanted]
    wanted, given = ([row[0] for row in responses(results, "rolling")] for results in (theirs, ours))
    assert given == pytest.approx(wanted, rel=1e-6, abs=1e-4)
    assert responses(ours, "writing") == responses(theirs, "writing")
    assert any(text for [text] in responses(theirs, "writing"))
    for task, names in FIGURES.items():
        for name in names:
            assert ours["results"][task][f"{name},none"] == pytest.approx(theirs["results"][task][f"{name},none"], rel=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 512])
def test_course_eval_gives_lm_evals_figures_for_any_batch(compared, tasks, batch_tokens):
    folder, theirs, _ = compared
    subject = open_subject(folder, batch_tokens)
    found = evaluate_subject(subject, [load_task(tasks / "ours" / f"{name}.yaml") for name in RECORDS])
    for task, names in FIGURES.items():
        for name in names:
            assert found.numbers()[f"{task}/{name}"] == pytest.approx(theirs["results"][task][f"{name},none"], rel=1e-6)
    for name in FIGURES["choosing"]:
        assert found.errors()[f"choosing/{name}"] == pytest.approx(theirs["results"]["choosing"][f"{name}_stderr,none"], rel=1e-6)
    choosing, _, writing = found.results
    pairs = [pair for item in choosing.loaded.items for pair in pairs_of(subject, choosing.loaded.task, item)]
    wanted = [each[0] for row in responses(theirs, "choosing") for each in row]
    assert [each.log_likelihood for each in subject.scorer.score(pairs)] == pytest.approx(wanted, abs=1e-4)
    assert [each["answer"] for each in writing.answers] == [text for [text] in responses(theirs, "writing")]
    assert any(len(context) + len(continuation) > 65 for context, continuation in pairs), "no context was cut"
