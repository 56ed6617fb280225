"""Chapter 12's contracts: their examples are true of the solutions."""

import doctest
import importlib

import pytest
import torch

MODULES = ["cached_attention", "sampling", "number_reward", "advantages", "policy_loss"]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_contracts_hold(name):
    module = importlib.import_module(f"shared.rl.{name}")
    found = [each for value in vars(module).values() if hasattr(value, "__doc__") and getattr(value, "__module__", "") == module.__name__
             for each in doctest.DocTestFinder(recurse=False).find(value, globs=vars(module) | {"torch": torch})]  # fmt: skip
    results = [doctest.DocTestRunner().run(each) for each in found if each.examples]
    assert results and not sum(result.failed for result in results)
