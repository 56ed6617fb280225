"""llama.cpp itself, in a process of its own: ids of texts, and log-probabilities of the next token behind prompts of ids.

    asked = {"model": "model.gguf", "texts": ["..."], "prompts": [[1, 2, 3]], "vocabulary": 320}
    answers_of([asked, ...])     for each: {"ids": [[...]], "next": [[log-probability of each id], or None]}

Its server says no probabilities where the next token alone is no whole character: None.
"""

import json
import subprocess
import sys
import urllib.request


def answers_of(asked: list[dict]) -> list[dict]:
    done = subprocess.run([sys.executable, __file__], input=json.dumps(asked), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def answer(asked: dict) -> dict:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = asked["model"], 256, 1, False, 0
    settings.cpuparams.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which computes in float16
    server = xllamacpp.Server(settings)

    def ids(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": True}).encode()
        address = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(address) as reply:
            return json.load(reply)["tokens"]

    def after(prompt: list[int]) -> list[float] | None:
        said = server.handle_completions(
            {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": asked["vocabulary"], "cache_prompt": False}
        )["choices"][0]["logprobs"]
        if not said:
            return None
        found = {each["id"]: each["logprob"] for each in said["content"][0]["top_logprobs"]}
        return [found[number] for number in range(asked["vocabulary"])]

    return {"ids": [ids(text) for text in asked.get("texts", [])], "next": [after(prompt) for prompt in asked.get("prompts", [])]}


if __name__ == "__main__":
    print(json.dumps([answer(asked) for asked in json.load(sys.stdin)]))
