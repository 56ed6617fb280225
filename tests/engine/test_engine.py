"""The engine: its hooks in their order, the loop of chapter 01 inside it, and a resume that is exact."""

import io

import pytest
import torch
from rich.console import Console
from runs import Loader, Recorder, held_out, resumable_engine, weights

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback
from shared.engine.checkpoint.folder import Checkpoints
from shared.engine.config import CheckpointConfig
from shared.engine.checkpoint.saver import Saver
from shared.engine.strategy import Strategy
from shared.loop import train
from shared.loss import next_token_objective


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_engine_trains_as_the_bare_loop_does(tmp_path):
    bare = resumable_engine(tmp_path / "bare")
    loader = iter(Loader())
    for _ in train(bare.model, bare.optimizer, loader, next_token_objective, steps=7):
        pass
    engine = resumable_engine(tmp_path / "engine")
    torch.manual_seed(1)
    engine.model.load_state_dict(weights(resumable_engine(tmp_path / "fresh")))  # and the generator stands where it stood for `bare`
    engine.fit(Loader(), steps=7)
    assert same(weights(bare), weights(engine))


def test_hooks_come_in_their_order(tmp_path):
    recorder = Recorder()
    resumable_engine(tmp_path, [recorder], evaluate_every=2, checkpoint=CheckpointConfig(every=2, asynchronous=False)).fit(
        Loader(), held_out(), steps=2
    )
    step = ["on_batch", "before_optimizer", "on_step"]
    assert recorder.hooks == ["on_start", *step, "on_log", *step, "on_evaluate", "on_log", "on_save", "on_end"]


def test_before_the_optimizer_gradients_are_whole_and_weights_are_old(tmp_path):
    seen = {}

    class Look(Callback):
        def on_batch(self, engine, microbatches):
            seen["weights"] = weights(engine)
            seen["valid"] = sum(int((batch["targets"] != -100).sum()) for batch in microbatches)

        def before_optimizer(self, engine):
            assert engine.totals.token_count == seen["valid"] and engine.step == 0
            assert same(weights(engine), seen["weights"])
            seen["sum"] = engine.model.head.weight.grad.clone()

        def on_step(self, engine):
            assert engine.step == 1 and not same(weights(engine), seen["weights"])
            torch.testing.assert_close(engine.model.head.weight.grad, seen["sum"] / seen["valid"])

    resumable_engine(tmp_path, [Look()]).fit(Loader(), steps=1)
    assert "sum" in seen


def test_a_log_is_the_mean_over_tokens_since_the_last_one(tmp_path):
    recorder, losses = Recorder(), []

    class Losses(Callback):
        def on_step(self, engine):
            losses.append((engine.totals.loss_sum.item(), engine.totals.token_count.item()))

    resumable_engine(tmp_path, [recorder, Losses()]).fit(Loader(), steps=9)
    assert list(recorder.logs) == [1, 4, 8, 9]
    sums, counts = zip(*losses[1:4], strict=True)
    assert recorder.logs[4]["train/loss"] == pytest.approx(sum(sums) / sum(counts), rel=1e-6)
    assert recorder.logs[4]["learning_rate/0"] == 0.01


@pytest.mark.parametrize("stop", [5, 7, 10])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_in_two_parts_equals_one(tmp_path, stop, asynchronous):
    keep = CheckpointConfig(every=5, asynchronous=asynchronous)
    whole_log, first_log, second_log = Recorder(), Recorder(), Recorder()
    whole = resumable_engine(tmp_path / "whole", [whole_log], checkpoint=keep).fit(Loader(), steps=17)
    resumable_engine(tmp_path / "parts", [first_log], checkpoint=keep).fit(Loader(), steps=stop)
    torch.rand(3)  # whatever was drawn in between
    second = resumable_engine(tmp_path / "parts", [second_log], seed=5, checkpoint=keep).fit(Loader(), steps=17)
    assert same(weights(whole), weights(second))
    later = {step: metrics for step, metrics in whole_log.logs.items() if step > stop + 4}
    assert later and later == {step: metrics for step, metrics in second_log.logs.items() if step > stop + 4}


def test_fit_may_be_called_again_for_more_steps(tmp_path):
    whole = resumable_engine(tmp_path / "whole").fit(Loader(), steps=9)
    engine, loader = resumable_engine(tmp_path / "again"), Loader()
    engine.fit(loader, steps=4)
    engine.fit(loader, steps=9)
    assert engine.step == 9 and same(weights(whole), weights(engine)) and engine.checkpoints.steps()[-1] == 9


def test_without_the_generators_state_the_resume_would_differ(tmp_path, monkeypatch):
    """The negative control: dropout draws on."""
    whole = resumable_engine(tmp_path / "whole").fit(Loader(), steps=10)
    resumable_engine(tmp_path / "parts").fit(Loader(), steps=5)
    monkeypatch.setattr("shared.engine.checkpoint.snapshot.torch.set_rng_state", lambda state: None)
    second = resumable_engine(tmp_path / "parts", seed=5).fit(Loader(), steps=10)
    assert not same(weights(whole), weights(second))


def test_a_callbacks_state_is_resumed(tmp_path):
    class Counter(Callback):
        count = 0

        def on_step(self, engine):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    resumable_engine(tmp_path, [Counter(), Counter()]).fit(Loader(), steps=5)
    counters = [Counter(), Counter()]
    resumable_engine(tmp_path, counters).fit(Loader(), steps=8)
    assert [counter.count for counter in counters] == [8, 8]


