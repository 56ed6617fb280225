"""Small models with a tokenizer in Hugging Face's format, and local data, for the tests of evaluation."""

import json
from pathlib import Path

from shared.data.tokenizer import TextTokenizer
from shared.model.config import ModelConfig
from shared.model.families import GPT2
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards mix strange potions near the quiet river bank. " * 40
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
SHAPES = {
    "gpt2": GPT2 | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | SIZES,
    "llama": SIZES | {"num_key_value_heads": 2, "intermediate_size": 96},
}
QUESTIONS = [
    {"question": "the quick brown", "options": [" fox jumps", " wizards", " potions é near", " dog"], "label": 0},
    {"question": "seven wizards mix stra", "options": ["nge potions near the quiet", "nger potions near the river"], "label": 1},
    {"question": "the quick brown fox ju", "options": ["mps over the lazy", "mps over", "dge"], "label": 0},
    {"question": "the lazy dog while", "options": ["seven", "quiet", "the quick brown fox jumps over"], "label": 2},
    {"question": "", "options": ["the quick", "river bank", "漢字 potions"], "label": 0},
    {"question": "over the " * 40, "options": ["lazy dog", "quiet river bank", "the"], "label": 0},
    {"question": "near the quiet ", "options": ["river", "bank", "x"], "label": 1},
    {"question": "near seven", "options": ["éé", "vv"], "label": 0},  # by bytes the first choice, by characters the second
]  # fmt: skip


def model_folder(folder: Path, shape: str, seed: int = 0, positions: int = 64) -> Path:
    """A model with random weights, spread enough for distinct likelihoods, and a tokenizer that merges within words."""
    tokenizer = TextTokenizer.train([TEXT], 420, sentinels=4)
    tokenizer.save_pretrained(folder, positions)
    sizes = SHAPES[shape] | {"max_position_embeddings": positions, "vocab_size": tokenizer.vocab_size}
    model = TransformerModel(ModelConfig(**sizes), seed=seed)
    save_pretrained(model, folder, token_ids={"eos_token_id": tokenizer.end_id})
    return folder


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


TEXTS = [{"text": text} for text in (TEXT[:30], "é 漢字 the river bank.\n" * 3, TEXT[:900], "x")]
OPENINGS = [{"opening": text, "wanted": "fox"} for text in ("the quick", "seven wizards mix ", "over the " * 40, "near")]
HARNESS = {  # tasks of lm-eval: what all have, and each
    "choosing": "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: options\ndoc_to_target: label\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n",
    "writing": "output_type: generate_until\ndoc_to_text: opening\ndoc_to_target: wanted\n"
    "generation_kwargs: {until: [' w', 'q'], max_gen_toks: 24}\nmetric_list: [{metric: exact_match}]\n",
}
OURS = {
    "choosing": "kind: choice\nprompt: '{{ question }}'\nchoices: options\nanswer: label\ndelimiter: ''\n",
    "rolling": "kind: text\n",
    "writing": "kind: generate\nprompt: '{{ opening }}'\nanswer: wanted\nstop: [' w', q]\nnew_tokens: 24\n",
}
RECORDS = {"choosing": QUESTIONS, "rolling": TEXTS, "writing": OPENINGS}


def write_tasks(folder: Path) -> Path:
    """The same tasks for lm-eval, in `folder`/harness, and for us, in `folder`/ours, over the same files."""
    for place in ("harness", "ours"):
        (folder / place).mkdir(parents=True)
    for name, records in RECORDS.items():
        data = write_records(folder / f"{name}.jsonl", records)
        files = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / "harness" / f"{name}.yaml").write_text(files + HARNESS[name])
        (folder / "ours" / f"{name}.yaml").write_text(f"data: {{path: {data}}}\n{OURS[name]}")
    return folder
