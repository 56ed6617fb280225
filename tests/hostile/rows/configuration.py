"""Values that cannot be, and files that are no configuration, through the trainer's command and the launcher."""

from pathlib import Path

from hostile import Row, start, trainer


def written(text: str | bytes, name: str = "a.yaml"):
    """A file of this text in the row's folder."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return make


def ring(folder: Path) -> None:
    for name, below in (("a", "b"), ("b", "c"), ("c", "a")):
        (folder / f"{name}.yaml").write_text(f"extends: {below}.yaml\nsteps: 1\n")


def large(folder: Path) -> None:
    with open(folder / "a.yaml", "wb") as file:
        file.truncate(100 * 2**20)


def loop(folder: Path) -> None:
    (folder / "a.yaml").symlink_to(folder / "b.yaml")
    (folder / "b.yaml").symlink_to(folder / "a.yaml")


def unreadable(folder: Path) -> None:
    (folder / "a.yaml").mkdir()


def fifo(folder: Path) -> None:
    import os

    os.mkfifo(folder / "a.yaml")


def emptied(folder: Path) -> None:
    (folder / "empty").mkdir()


def half_a_model(folder: Path) -> None:
    (folder / "half").mkdir()
    (folder / "half" / "config.json").write_text('{"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, '
        '"num_attention_heads": 2, "intermediate_size": 8}')  # fmt: skip


def no_config(folder: Path) -> None:
    (folder / "odd").mkdir()
    (folder / "odd" / "config.json").write_text("[1]")


def bomb(merge: bool = False) -> str:
    """Nine levels, each ten times the one below: a billion entries from 300 bytes."""
    names = "abcdefghij"
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"] if not merge else ["a: &a {x: 1}"]
    for below, name in zip(names, names[1:], strict=False):
        ten = ", ".join([f"*{below}"] * 10)
        lines.append(f"{name}: &{name} {{<<: [{ten}]}}" if merge else f"{name}: &{name} [{ten}]")
    return "\n".join(lines)


def file(name: str, text: str | bytes, says: str | tuple[str, ...], **more) -> Row:
    """The trainer on a file of this text."""
    return Row(name, trainer(config="a.yaml"), says, make=written(text), **more)


FILES = [
    file("YAML bomb: aliases of aliases", bomb(), ("a.yaml", "aliases repeat"), seconds=3.0),
    file("YAML bomb: merged keys", bomb(merge=True), ("a.yaml", "aliases repeat"), seconds=3.0),
    file("an alias to itself", "steps: 1\nmodel: &m\n  a: *m\n", ("a.yaml, line", "refers to itself")),
    file("nested 100,000 deep", "a: " + "[" * 100_000, ("a.yaml", "nested too deeply"), seconds=5.0),
    file("nested 300 deep", "a: " + "{a: " * 300 + "1" + "}" * 300, "There is no setting a.", seconds=5.0),
    Row("a file of 100 MB", trainer(config="a.yaml"), ("a.yaml", "104,857,600 bytes"), make=large, seconds=3.0),
    file("a key twice", "steps: 5\nseed: 1\nsteps: 6\n", "gives steps twice, in line 1 and in line 3"),
    file("a key twice in a section", "model:\n  hidden_size: 32\n  hidden_size: 64\n", "gives hidden_size twice, in line 2 and in line 3"),
    file("a key that is a number", "1: 2\n", ("a.yaml, line 1", "'1' is not the name")),
    file("a key that is a list", "[a]: 2\n", ("a.yaml, line 1", "a list or a section is not the name")),
    file("a key that is null", "null: 2\n", ("line 1", "'null' is not the name")),
    file("a key with a dot", "optimizer.lr: 3\n", ("optimizer.lr", "below its section")),
    file("no keys", "- 1\n", "holds no keys"),
    file("an empty file", "", "holds no keys"),
    file("no YAML", "steps: [", ("a.yaml", "not YAML, line 1")),
    file("a tab", "model:\n\thidden_size: 3\n", ("a.yaml", "not YAML, line 2")),
    file("a Python object", "steps: !!python/object/apply:os.system [ls]\n", ("a.yaml", "line 1", "python/object")),
    file("an unknown alias", "steps: *a\n", ("a.yaml", "line 1", "undefined alias")),
    file("two documents", "steps: 1\n---\nsteps: 2\n", ("a.yaml", "line")),
    file("bytes that are no UTF-8", b"steps: \xff\xfe\n", ("a.yaml", "not UTF-8")),
    file("UTF-16", "steps: 1\n".encode("utf-16"), ("a.yaml", "not UTF-8")),
    file("a zero byte", b"steps: 1\0\n", ("a.yaml", "not YAML")),
    file("noise", bytes(range(256)) * 20, ("a.yaml",)),
    file("an octal number", "steps: 010\n", "steps is '010': give a whole number"),
    file("a number of base 60", "steps: 1:30\n", "steps is '1:30': give a whole number"),
    file("a date", "steps: 2026-01-01\n", "steps is '2026-01-01': give a whole number"),
    file("a number of 5,000 digits", f"steps: {'9' * 5000}\n", "steps is "),
    file("extends itself", "extends: a.yaml\n", "extends itself"),
    Row("a ring of files", trainer(config="a.yaml"), "extends itself, by way of a.yaml, b.yaml, c.yaml", make=ring),
    file("extends nothing", "extends: b.yaml\n", ("b.yaml", "which a.yaml extends")),
    file("extends a list", "extends: [b.yaml, c.yaml]\n", "give the name of one file"),
    file("extends a path with a zero byte", 'extends: "b\\0.yaml"\n', ("a.yaml",)),
    file("schedule.steps apart from steps", "steps: 6\nschedule: {steps: 9}\n", ("a.yaml", "give steps")),
    Row("a file that is not there", trainer(config="none.yaml"), "none.yaml"),
    Row("a folder for a file", trainer(config="a.yaml"), "a.yaml", make=unreadable),
    Row("a FIFO for a file", trainer(config="a.yaml"), "a.yaml", make=fifo),
    Row("a loop of links", trainer(config="a.yaml"), ("There is no file", ".yaml"), make=loop),
    Row("a path too long for a file", trainer(config="x" * 5000), "There is no"),
    Row("two configurations", trainer("{folder}/tiny.yaml"), "Two configurations cannot be given"),
    Row("no configuration", trainer(config=""), "Give a configuration first"),
    Row("a word first", trainer(config="steps=3"), "Give a configuration first"),
    Row("a word without a value", trainer("faster"), "'faster' is not a setting: write key=value"),
    Row("a word without a key", trainer("=3"), "There is no setting ''"),
    Row("a word that is no UTF-8", trainer("engine.project=\udcff"), "engine.project", environment={}),
    Row("a path that is no UTF-8", trainer("engine.output=\udcff"), "engine.output"),
    Row("a word that is no YAML", trainer("report.prompts=['"), "report.prompts is not YAML"),
    Row("a bomb in a word", trainer(f"report.prompts=[{'[' * 5000}"), "report.prompts is nested too deeply"),
    Row("schedule.steps as a word", trainer("schedule.steps=3"), "give steps"),
]

TYPES = [
    Row("a section that is a number", trainer(model=3), "model is 3: it is a section"),
    Row("a section that is a list", trainer(data=[1]), "data is [1]: it is a section"),
    Row("a section that is text", trainer(engine="x"), "engine is 'x': it is a section"),
    Row("a section within a section that is a number", trainer(engine={"checkpoint": 3}), "engine.checkpoint is 3: it is a section"),
    Row("a number that is a section", trainer(steps={"a": 1}), "steps is {'a': 1}: give a whole number"),
    Row("a section as a word", trainer("model=3"), "model is 3: it is a section"),
    Row("a section that is a word", trainer("optimizer=none"), "optimizer is 'none': it is a section"),
    Row("a section that is broken", trainer("engine=["), "engine is not YAML"),
    Row("a word for a number", trainer("steps=many"), "steps is 'many': give a whole number"),
    Row("a fraction for a count", trainer("steps=1.5"), "steps is 1.5: give a whole number"),
    Row("true for a count", trainer("steps=true"), "steps is True: give a whole number"),
    Row("true for a number", trainer("optimizer.lr=true"), "optimizer.lr is True: give a number"),
    Row("nothing for a count", trainer("steps="), "steps is null"),
    Row("a word for a choice", trainer("optimizer.name=adam"), ("optimizer.name is 'adam'", "Did you mean 'adamw'?")),
    Row("a number for a choice", trainer("optimizer.name=3"), "optimizer.name is '3': give one of adamw"),
    Row("maybe", trainer("optimizer.nesterov=maybe"), "optimizer.nesterov is 'maybe': give true or false"),
    Row("true for one of 0, 1, 2", trainer(parallel={"zero": True}), "parallel.zero is True: give one of 0, 1, 2"),
    Row("three betas", trainer("optimizer.betas=[0.9, 0.9, 0.9]"), "optimizer.betas is [0.9, 0.9, 0.9]"),
    Row("betas of text", trainer("optimizer.betas=[a, b]"), "optimizer.betas[0] is 'a': give a number"),
    Row("one tracker for a list", trainer("engine.trackers=console"), "engine.trackers is 'console': give a list"),
    Row("an unknown tracker", trainer("engine.trackers=[consol]"), ("engine.trackers[0] is 'consol'", "Did you mean 'console'?")),
    Row("a section for a list", trainer(engine={"trackers": {"console": 1}}), "engine.trackers is {'console': 1}: give a list"),
    Row("a source that is no section", trainer("data.prepare.sources=[x]"), "data.prepare.sources[0] is 'x': it is a section"),
    Row("sources that are no list", trainer(data={"prepare": {"sources": "embedded"}}), "data.prepare.sources is 'embedded': give a list"),
    Row("no sources", trainer("data.prepare.sources=[]"), "data.prepare: There are no sources"),
    Row("a number for a path", trainer(engine={"output": 3}), "engine.output is 3: give a path"),
    Row("a list for a path", trainer(engine={"output": ["a"]}), "engine.output is ['a']: give a path"),
    Row("a prompt that is null", trainer("report.prompts=[null]"), "report.prompts[0] is null"),
    Row("scaling without its type", trainer("model.rope_scaling.factor=3"), "model.rope_scaling.rope_type is missing"),
    Row("an unknown key", trainer("optimzer.lr=1"), "Did you mean 'optimizer.lr'?"),
    Row("an unknown section", trainer(optimzer={"lr": 1}), ("no setting optimzer.", "Did you mean 'optimizer'?")),
    Row("an unknown key in a section", trainer(model={"hidden_sizes": 1}), "Did you mean 'model.hidden_size'?"),
    Row("an unknown key two levels down", trainer(engine={"checkpoint": {"evry": 1}}), "Did you mean 'engine.checkpoint.every'?"),
    Row("an unknown key of a source", trainer("data.prepare.sources=[{pth: x}]"), "Did you mean 'data.prepare.sources[0].path'?"),
    Row("a key below a number", trainer("steps.x=3"), ("no setting steps.x.", "Did you mean 'steps'?")),
    Row("a key in the wrong section", trainer("engine.lr=3"), "The only lr is 'optimizer.lr'."),
    Row("a renamed key", trainer("parallel.recompute=blocks"), "is an older name: write parallel.activation_checkpointing"),
    Row("a renamed key in a file", trainer(max_gradient_norm=1), "max_gradient_norm is an older name: write max_grad_norm."),
    Row("a renamed value", trainer("model.attention=naive"), "model.attention naive is an older name: write eager."),
    Row("an unknown mode", trainer("mode=sfd"), "mode is 'sfd': give one of pretrain, sft"),
    Row("whose implementation", trainer("impl=theirs"), "theirs"),
    Row("an implementation that is a list", trainer(impl=["mine"]), "There is no implementation ['mine']"),
    Row("no such layout", start("dp0", "{folder}/tiny.yaml"), "parallel.data_parallel is 0"),
    Row("a layout of a million ranks", start("dp1000000", "{folder}/tiny.yaml"), ("LAYOUT dp1000000", "CPU cores")),
    Row("a layout and a word that differ", start("dp2", "{folder}/tiny.yaml", "parallel.data_parallel=4"),
        ("LAYOUT dp2 means parallel.data_parallel=2", "gives 4")),
    Row("a layout and a file that differ", start("fsdp2", "{folder}/tiny.yaml", parallel={"data_parallel": 2}),
        ("LAYOUT fsdp2 means parallel.data_parallel=1", "tiny.yaml gives 2")),
    Row("a layout and a section as a word", start("dp2", "{folder}/tiny.yaml", "parallel={zero: 1}"), ("parallel.zero=0", "gives 1")),
    Row("a layout and parallel as a number", start("dp2", "{folder}/tiny.yaml", parallel=3), "parallel is 3: it is a section"),
    Row("a layout and an empty output", start("dp2", "{folder}/tiny.yaml", engine={"output": ""}), "engine.output is ''"),
    Row("a layout and an unknown key", start("dp2", "{folder}/tiny.yaml", "optimzer.lr=1"), "Did you mean 'optimizer.lr'?"),
    Row("a layout that cuts two heads over four ranks", start("tp4", "{folder}/tiny.yaml"), "4 does not divide num_attention_heads 2"),
    Row("rows that cannot be cut", start("tp2", "{folder}/tiny.yaml", "parallel.sequence_parallel=true", "data.seq=95"), "data.seq is 95"),
    Row("a layout alone", start("dp2"), "Give a configuration after the layout"),
]  # fmt: skip

PPO = ("mode=ppo", "start_from=run", "model={}", "data.held_out_rows=128", "engine.evaluate_every=0")  # the defaults, which it lets be

GRPO = ("mode=grpo", "start_from=run", "model={}", "data.held_out_rows=128", "engine.evaluate_every=0")

STARTS = [
    Row("weights that are not there", trainer("start_from=none"), ("start_from is none", "does not exist")),
    Row("weights in an empty folder", trainer("start_from=empty"), ("start_from is empty", "not a model"), make=emptied),
    Row("weights in a file", trainer("start_from=tiny.yaml"), ("start_from is tiny.yaml", "not a model")),
    Row("a model without its weights", trainer("start_from=half"), ("start_from: half", "no weights"), make=half_a_model),
    Row("a config.json that is a list", trainer("start_from=odd"), ("start_from: odd/config.json", "no JSON object"), make=no_config),
    Row("fine-tuning without weights", trainer("mode=sft"), "mode is sft and start_from is null"),
    Row("an adapter in pretraining", trainer("adapter.rank=4"), "adapter is for the modes that fine-tune"),
    Row("conversations in pretraining", trainer("chats.sources=[{path: a.jsonl}]"), "chats is for mode sft"),
    Row("preferences without weights", trainer("mode=dpo"), "mode is dpo and start_from is null"),
    Row("pairs in pretraining", trainer("preferences.sources=[{path: a.jsonl}]"), "preferences is for mode reward or dpo or ppo"),
    Row("PPO's settings in pretraining", trainer("ppo.clip=0.3"), "the section ppo is for mode ppo"),
    Row("pairs that are for an encoder-decoder", trainer("mode=dpo", "preferences.template=pairs"), "preferences: template is pairs"),
    Row("all labels flipped", trainer("preferences.made.flipped=1"), "made.flipped is 1"),
    Row("too few pairs", trainer("preferences.made.pairs=3"), "made.pairs is 3"),
    Row("beta 0", trainer("dpo.beta=0"), "beta is 0.0"),
    Row("an unknown loss", trainer("dpo.loss=dpp"), "Did you mean 'dpo'?"),
    Row("a margin that the loss lacks", trainer("dpo.target_margin=1"), "target_margin has no effect with loss dpo"),
    Row("kto with a cache", trainer("dpo.loss=kto"), "loss kto needs reference beside"),
    Row("a negative centering", trainer("reward.centering=-1"), "centering is -1"),
    Row("answers that are not drawn", trainer("ppo.temperature=0"), "temperature is 0"),
    Row("minibatches that do not divide", trainer("ppo.minibatches=5"), "minibatches is 5 and does not divide"),
    Row("gold and a reward model", trainer("ppo.reward=gold", "ppo.reward_model=a"), "reward is gold, which asks no reward_model"),
    Row("an unknown reward", trainer("ppo.reward=silver"), "ppo.reward is 'silver'"),
    Row("a reward model that is a number", trainer(ppo={"reward_model": 3}), "ppo.reward_model is 3: give a path"),
    Row("PPO without a reward model", trainer("mode=ppo", "start_from=run", "model={}"), "ppo.reward_model is null", trained=True),
    Row("a reward model that is not there", trainer(*PPO, "ppo.reward_model=none", "engine.output=a"),
        ("ppo.reward_model is none", "holds no model"), code=1, trained=True),
    Row("a reward model that writes", trainer(*PPO, "ppo.reward_model=run", "engine.output=a"),
        ("ppo.reward_model is run", "is a language model"), code=1, trained=True),
    Row("held-out rows of PPO", trainer("mode=ppo", "start_from=run", "model={}", "ppo.reward=gold", "data.held_out_rows=8"),
        "data.held_out_rows has no effect with mode ppo", trained=True),
    Row("epochs of PPO", trainer("mode=ppo", "start_from=run", "model={}", "ppo.reward=gold", "data.epochs=2"),
        "data.epochs has no effect with mode ppo", trained=True),
    Row("GRPO's settings in pretraining", trainer("grpo.clip_low=0.3"), "the section grpo is for mode grpo"),
    Row("a group of one", trainer("grpo.answers=1"), "grpo.answers is 1: give at least 2"),
    Row("an unknown level", trainer("grpo.level=word"), "grpo.level is 'word'"),
    Row("a clip of 0", trainer("grpo.clip_low=0"), "clip_low is 0"),
    Row("a KL term without its reference", trainer("grpo.kl_coefficient=0.1", "grpo.reference=false"), "give reference true"),
    Row("a KL term whose gradient is 0", trainer(*GRPO, "grpo.kl_coefficient=0.1", "grpo.kl_estimator=k1"), "is k1, whose gradient",
        trained=True),
    Row("an overlong penalty without a length", trainer("grpo.overlong_penalty=1"), "belong together"),
    Row("no reward", trainer("grpo.rewards=[]"), "rewards is empty"),
    Row("a reward that nobody knows", trainer("grpo.rewards=[{name: applause}]"), "rewards names 'applause'"),
    Row("a reward twice", trainer("grpo.rewards=[{name: task}, {name: task}]"), "names one reward twice"),
    Row("a reward that counts nothing", trainer("grpo.rewards=[{name: task, weight: 0}]"), "The weight of the reward task is 0"),
    Row("an importance limit below 1", trainer("grpo.importance_limit=0.5"), "importance_limit is 0.5"),
    Row("conversations of GRPO", trainer(*GRPO, "chats.sources=[{path: a.jsonl}]"), "chats.sources are conversations", trained=True),
    Row("tasks in no file", trainer(*GRPO, "grpo.tasks.sources=[{path: no.jsonl}]", "engine.output=a"), "no.jsonl", code=1, trained=True),
    Row("a reward in no file", trainer(*GRPO, "grpo.rewards=[{name: 'no.py:mine'}]", "grpo.tasks.made.kinds=[sum]", "engine.output=a"),
        ("no.py:mine", "there is no file no.py"), trained=True),
    Row("a reward model that writes, in GRPO", trainer(*GRPO, "grpo.rewards=[{name: model, folder: run}]", "engine.output=a"),
        ("grpo.rewards is run", "is a language model"), code=1, trained=True),
    Row("a reference that the loss lacks", trainer("dpo.loss=simpo", "dpo.reference=beside"), "reference has no effect with loss simpo"),
    Row("pairs in no file", trainer("mode=dpo", "start_from=run", "model={}", "preferences.sources=[{path: no.jsonl}]", "engine.output=a"),
        "no.jsonl", code=1, trained=True),
    Row("an adapter of rank 0", trainer("adapter.rank=0"), "adapter.rank is 0: give at least 1"),
    Row("an adapter of a rank above its layers' sizes",
        trainer("mode=sft", "start_from=run", "model={}", "adapter.rank=1000", "engine.output=tuned", "instructions.examples=60"),
        ("adapter.rank is 1000", "q_proj is", "give at most"), code=1, trained=True),
    Row("an adapter of an unknown kind", trainer("adapter.kind=lore"), "Did you mean 'lora'?"),
    Row("an adapter that is a number", trainer(adapter=3), "adapter is 3"),
    Row("no conversations in a source", trainer("chats.sources=[{path: ''}]"), "chats.sources[0]"),
    Row("too many tasks", trainer("instructions.tasks=1000000"), "instructions.tasks is 1000000"),
    Row("weights at a number", trainer(start_from=3), "start_from is 3: give a path"),
    Row("weights at an empty path", trainer("start_from="), "start_from"),
    Row("weights at a path with a zero byte", trainer(start_from="a\0b"), "start_from"),
]  # fmt: skip

SIZES = [
    Row("hidden_size 10**9", trainer("model.hidden_size=1000000000"), ("does not fit into memory", "GiB"), code=1),
    Row("intermediate_size 10**12", trainer("model.intermediate_size=1000000000000"), "does not fit into memory", code=1),
    Row("a thousand wide blocks", trainer("model.hidden_size=100000", "model.num_hidden_layers=10000"), "does not fit into memory", code=1),
    Row("seq 10**9", trainer("data.seq=1000000000", "model.max_position_embeddings=1000000000"), ("does not fit", "data.seq"), code=1),
    Row("batch 10**9", trainer("data.batch_size=1000000000", "data.micro_batch_size=1000000000"), "does not fit", code=1),
    Row("batch 10**10 in micro-batches of 2", trainer("data.batch_size=10000000000"), ("does not fit", "data.batch_size"), code=1),
    Row("learned positions 10**12", trainer("model.max_position_embeddings=1000000000000", "model.position=learned", "report.export=false"),
        "does not fit into memory", code=1),
]  # fmt: skip

SOME_EXPERTS = "num_experts: 4, moe_intermediate_size: 9"

TOGETHER = [  # what only fails together: found when the run is built
    Row("a pattern that matches nothing", trainer("optimizer.to_adamw=[nothing*]"), ("optimizer.to_adamw", "'nothing*'"), code=1),
    Row("no decay for nothing", trainer("optimizer.no_decay=[nothing*]"), ("optimizer.no_decay", "'nothing*'"), code=1),
    Row("a model that no format holds", trainer("model.position=alibi"), "No known format can describe this model", code=1),
    Row("more ranks than were started", trainer("parallel.data_parallel=2"), ("This layout needs 2 ranks", "there are 1"), code=1),
    Row("a device that is not here", trainer("engine.device=mps"), "PyTorch finds no MPS device", code=1),
    Row("ranks for experts without experts", trainer("parallel.data_parallel=2", "parallel.expert_parallel=2"), "has no experts"),
    Row("more stages than layers", trainer("parallel.pipeline_parallel=16"), ("parallel.pipeline_parallel 16", "need at least one each")),
    Row("chunks without their schedule", trainer("parallel.pipeline_chunks=2"), "interleaved needs 2 chunks or more"),
    Row("an encoder", trainer("model.architecture=encoder"), "needs a decoder"),
    Row("zero with one replica", trainer("parallel.zero=1"), "parallel.zero is 1"),
    Row("experts without their sizes", trainer("model.experts={num_experts: 2}"), "model.experts.moe_intermediate_size is missing"),
    Row("experts cut unevenly", trainer(f"model.experts={{{SOME_EXPERTS}}}", "parallel.tensor_parallel=2"), "moe_intermediate_size 9"),
    Row(
        "a capacity of rows that no rank has whole",
        trainer(f"model.experts={{{SOME_EXPERTS}, capacity_factor: 1}}", "parallel.context_parallel=2"),
        "capacity_factor with parallel.context_parallel",
    ),
    Row(
        "experts as DTensors",
        trainer("model.experts={num_experts: 4, moe_intermediate_size: 8}", "parallel.tensor_parallel=2", "parallel.backend=torch"),
        "has no style for a stack of experts",
    ),
    Row("too few layer types", trainer("model.layer_types=[full_attention]"), "layer_types needs one entry for each block"),
    Row("eager attention with dropout", trainer("model.attention=eager", "model.attention_dropout=0.1"), "eager attention has no dropout"),
    Row("lion with fused", trainer("optimizer.name=lion", "optimizer.fused=true"), "lion does not use it"),
    Row("some sources weighted", trainer("data.prepare.sources=[{path: a, weight: 1}, {path: b}]"), "Some sources have a weight"),
    Row("an unknown cleaning stage", trainer("data.prepare.cleaning.stages=[repare]"), "Did you mean 'repair'?"),
    Row("an empty prompt", trainer("report.prompts=['']"), "report.prompts holds an empty text"),
]

ROWS = [*FILES, *TYPES, *STARTS, *SIZES, *TOGETHER]
