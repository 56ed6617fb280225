"""Every number of the trainer's configuration with values that it cannot have: each is refused by its key."""

from hostile import Row, trainer

NUMBERS = [  # (key, values that it cannot have)
    ("steps", ("0", "-1", "99999999999999999999")),
    ("seed", ("-1",)),
    ("max_grad_norm", ("0", "-1", ".nan", ".inf")),
    ("data.seq", ("0", "-5")),
    ("data.batch_size", ("0", "-4")),
    ("data.micro_batch_size", ("0", "3")),
    ("data.epochs", ("0",)),
    ("data.held_out_rows", ("0",)),
    ("data.fim.rate", ("-0.1", "1.1", ".nan")),
    ("data.fim.spm_share", ("2",)),
    ("data.prepare.held_out_share", ("0", "1", ".nan")),
    ("data.prepare.vocab_size", ("0", "256", "-1")),
    ("data.prepare.sentinels", ("-1", "1000000000")),
    ("data.prepare.tokenizer_bytes", ("0",)),
    ("data.prepare.part_bytes", ("0",)),
    ("data.prepare.workers", ("-1",)),
    ("data.prepare.cleaning.min_bytes", ("-1", "3000000")),
    ("data.prepare.cleaning.max_bytes", ("-1",)),
    ("data.prepare.cleaning.min_probability", ("0", "2", ".nan")),
    ("data.prepare.cleaning.similarity", ("0", "2", ".inf")),
    ("model.hidden_size", ("0", "-32", "33")),
    ("model.num_hidden_layers", ("0", "1000000000")),
    ("model.num_attention_heads", ("0", "3")),
    ("model.num_key_value_heads", ("0", "3")),
    ("model.head_dim", ("0",)),
    ("model.intermediate_size", ("0",)),
    ("model.max_position_embeddings", ("0", "8")),
    ("model.rope_theta", ("0", "-1", ".nan", ".inf")),
    ("model.norm_eps", ("-1", "0", ".nan")),
    ("model.attention_scale", ("0", "-1", ".nan")),
    ("model.logit_scale", ("0", ".inf")),
    ("model.sliding_window", ("0",)),
    ("model.type_vocab_size", ("-1",)),
    ("model.relative_attention_num_buckets", ("0",)),
    ("model.hidden_dropout", ("-0.1", "1", ".nan")),
    ("model.attention_dropout", ("1.5",)),
    ("model.initializer_range", ("-0.02", "0", ".nan", ".inf")),
    ("optimizer.lr", ("0", "-1", ".nan", ".inf", "1e400", "nan")),
    ("optimizer.weight_decay", ("-0.1", ".nan", ".inf")),
    ("optimizer.eps", ("-1", ".nan")),
    ("optimizer.momentum", ("-0.1", "1", ".nan")),
    ("optimizer.betas", ("[1, 0.9]", "[-0.1, 0.9]", "[0.9, .nan]")),
    ("optimizer.newton_schulz_steps", ("0", "1000000000")),
    ("optimizer.adamw_lr", ("0", ".nan")),
    ("schedule.warmup_steps", ("-1", "7")),
    ("schedule.decay_steps", ("-1",)),
    ("schedule.minimum", ("-0.1", "1.1", ".nan")),
    ("parallel.data_parallel", ("0",)),
    ("parallel.prefetch", ("-1",)),
    ("parallel.bucket_megabytes", ("0", ".nan")),
    ("parallel.heartbeat_timeout", ("0", "-1", ".nan", ".inf")),
    ("parallel.collective_timeout", ("1",)),
    ("parallel.check_every", ("-1",)),
    ("engine.log_every", ("0",)),
    ("engine.evaluate_every", ("-1",)),
    ("engine.early_stopping", ("-1",)),
    ("engine.checkpoint.every", ("-1",)),
    ("engine.checkpoint.keep_last", ("0",)),
    ("engine.anomalies.spike_deviations", ("-1", ".nan")),
    ("engine.anomalies.window", ("7",)),
    ("engine.dump.every", ("-1",)),
    ("engine.profile.first_step", ("-1",)),
    ("report.completions", ("-1",)),
    ("report.new_tokens", ("0",)),
    ("report.temperature", ("-1", ".nan", ".inf")),
    ("report.top_k", ("0",)),
]
SOURCES = [("limit", "0"), ("limit", "x"), ("weight", "0"), ("weight", ".nan"), ("weight", "-1")]


def number_row(key: str, value: str) -> Row:
    changes = {"optimizer": {"name": "adamw"}} if key == "optimizer.betas" else {}
    return Row(f"{key} {value}", trainer(f"{key}={value}", **changes), key.rpartition(".")[2])


ROWS = [
    *(number_row(key, value) for key, values in NUMBERS for value in values),
    *(Row(f"a source's {name} {value}", trainer(f"data.prepare.sources=[{{path: x, {name}: {value}}}]"), name) for name, value in SOURCES),
]
