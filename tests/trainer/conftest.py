"""What tests of the trainer share and leave as it is: a folder of prepared text, a short run on it, and a model to start from."""

import pytest
from retuned_runs import short_run
from tuned_runs import base_run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="session")
def short(tmp_path_factory, prepared):
    return short_run(tmp_path_factory.mktemp("short"), prepared)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return base_run(tmp_path_factory.mktemp("base"))
