"""Variables of torchrun that are malformed or missing."""

from hostile import Row, trainer

GOOD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

ROWS = [
    *(
        Row(f"{name} {value!r}", trainer(), (name, value, "torchrun"), code=1, environment=GOOD | {name: value})
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        for value in ("", "x", "-1", "1.5")
    ),
    Row("RANK 2 of 2", trainer(), ("RANK", "WORLD_SIZE"), code=1, environment={"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
    Row("two ranks and no MASTER_PORT", trainer("parallel.data_parallel=2"), "MASTER_PORT", code=1,
        environment={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}),
    Row("two ranks and a MASTER_PORT that is none", trainer("parallel.data_parallel=2"), "MASTER_PORT", code=1,
        environment={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "http"}),
    Row("a MASTER_PORT that no machine has", trainer("parallel.data_parallel=2"), "MASTER_PORT", code=1,
        environment={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"}),
    Row("two ranks and no MASTER_ADDR", trainer("parallel.data_parallel=2"), "MASTER_ADDR", code=1,
        environment={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}),
]  # fmt: skip
