"""Checkpoints whose checksums fit and whose content does not: each is named in one sentence, and the one before it is taken."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from resigned import drop, resigned, set_at, sign, state, tensors, text
from runs import Loader, make_engine, resumable_engine, weights

from shared.engine.checkpoint.folder import MANIFEST, STATE
from shared.engine.checkpoint.snapshot import get_random_state, require_usable
from shared.engine.checkpoint.soundness import CheckpointError

GROUPS, CONTENTS = ("optimizer", "groups"), ("contents", "tensors")


def first_of(prefix):
    return lambda content: next(name for name in sorted(content) if name.startswith(prefix))


def with_first(prefix, change):
    """change(tensor) is put in the place of the first tensor whose name begins so."""
    return lambda content: content.update({first_of(prefix)(content): change(content[first_of(prefix)(content)])})


def swap(folder):
    (folder / "weights.safetensors").rename(folder / "kept")
    (folder / "optimizer.safetensors").rename(folder / "weights.safetensors")
    (folder / "kept").rename(folder / "optimizer.safetensors")


def unlisted_file(folder):
    shutil.copy(folder / "weights.safetensors", folder / "weights-rank-00007.safetensors")


def manifest(edit):
    def change(folder):
        content = json.loads((folder / MANIFEST).read_text())
        edit(content)
        (folder / MANIFEST).write_text(json.dumps(content))

    return change


CHANGES = {
    "no JSON": (text("{"), "its state.json is not JSON"),
    "not UTF-8": (resigned(lambda folder: (folder / STATE).write_bytes(b"\xff{}")), "its state.json is not JSON"),
    "JSON too deep": (text("[" * 100_000), "its state.json is not JSON"),
    "a list": (text("[1, 2]"), r"the state is \[1, 2\], and should be of type dict"),
    "a word": (text('"state"'), "the state is 'state', and should be of type dict"),
    "null": (text("null"), "the state is None"),
    "no format": (state(drop("format")), "the state has no 'format'"),
    "a format in words": (state(set_at("format", "two")), "the state.format is 'two', and should be of type int"),
    "no step": (state(drop("step")), "the state has no 'step'"),
    "a step in words": (state(set_at("step", "10")), "the state.step is '10', and should be of type int"),
    "a step that is true": (state(set_at("step", True)), "the state.step is True"),
    "another step": (state(set_at("step", 9)), "it is the state after step 9"),
    "notes in a list": (state(set_at("notes", [])), r"the state.notes is \[\], and should be of type dict"),
    "no optimizer": (state(drop("optimizer")), "the state has no 'optimizer'"),
    "groups in a dictionary": (state(set_at(*GROUPS, {})), "the state.optimizer.groups is {}, and should be of type list"),
    "a group that is a number": (state(set_at(*GROUPS, 0, 3)), r"the state.optimizer.groups\[0\] is 3"),
    "a group without names": (state(drop(*GROUPS, 0, "names")), r"the state.optimizer.groups\[0\] has no 'names'"),
    "a group without a rate": (state(drop(*GROUPS, 1, "lr")), r"the state.optimizer.groups\[1\] has no 'lr'"),
    "a rate in words": (state(set_at(*GROUPS, 0, "lr", "fast")), r"groups\[0\].lr is 'fast', and should be of type float"),
    "a name that is a number": (state(set_at(*GROUPS, 0, "names", 0, 7)), r"groups\[0\].names\[0\] is 7, and should be of type str"),
    "a name twice": (state(lambda it: it["optimizer"]["groups"][0]["names"].append(it["optimizer"]["groups"][1]["names"][0])), "twice"),
    "a group lost": (state(drop(*GROUPS, 0)), "it holds an optimizer's state of .*, which no group has"),
    "values of a stranger": (state(set_at("optimizer", "values", "nobody", {"step": 1})), "state of nobody, which no group has"),
    "values that are a list": (state(set_at("optimizer", "values", [1])), "the state.optimizer.values is .1."),
    "parts in a list": (state(set_at("parts", [])), r"the state.parts is \[\], and should be of type dict"),
    "a part that is a number": (state(set_at("parts", "loader", 3)), "the state.parts.loader is 3, and should be of type dict"),
    "a part lost": (state(drop("parts", "window")), "its parts and its table of contents differ in window"),
    "a callback's state lost": (state(drop("parts", "callback.Patience")), "differ in callback.Patience"),
    "a part of another": (state(set_at("parts", "loader", {"page": 3})), r"its state of loader cannot be taken \(KeyError: 'step'\)"),
    "no contents": (state(drop("contents")), "the state has no 'contents'"),
    "contents of something else": (state(set_at(*CONTENTS, "weights", [])), "tensors.weights is .., and should be of type dict"),
    "contents that lack a weight": (
        state(drop(*CONTENTS, "weights", "head.bias")), "is float32 .*, and not there in its table of contents"
    ),
    "contents without the generators": (state(drop(*CONTENTS, "random")), "its table of contents does not list its tensors"),
    "no state of Python's generator": (state(drop("random", "python")), "the state.random has no 'python'"),
    "half of Python's generator": (state(set_at("random", "python", [3, [1, 2], None])), "its random is not a state of the generators"),
    "another version of Python's generator": (state(set_at("random", "python", 0, 9)), "its random is not a state of the generators"),
    "NumPy's without keys": (state(drop("random", "numpy", "keys")), r"its random is not a state of the generators \('keys'\)"),
    "a generator more": (state(set_at("random", "java", {})), "its random is not a state of the generators"),
    "torch's cut": (tensors("random", with_first("cpu", lambda x: x[:-8])), r"cpu is uint8 \[5048\], and uint8 \[5056\] in its table"),
    "no state of torch's": (tensors("random", lambda it: it.clear()), "cpu is not there, and uint8"),
    "zeros for torch's state": (tensors("random", with_first("cpu", torch.zeros_like)), "its random is not a state of the generators"),
    "a weight lost": (tensors("weights", lambda it: it.popitem()), "is not there, and float32 .* in its table of contents"),
    "a weight more": (tensors("weights", set_at("more", torch.ones(2))), r"more is float32 \[2\], and not there in its table"),
    "a weight of another shape": (tensors("weights", with_first("", lambda x: x[:-1])), "in its table of contents"),
    "a weight of another dtype": (tensors("weights", with_first("", lambda x: x.half())), "is float16 .*, and float32 .* in its table"),
    "a weight transposed": (tensors("weights", with_first("embedding", lambda x: x.T)), r"is float32 \[4, 31\], and float32 \[31, 4\]"),
    "an average lost": (tensors("optimizer", lambda it: it.pop(first_of("exp_avg")(it))), "is not there, and float32"),
    "an average more": (tensors("optimizer", set_at("exp_avg/nobody", torch.ones(2))), "exp_avg/nobody is float32"),
    "an average without a name": (tensors("optimizer", set_at("exp_avg", torch.ones(2))), "exp_avg is float32"),
    "an average of another shape": (tensors("optimizer", with_first("exp_avg/", lambda x: x.flatten()[1:])), "in its table of contents"),
    "whole numbers of steps": (tensors("optimizer", with_first("step/", lambda x: x.long())), r"is int64 \[\], and float32 \[\]"),
    "weights and optimizer exchanged": (resigned(swap), "in its table of contents"),
    "no tensors at all": (text("noise", "weights.safetensors"), "it cannot be read"),
    "a manifest of nothing": (manifest(dict.clear), "its manifest.json does not list state.json"),
    "a manifest that lacks the weights": (manifest(drop("weights.safetensors")), "its manifest.json does not list weights.safetensors"),
    "a file that the manifest lacks": (unlisted_file, "its manifest.json does not list weights-rank-00007.safetensors"),
    "a size in words": (manifest(set_at("state.json", "bytes", "all")), "state.json has .* bytes of all"),
}  # fmt: skip


class Patience:
    """A callback's state, for the name of its part."""

    def state_dict(self):
        return {"waited": 3}

    def load_state_dict(self, content):
        self.waited = content["waited"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that has saved steps 5 and 10, and the weights of step 5."""
    folder = tmp_path_factory.mktemp("saved")
    engine = with_patience(folder).fit(Loader(), steps=10)
    return folder, engine.checkpoints.load(5).weights


def with_patience(folder, **options):
    engine = resumable_engine(folder, **options)
    engine.parts["callback.Patience"] = Patience()
    return engine


def restored(folder):
    """What a new run takes, and what it says of the others."""
    engine = with_patience(folder, seed=1)
    return engine, engine.saver.restore(engine.optimizer, engine.stateful_parts(Loader()))


@pytest.mark.parametrize("what", CHANGES)
def test_content_that_does_not_agree_with_itself_is_damage_and_the_one_before_is_taken(saved, tmp_path, what):
    change, sentence = CHANGES[what]
    folder = shutil.copytree(saved[0], tmp_path / "run")
    change(folder / "checkpoints" / "step-00000010")
    engine, (step, damaged) = restored(folder)
    assert step == 5 and len(damaged) == 1 and "step-00000010 is damaged" in damaged[0] and "\n" not in damaged[0]
    with pytest.raises(CheckpointError, match=sentence):
        raise CheckpointError(damaged[0])
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in weights(engine).items())


def test_what_is_signed_again_and_not_changed_is_taken(saved, tmp_path):
    """The control: it is not the signature that is damage."""
    folder = shutil.copytree(saved[0], tmp_path / "run")
    sign(folder / "checkpoints" / "step-00000010")
    assert restored(folder)[1] == (10, [])


def test_a_checkpoint_of_another_model_is_refused_and_not_taken_for_damaged(saved, tmp_path):
    """Neither of the two would fit, and what this run saved would delete them."""
    folder = shutil.copytree(saved[0], tmp_path / "run")
    with pytest.raises(CheckpointError, match="step-00000010 does not fit this run") as caught:
        make_engine(folder).fit(Loader(), steps=12)
    assert "damaged" not in str(caught.value) and "step-00000005" not in str(caught.value)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000005", "step-00000010"]


def test_a_part_whose_code_is_wrong_fails_with_its_own_error_and_no_checkpoint_is_called_damaged(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    loader = Loader()
    loader.load_state_dict = lambda content: content["no such key"]
    with pytest.raises(KeyError, match="no such key"):
        with_patience(folder).fit(loader, steps=12)


def test_a_best_loss_in_words_is_nobodys_best(saved, tmp_path):
    folder = shutil.copytree(saved[0], tmp_path / "run")
    state(set_at("notes", "validation_loss", "low"))(folder / "checkpoints" / "step-00000010")
    assert restored(folder)[0].checkpoints.best() is None


def test_generators_of_now_are_usable():
    now = get_random_state()
    assert require_usable(now) is now
    with pytest.raises(KeyError):
        require_usable(replace(now, torch={}))
