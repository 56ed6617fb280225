"""Values that cannot be, through the configuration file and the words after it."""

from hostile import Row, chapter, start, trainer

ROWS = [
    Row("a word for a number", trainer("steps=many"), "steps"),
    Row("an unknown key", trainer("optimzer.lr=1"), "Did you mean 'optimizer.lr'?"),
    Row("no steps", chapter("01", "--steps", "0"), "steps is 0", code=1),
    Row("no such layout", start("dp0", "{folder}/tiny.yaml"), "parallel.data_parallel is 0", code=1),
]
