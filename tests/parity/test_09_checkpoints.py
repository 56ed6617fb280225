"""Each product of layouts resumes the checkpoint of another one, and exports the model of one process; the whole matrix is in PARITY.md."""

import pytest
from product_checkpoints import LAYOUTS, exported, resume, write
from products import LIMIT


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_a_layout_resumes_and_exports_the_checkpoint_of_another(number, tmp_path):
    writer, reader = LAYOUTS[number - 1], LAYOUTS[number]
    optimizer = ("adamw", "muon")[number % 2]
    write(writer, optimizer, tmp_path / "run")
    assert resume(reader, optimizer, tmp_path / "run") < LIMIT
    mine, alone = (exported(layout, optimizer, tmp_path / "run", tmp_path / f"{layout}-{n}") for n, layout in enumerate((reader, "one")))
    assert mine == alone and any(name.endswith(".safetensors") for name in mine)
