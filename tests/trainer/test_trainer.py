"""The trainer as its user starts it: a run on real files, leaving and going on, the report, the exported model."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from trainer_runs import TRAIN, settings_file, train

from shared.course.paths import CHECKOUT
from shared.data.completion import fill_gap, find_gaps, gap_ids
from shared.model.config import ModelConfig
from shared.model.hf.pretrained import load_pretrained
from shared.rl.generation import Drawing
from shared.trainer import provenance, results
from shared.trainer.config import TrainerConfig
from shared.trainer.costs import IN_ALL, Stopwatch
from shared.trainer.modes.pretrain import loaders
from shared.trainer.run import build
from shared.trainer.settings import parse_text, parse_words


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Where the run finds nothing yet, so that what it takes to prepare text is among its seconds."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prepared):
    folder = tmp_path_factory.mktemp("finished")
    done = train(settings_file(folder, prepared), fresh=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, done.stdout


def test_a_run_leaves_what_it_promises(finished):
    folder, said = finished
    run = folder / "run"
    results = json.loads((run / "results.json").read_text())
    assert 3 < results["summary"]["held-out bits per byte"] < 9 and results["summary"]["training tokens"] == 6 * 4 * 96
    assert results["summary"]["attention"] == "mask (12)"  # rows of 96 are too short to go document by document
    assert len(results["completions"]) == 2 and results["samples"][0][0] == "def "
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]
    assert {"train/loss", "speed/tokens_per_second", "speed/mfu", "norm/gradient", "validation/bits_per_byte"} <= rows[-1].keys()
    assert "parts are yours" in said and "The report:" in said


def test_a_start_imports_nothing_that_only_a_report_or_the_hub_needs():
    """They take as long as a quarter of PyTorch, before every refusal."""
    code = "import shared.trainer.run, sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    late = {"matplotlib", "datasets", "pandas", "scipy", "sympy", "transformers", "huggingface_hub", "jsonargparse"}
    assert "torch" in done.stdout.split() and not late & {*done.stdout.split()}


def test_the_report_accounts_for_all_of_a_first_runs_time(finished):
    """From the start of the process: imports, preparing and the precision too."""
    summary = json.loads((finished[0] / "run" / "results.json").read_text())["summary"]
    total = summary.pop(IN_ALL)
    parts = {name: value for name, value in summary.items() if name.startswith("seconds ")}
    assert {"seconds for imports and settings", "seconds to prepare the text", "seconds to choose the precision"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(total, rel=0.03, abs=0.3) and parts["seconds for imports and settings"] > 0.5


def test_the_learning_rate_followed_its_schedule(finished):
    rows = [json.loads(line) for line in (finished[0] / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: next(value for name, value in row.items() if name.startswith("learning_rate")) for row in rows}
    assert rates[2] == rates[3] == rates[4] == 0.02 and 0 < rates[6] < 0.02


def test_the_report_is_one_file_that_needs_no_other(finished):
    page = (finished[0] / "run" / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) >= 5 and all(source.startswith("data:image/png;base64,iVBOR") for source in sources) and "url(" not in page
    for shown in ("held-out bits per byte", "peak memory", "what stood there", "hidden_size: 32", "commit"):
        assert shown in page


def test_the_resolved_settings_begin_the_same_run(finished):
    text = (finished[0] / "run" / "config.yaml").read_text()
    config = parse_text(TrainerConfig, text)
    assert config.model.vocab_size == 512 and config.schedule.steps == config.steps == 6 and config.optimizer.name == "muon"


def test_the_code_that_ran_is_named(finished):
    code = json.loads((finished[0] / "run" / "code.json").read_text())
    assert code["torch"] == torch.__version__ and "parts are yours" in code["parts"]
    assert code["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", code["commit"])


def test_files_that_were_changed_since_the_commit_are_named(monkeypatch):
    monkeypatch.setattr(provenance, "git", lambda word, *_: " M shared/loop.py\nMM Makefile" if word == "status" else "0" * 40)
    assert provenance.code_version()["changed_files"] == ["shared/loop.py", "Makefile"]


def test_what_a_run_took_is_a_median_that_a_pause_does_not_move():
    took = SimpleNamespace(peak_memory=2**31, training=1.0, overhead=2.0, starts=1)
    run = SimpleNamespace(config=SimpleNamespace(model=ModelConfig()), costs=took, watch=Stopwatch())
    logs = {step: {"speed/tokens_per_second": rate, "progress/tokens": 10 * step} for step, rate in enumerate((8.0, 0.1, 7.0), 1)}
    found = results.costs(run, logs | {4: {"validation/loss": 1.0}}, 4.0)
    assert (found["tokens per second"], found["training tokens"], found["model FLOPs utilisation"]) == (7.0, 30, None)


def test_the_same_prompt_twice_draws_two_samples_and_a_long_one_is_read_at_its_end(finished, prepared):
    run = built(finished[0], prepared, report={"prompts": ["def ", "def ", "class A:\n" * 60], "temperature": 1.0, "new_tokens": 12})
    model = load_pretrained(finished[0] / "run" / "model")
    first, second, long = run.mode.samples(run, model)
    assert first != second and long and [first, second, long] == run.mode.samples(run, model)
    end = run.mode.tokenizer.encode("class A:\n" * 60)[-(96 - 12) :]
    [same] = run.mode.continued(model, [end], 12, 96, Drawing(1.0, 40), [2])
    assert same == long


def test_gaps_are_filled_with_what_chapter_03_fills_them_with(finished, prepared):
    """With a cache of keys and values, and all at once; without either there."""
    run, model = built(finished[0], prepared), load_pretrained(finished[0] / "run" / "model")
    tokenizer = run.mode.tokenizer
    gaps = find_gaps(run.text.held_out, tokenizer, 3, 0, before=96, after=48)
    filled = run.mode.continued(model, [gap_ids(tokenizer, gap) for gap in gaps], 12, 96, Drawing(temperature=0.0))
    room = [len(gap_ids(tokenizer, gap)) <= 96 - 12 for gap in gaps]
    assert any(room) and all(
        fill_gap(model, tokenizer, gap, 12, context=96).filled == middle
        for gap, middle, fits in zip(gaps, filled, room, strict=True) if fits
    )  # fmt: skip


def test_the_last_evaluation_takes_as_many_rows_as_the_report_asks_for(finished, prepared):
    few, everything = (built(finished[0], prepared, report={"held_out_rows": rows}) for rows in (3, None))
    sizes = [sum(len(batch["input_ids"]) for batch in run.mode.all_held_out(run.config, run.strategy)) for run in (few, everything)]
    assert sizes[0] == 3 < sizes[1]


def test_the_exported_model_generates_the_same_tokens_in_transformers(finished):
    import transformers

    from shared.data.tokenizer import TextTokenizer
    from shared.sampling import generate

    folder = finished[0] / "run" / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    their_tokenizer, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), TextTokenizer.load(folder)
    prompt = "class Lexer:\n    def "
    ids = tokenizer.encode(prompt)
    assert their_tokenizer(prompt)["input_ids"] == ids
    ends = (theirs.generation_config.eos_token_id, theirs.config.eos_token_id, their_tokenizer.eos_token_id)
    assert ends == 3 * (tokenizer.end_id,) and theirs.config.bos_token_id is None and theirs.generation_config.max_length == 96
    drawn = [token.item() for token in generate(load_pretrained(folder), torch.tensor([ids]), 24, context=96, temperature=0.0)]
    output = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=tokenizer.end_id)
    assert output[0, len(ids) :].tolist() == drawn
    saved = load_file(finished[0] / "run" / "checkpoints" / "step-00000006" / "weights.safetensors")
    torch.testing.assert_close(theirs.model.embed_tokens.weight, saved["embedding.tokens.weight"])


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, finished, prepared):
    path = settings_file(tmp_path, prepared, engine={"log_every": 1})
    left = train(path, interrupt_after=r"step\s+3 of 6")
    assert left.returncode == 130 and "The same command resumes from step 3" in left.stdout, left.stderr + left.stdout
    assert not (tmp_path / "run" / "report.html").exists()
    again = train(path)
    assert again.returncode == 0 and "Going on from step" in again.stdout, again.stderr
    one, other = (load_file(folder / "run/checkpoints/step-00000006/weights.safetensors") for folder in (finished[0], tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)
    summary = json.loads((tmp_path / "run" / "results.json").read_text())["summary"]
    total = summary.pop(IN_ALL)
    assert sum(value for name, value in summary.items() if name.startswith("seconds ")) == pytest.approx(total, rel=0.03, abs=0.3)
    assert summary["starts of the run, whose seconds are added up"] == 2


def test_a_disk_that_is_full_before_the_first_step_is_a_sentence(tmp_path):
    """No disk is full here: the operating system refuses files above 20 kB, as it would on a full disk."""
    limited = "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.argv = sys.argv[1:]; "
    words = [sys.executable, "-c", f"{limited} runpy.run_path(sys.argv[0], run_name='__main__')", str(TRAIN)]
    done = subprocess.run([*words, str(settings_file(tmp_path, tmp_path / "prepared"))], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "cannot be written (File too large): free space there" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_of_another_run_is_refused_by_what_differs(finished, prepared):
    done = train(settings_file(finished[0], prepared), "optimizer.lr=0.03", "seed=1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "holds a run of another configuration: optimizer.lr (0.02 there, 0.03 here), seed (0 there, 1 here)" in done.stderr


def built(folder: Path, prepared: Path, **changes):
    config = parse_words(TrainerConfig, [str(settings_file(folder, prepared, **changes))])
    return build(config, Console(quiet=True))


def first_loss(folder: Path, prepared: Path, **changes) -> float:
    run = built(folder, prepared, **changes)
    loader, _ = loaders(run.config, run.text, run.strategy.mesh)
    (first, *_) = next(iter(loader))
    return run.engine.objective(run.engine.model.eval(), first).mean_loss


def test_bits_per_byte_are_the_sum_over_every_document_alone(finished, prepared):
    """No packing, no loader: each held-out document through the exported model by itself."""
    run = built(finished[0], prepared)
    model = load_pretrained(finished[0] / "run" / "model")
    nats, size, seq = 0.0, 0, run.config.data.seq
    for number in range(len(run.text.held_out)):
        ids = torch.from_numpy(run.text.held_out.document(number).astype("int64"))
        for start in range(0, len(ids) - 1, seq):
            piece = ids[start : start + seq + 1]
            with torch.no_grad():
                nats += torch.nn.functional.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="sum").item()
        size += len(run.text.tokenizer.decode(ids.tolist()).encode()) - len(run.text.tokenizer.decode(ids[:1].tolist()).encode())
    said = json.loads((finished[0] / "run" / "results.json").read_text())["summary"]["held-out bits per byte"]
    assert said == pytest.approx(nats / size / 0.6931471805599453, rel=1e-4)


@pytest.mark.parametrize(("rate", "moved"), [(0.0, False), (1.0, True)])
def test_middles_are_moved_where_they_are_asked_for(tmp_path, prepared, rate, moved):
    run = built(tmp_path, prepared, data={"fim": {"rate": rate}})
    loader, held_out = loaders(run.config, run.text, run.strategy.mesh)
    middle = run.text.tokenizer.fim_tokens.middle
    assert any((batch["input_ids"] == middle).any() for batch in next(iter(loader))) == moved
    assert not any((batch["input_ids"] == middle).any() for batch in held_out)


def test_precision_seed_and_clipping_take_effect(tmp_path, prepared):
    plain = first_loss(tmp_path / "a", prepared)
    rounded = first_loss(tmp_path / "b", prepared, precision="bfloat16")
    assert plain != rounded and rounded == pytest.approx(plain, rel=1e-2)
    assert first_loss(tmp_path / "c", prepared, seed=1) != plain == first_loss(tmp_path / "d", prepared)
    run = built(
        tmp_path / "e", prepared, max_grad_norm=1e-3, optimizer={"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    )
    loader, _ = loaders(run.config, run.text, run.strategy.mesh)
    before = [parameter.detach().clone() for parameter in run.engine.model.parameters()]
    run.engine.config.checkpoint.every = 0
    run.engine.fit(loader, steps=2)  # the schedule's first step is at the full rate
    moved = sum((old - new).pow(2).sum() for old, new in zip(before, run.engine.model.parameters(), strict=True)).sqrt().item()
    assert 0 < moved < 2.1e-3
