"""Stage 10 of build 02: a folder from which transformers makes the same model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from shared.course.checking import Case

from .pieces import (
    BIASED,
    EXACT,
    GROUPED,
    HOME,
    LLAMA3,
    PLAIN,
    THEIRS,
    TIED,
    WIDE,
    Config,
    Results,
    copy_of,
    folder_of,
    from_folder,
    said,
    their_state,
    without,
)

ALL = 10**9


def new_folder() -> Path:
    """Always the same path, which errors name: two builds that fail alike must say the same. What was there is gone."""
    shutil.rmtree(Path(HOME.name) / "not", ignore_errors=True)
    return Path(HOME.name) / "not" / "there yet"


def loaded(folder: Path) -> Results:
    """What transformers makes of a folder: weights, and what it misses or cannot place."""
    model, about = from_folder(folder, output_loading_info=True)
    strange = {key: sorted(str(name) for name in about[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    weights = {f"{name} in transformers": weight.detach().clone() for name, weight in model.named_parameters()}
    return {"transformers": "loads all of it" if not any(strange.values()) else str(strange)} | weights


def tried(name: str, act: Callable[[], Results]) -> Results:
    """What `act` finds in a folder, or why it cannot read it."""
    try:
        return act()
    except (OSError, ValueError) as error:
        return {name: f"{type(error).__name__}: {error}"}


def written_files(folder: Path, most: int) -> Results:
    """Which weights are in how many files, whether these are as large as they may be, and what the index says."""
    index, names, sizes, alone = folder / "model.safetensors.index.json", {}, {}, set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        sizes[file.name] = sum(tensor.nbytes for tensor in held.values())
        alone |= {file.name} if len(held) == 1 else set()
        names |= {name: [*names.get(name, []), file.name] for name in held}
    large = [name for name, size in sizes.items() if size > most and name not in alone]
    twice = sorted(name for name, files in names.items() if len(files) > 1)
    found = {"weights in the files": sorted(names), "too large": large, "written twice": twice, "empty files": [n for n in sizes if not n]}
    if not index.exists():
        return found | {"files": "model.safetensors" if list(sizes) == ["model.safetensors"] else sorted(sizes)}
    raw = json.loads(index.read_text(encoding="utf-8"))
    right = raw["weight_map"] == {name: files[-1] for name, files in names.items()}
    total = raw.get("metadata", {}).get("total_size")
    return found | {"files": "several and an index" if right else "several, and an index that is not right", "total_size": total}


def config_of(folder: Path) -> Results:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def save_case(
    title: str,
    config: Config,
    most: int = ALL,
    dtype: torch.dtype = torch.float32,
    target: Callable[[Any], Path] | None = None,
    source: Callable[[], Path] | None = None,
    created: bool = False,
) -> Case:
    """target(adapters): a folder that is there already. source: the folder to load; default: as transformers writes it.

    created: a new model is saved instead.
    """
    where = source or (lambda: folder_of(config))
    kind = str(dtype).removeprefix("torch.")

    def expected(**_: Any) -> Results:
        weights = {name: weight.to(dtype) for name, weight in their_state(config).items()}
        total = sum(weight.nbytes for weight in weights.values())
        files: Results = {"files": "model.safetensors"} if total <= most else {"files": "several and an index", "total_size": total}
        files |= {"weights in the files": sorted(weights), "too large": [], "written twice": [], "empty files": []}
        given = dict(config) if created else config_of(where())
        found = {"in the folder": files, "config.json": given | {"dtype": kind, "architectures": ["LlamaForCausalLM"]}}
        again = {} if created else {f"{name} loaded again": weight for name, weight in weights.items()}
        theirs = {} if created else {f"{name} in transformers": weight for name, weight in weights.items()}
        return {"transformers": "loads all of it"} | found | theirs | again

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.create(dict(config), 1) if created else adapters.load(where()).to(dtype)
        folder = target(adapters) if target else new_folder()
        adapters.save(model, folder, most)
        again = tried("load", lambda: {f"{name} loaded again": weight for name, weight in adapters.state(adapters.load(folder)).items()})
        theirs = tried("transformers", lambda: loaded(folder))
        if created:  # the weights are the build's own
            again, theirs = {key: again[key] for key in again if key == "load"}, {"transformers": theirs["transformers"]}
        found = {"in the folder": written_files(folder, most), "config.json": config_of(folder)}
        return theirs | found | {name: weight.detach().clone() if name != "load" else weight for name, weight in again.items()}

    given = {"most": most, "dtype": kind} | said(config)
    return Case("oracle", title, lambda: given, expected, THEIRS, observe, **EXACT)


def saved_before(config: Config, most: int) -> Callable[[Any], Path]:
    """A folder in which another, larger model was saved."""

    def make(adapters: Any) -> Path:
        folder = new_folder()
        adapters.save(adapters.load(folder_of(config)), folder, most)
        return folder

    return make


def own_case(title: str, shards: str, most: int) -> Case:
    """A model is trained and saved into the folder that it came from."""

    def expected(**_: Any) -> Results:
        weights = {f"{name} in transformers": 2 * weight for name, weight in their_state(GROUPED).items()}
        return {"transformers": "loads all of it"} | weights | {"norm of the model": 2 * their_state(GROUPED)["model.norm.weight"]}

    def observe(adapters: Any, **_: Any) -> Results:
        folder = copy_of(folder_of(GROUPED, shards=shards))
        model = adapters.load(folder)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2)
        adapters.save(model, folder, most)
        return loaded(folder) | {"norm of the model": adapters.state(model)["model.norm.weight"].detach().clone()}

    given = {"most": most, "weights": "doubled after loading", "folder": "the one that was loaded"}
    return Case("property", title, lambda: given, expected, THEIRS, observe, **EXACT)


LARGER = GROUPED | {"num_hidden_layers": 5}
FOUR = without(GROUPED, "rope_parameters") | {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "my_key": [1, 2]}

SAVE = (
    save_case("one file", GROUPED),
    save_case("heads of another size", WIDE),
    save_case("biases", BIASED),
    save_case("tied", TIED),
    save_case("stretched RoPE", TIED | {"rope_parameters": LLAMA3}),
    save_case("files of at most 20,000 bytes", GROUPED, 20_000),
    save_case("files of at most 5,000 bytes", TIED, 5_000),
    save_case("a file for each weight", PLAIN, 1),
    save_case("exactly what one file takes", PLAIN, sum(4 * weight for weight in (37 * 24 * 2, 24, 2 * (4 * 24 * 24 + 3 * 24 * 44 + 48)))),
    save_case("bfloat16", PLAIN, dtype=torch.bfloat16),
    save_case("float16 in many files", TIED, 9_000, dtype=torch.float16),
    save_case("a new model, as transformers 4 wrote it, with a key of its own", FOUR, created=True),
    save_case("where many files were", GROUPED, target=saved_before(LARGER, 20_000)),
    save_case("where one file was", GROUPED, 20_000, target=saved_before(LARGER, ALL)),
    save_case("where more files were", GROUPED, 20_000, target=saved_before(LARGER, 9_000)),
    own_case("its own folder", "1GB", ALL),
    own_case("its own folder, in other files", "9KB", 20_000),
)
