"""What tests of the trainer share: a folder of prepared text for each file of tests, and a short run on it."""

import pytest
from retuned_runs import short_run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="module")
def short(tmp_path_factory, prepared):
    return short_run(tmp_path_factory.mktemp("short"), prepared)
