"""The examples in the exercises' docstrings come out as they are printed there."""

import doctest
import importlib

import pytest
import torch

from shared.course import catalogue

CONTRACTS = catalogue.contracts()
WITHOUT = {"01.train_step", "04.restore"}  # which take a whole run to show
QUANTIZATION = ("quantization.nf4", "quantization.gptq", "quantization.awq")
MODULES = {  # whose other functions and classes have examples too
    "10": [f"finetune.{name}" for name in ("chat.masking", "lora", "lora_parallel", *QUANTIZATION)],
    "11": [f"preference.{name}" for name in ("log_probs", "bradley_terry", "dpo", "gae", "ppo")],
    "12": [f"rl.{name}" for name in ("cached_attention", "sampling", "number_reward", "advantages", "policy_loss")],
}


@pytest.fixture
def printed_as_in_the_notebooks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_printoptions(sci_mode=False)
    yield
    torch.set_printoptions(profile="default")


@pytest.mark.parametrize("exercise_id", CONTRACTS)
def test_the_examples_of_a_contract_come_out_as_printed(exercise_id, printed_as_in_the_notebooks):
    from shared.parallel.comm.communicator import SingleRankCommunicator
    from shared.parallel.comm.threads import run_threads

    contract = CONTRACTS[exercise_id]
    module = importlib.import_module(contract.module)
    names = {"torch": torch, "SingleRankCommunicator": SingleRankCommunicator, "run_threads": run_threads} | vars(module)
    docstring = getattr(module, contract.function).__doc__
    examples = doctest.DocTestParser().get_doctest(docstring, names, exercise_id, None, 0)
    assert bool(examples.examples) is (exercise_id not in WITHOUT)
    said = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(examples, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", [f"{chapter}.{name}" for chapter, names in MODULES.items() for name in names])
def test_the_examples_of_a_module_hold(name):
    module = importlib.import_module(f"shared.{name.partition('.')[2]}")
    found = [each for value in vars(module).values() if hasattr(value, "__doc__") and getattr(value, "__module__", "") == module.__name__
             for each in doctest.DocTestFinder(recurse=False).find(value, globs=vars(module) | {"torch": torch})]  # fmt: skip
    results = [doctest.DocTestRunner().run(each) for each in found if each.examples]
    assert results and not sum(result.failed for result in results)
