"""Fuzzed configurations: random values for random keys give a configuration, or exit code 2 and a sentence that names a key."""

from dataclasses import is_dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.course.errors import CourseError
from shared.course.typed import members
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.memory import memory_needed
from shared.trainer.settings import parse_words


def fields_of(config_class: type, prefix: str = "") -> dict[str, object]:
    """Every key that is no section, with its type."""
    found = {}
    for name, hint in get_type_hints(config_class).items():
        found |= fields_of(hint, f"{prefix}{name}.") if is_dataclass(hint) else {prefix + name: hint}
    return found


FIELDS = {key: hint for key, hint in fields_of(TrainerConfig).items() if key != "schedule.steps"}
SECTIONS = sorted({key.rpartition(".")[0] for key in FIELDS} - {""})
numbers = st.one_of(
    st.integers(-2, 9), st.sampled_from([16, 64, 256, 1000, 10**9, 10**12, 2**63, -(2**70)]),
    st.floats(-2, 2), st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e-300, 1e308]),
)  # fmt: skip
texts = st.one_of(st.sampled_from(["", " ", "null", "~nobody_here/x", "[red]", "a\0b", "x" * 300, ".", "none"]), st.text(max_size=8))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=2)), max_leaves=4,
)  # fmt: skip


def values_of(hint: object) -> st.SearchStrategy:
    """Mostly of the right kind, at times of any."""
    right = [st.sampled_from(get_args(member)) for member in members(hint) if get_origin(member) is Literal]
    right += [numbers] if {int, float} & set(members(hint)) else [st.booleans()] if bool in members(hint) else []
    return st.one_of(*right, *right, anything)


changes = st.lists(st.sampled_from(sorted(FIELDS) + SECTIONS), min_size=1, max_size=3, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: values_of(FIELDS.get(key, dict)) for key in keys})
)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(changes=changes, as_words=st.booleans())
def test_any_configuration_is_one_or_is_refused_by_key(tmp_path, capsys, changes, as_words):
    record, words = {"engine": {"device": "cpu"}}, []
    for key, value in changes.items():
        if as_words:
            words.append(f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix('...' + chr(10)).strip()}")
            continue
        *sections, last = key.split(".")
        here = record
        for name in sections:
            here = here.setdefault(name, {}) if isinstance(here, dict) else {}
        if isinstance(here, dict):
            here[last] = value
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(record))
    capsys.readouterr()
    try:
        config = parse_words(TrainerConfig, [str(tmp_path / "a.yaml"), *words])
    except SystemExit as ended:
        said = capsys.readouterr().err.strip()
        assert ended.code == 2 and len(said.splitlines()) <= 3, said
        named = {part for key in changes for part in key.split(".")}
        assert "Traceback" not in said and (any(name in said for name in named) or "a.yaml" in said), (changes, said)
        return
    if memory_needed(config) < 2**28 and config.model.num_hidden_layers <= 16:
        try:
            with torch.device("meta"):
                model = TransformerModel(config.model)
            build_optimizer(model, config.optimizer)
        except CourseError as error:
            assert len(str(error).splitlines()) == 1
