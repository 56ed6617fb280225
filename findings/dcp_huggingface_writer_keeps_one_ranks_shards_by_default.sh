#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint.HuggingFaceStorageWriter; seen with Python 3.11 on Linux x86-64, two ranks over gloo, November 2026.
#
# A DTensor that is sharded over two ranks, saved by dcp.save with the writer's defaults: both ranks write model-00001-of-00001.safetensors, the
# one that is later replaces the other's, and half of the tensor is on no disk. Saving raises nothing. The file holds the tensor's name with the
# shape of one shard. Which shard it is differs from run to run, and so does dcp.load through HuggingFaceStorageReader: with the first one it
# raises ValueError (a size mismatch); with the second it raises nothing, fills that half, and leaves the other one as it was in memory, here
# zeros.
#
# With save_distributed=True each rank writes a file of its own and everything comes back; with enable_consolidation=True as well there is one
# whole file beside them. To save a sharded model for transformers with this writer, set the first, and check that what was
# written is as large as the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "safetensors==0.8.0"

cat >"$folder/shards.py" <<'PYTHON'
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WHOLE = torch.arange(1.0, 9.0).view(4, 2)


def rank_main(rank: int, folder: str, options: dict) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh, files = init_device_mesh("cpu", (2,)), str(Path(folder) / "files")
    writer = HuggingFaceStorageWriter(path=files, fqn_to_index_mapping={"w": 1}, **options)
    dcp.save({"w": distribute_tensor(WHOLE, mesh, [Shard(0)])}, storage_writer=writer)
    dist.barrier()
    loaded = {"w": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])}
    try:
        dcp.load(loaded, storage_reader=HuggingFaceStorageReader(path=files))
        back = loaded["w"].full_tensor()
    except (ValueError, CheckpointException) as error:  # on every rank
        assert "Size mismatch" in str(error), error
        back = None
    if rank == 0:
        torch.save(back, Path(folder) / "back.pt")
    dist.barrier()
    dist.destroy_process_group()


def tried(**options: bool) -> tuple[list[str], torch.Tensor | None]:
    folder = tempfile.mkdtemp()
    Path(folder, "files").mkdir()
    mp.spawn(rank_main, (folder, options), 2)
    rows = []
    for file in sorted(Path(folder, "files").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            rows.append(f"{file.name} {list(opened.get_tensor('w').shape)}")
    return rows, torch.load(Path(folder) / "back.pt")


if __name__ == "__main__":
    print(f"torch {torch.__version__}, a tensor of [4, 2] over two ranks")
    plain, back = tried()
    outcome = "loading raises a size mismatch" if back is None else f"rows that came back: {int((back == WHOLE).all(dim=1).sum())} of 4"
    print(f"defaults: {', '.join(plain)}; {outcome}")
    own, all_back = tried(save_distributed=True)
    print(f"save_distributed=True: {', '.join(own)}; rows that came back: {int((all_back == WHOLE).all(dim=1).sum())} of 4")
    lost = plain == ["model-00001-of-00001.safetensors [2, 2]"] and (back is None or int((back == 0).all(dim=1).sum()) == 2)
    right = len(own) == 2 and torch.equal(all_back, WHOLE)
    sys.exit(0 if lost and right else "The behaviour has changed.")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/shards.py"
echo "As described: half of a sharded tensor is lost without an error."