def test_a_run_is_resumed_with_other_callbacks(tmp_path):
    """The other one begins anew, and the weights are the same."""

    class Other(Recorder):
        pass

    whole = resumable_engine(tmp_path / "whole").fit(Loader(), steps=8)
    resumable_engine(tmp_path / "parts", [Recorder()]).fit(Loader(), steps=5)
    assert same(weights(whole), weights(resumable_engine(tmp_path / "parts", [Other()]).fit(Loader(), steps=8)))


def test_a_folder_with_another_runs_checkpoints_is_refused_where_resuming_is_off(tmp_path):
    resumable_engine(tmp_path).fit(Loader(), steps=2)
    with pytest.raises(CourseError, match="holds checkpoints of another run"):
        resumable_engine(tmp_path, checkpoint=CheckpointConfig(resume=False)).fit(Loader(), steps=2)


def test_another_models_checkpoint_is_refused_by_name(tmp_path):
    resumable_engine(tmp_path).fit(Loader(), steps=2)
    engine = resumable_engine(tmp_path)
    engine.model.head = torch.nn.Linear(16, 11)
    engine.optimizer = torch.optim.AdamW(engine.model.parameters(), lr=0.01)
    before = weights(engine)
    with pytest.raises(CourseError, match="does not fit this run.*head"):
        engine.fit(Loader(), steps=4)
    assert same(before, weights(engine))


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path):
    class Spoil(Callback):
        """From step 6 on, the model gets worse."""

        def before_optimizer(self, engine):
            if engine.step >= 6:
                for group in engine.optimizer.param_groups:
                    group["lr"] = -0.01

    engine = resumable_engine(tmp_path, [Spoil()], evaluate_every=3, checkpoint=CheckpointConfig(every=3, keep_last=1)).fit(
        Loader(), held_out(), steps=15
    )
    assert engine.checkpoints.best()[0] == 6 and engine.checkpoints.steps() == [6, 15]


def test_compiling_changes_no_name_in_the_checkpoint(tmp_path):
    plain = resumable_engine(tmp_path / "plain").fit(Loader(), steps=1)
    engine = resumable_engine(tmp_path / "compiled", compile=True)
    engine.model.compile(backend="eager")
    engine.config.compile = False
    engine.fit(Loader(), steps=1)
    assert engine.checkpoints.load(1).weights.keys() == plain.checkpoints.load(1).weights.keys()


@pytest.mark.slow  # the compiler's front alone takes ten seconds to import
def test_without_a_compiler_the_run_goes_on_and_says_so_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "/no/compiler/g++"))
    plain = resumable_engine(tmp_path / "plain").fit(Loader(), steps=2)
    said = Console(file=io.StringIO(), width=400)
    engine = resumable_engine(tmp_path / "compiled", compile=True, console=said).fit(Loader(), steps=2)
    assert said.file.getvalue().count("torch.compile does not work here (") == 1
    for ours, theirs in zip(engine.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_that_is_not_a_number_is_never_the_best(tmp_path):
    losses = iter([float("nan"), 3.0, 2.0, 4.0])

    class Judge(Strategy):
        def sum(self, totals):
            return totals._replace(loss_sum=totals.token_count * torch.tensor(next(losses)))

    keep = CheckpointConfig(every=2, keep_last=1)
    engine = resumable_engine(tmp_path, evaluate_every=2, checkpoint=keep, strategy=Judge).fit(Loader(), held_out(), steps=8)
    assert engine.checkpoints.best() == (6, 2.0) and engine.checkpoints.steps() == [6, 8]
    saver = resumable_engine(tmp_path / "nothing saved").saver
    assert saver.is_best(3.0) and not saver.is_best(float("nan"))


def test_what_is_written_on_the_thread_is_what_was_when_it_was_saved(tmp_path):
    """The part goes on counting in the dictionary that it gave, while the thread waits to write it."""
    part = {"count": 0}

    class Counting(Loader):
        def state_dict(self):
            return part

        def load_state_dict(self, state):
            pass

    class Late(Checkpoints):
        def write(self, *content):
            part["count"] = 99
            return super().write(*content)

    class SavesLate(Strategy):
        def saver(self, folder, *options):
            return Saver(self.state, Late(folder), asynchronous=True)

    engine = resumable_engine(tmp_path, strategy=SavesLate).fit(Counting(), steps=1)
    assert engine.checkpoints.load(1).parts["loader"] == {"count": 0}


def test_tensors_that_wait_for_the_thread_are_copies(tmp_path):
    """The next step, which changes weights and moments in place, may be over before the thread writes them."""

    class Late(Checkpoints):
        def write(self, *content):
            with torch.no_grad():
                for tensor in [*engine.model.parameters(), *(t for state in engine.optimizer.state.values() for t in state.values())]:
                    tensor.fill_(99)
            return super().write(*content)

    class SavesLate(Strategy):
        def saver(self, folder, *options):
            return Saver(self.state, Late(folder), asynchronous=True)

    engine = resumable_engine(tmp_path, strategy=SavesLate)
    engine.fit(Loader(), steps=1)
    saved = engine.checkpoints.load(1)
    moments = [tensor for named in saved.optimizer.tensors.values() for tensor in named.values()]
    assert moments and not any((tensor == 99).any() for tensor in [*saved.weights.values(), *moments])
