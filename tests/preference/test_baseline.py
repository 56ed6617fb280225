"""KTO's baseline against the answers put together by hand."""

import torch
from pair_rows import packed_row, pair_batch, random_documents

from shared.loss import IGNORED
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.parallel.comm.threads import run_threads
from shared.preference.baseline import BaselinedLoader, exchanged
from shared.preference.reference import scorer

MODEL = ModelConfig(
    vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=32,
    initializer_range=0.3,
)  # fmt: skip
SEQ = 25


def plain(seed: int, answers: list[int]):
    """Rows of so many single answers, each with a prompt of its own."""
    batch = pair_batch(seed, [0] * len(answers), SEQ, 23)
    generator = torch.Generator().manual_seed(seed)
    rows = [packed_row([random_documents(generator, 1, 23)[0] for _ in range(count)], SEQ) for count in answers]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} | {"desirable": batch["desirable"]}


def texts(batch) -> list[list[tuple[list[int], list[int]]]]:
    """Prompt and answer of each sequence of each row."""
    found = []
    for ids, targets, documents in zip(batch["input_ids"], batch["targets"], batch["documents"], strict=True):
        found.append([])
        for number in range(int(documents.max()) + 1):
            here = documents == number
            counted = targets[here] != IGNORED
            first = int(counted.int().argmax())
            assert counted[first:].all()  # of these, each answer is trained as a whole
            found[-1].append((ids[here][: first + 1].tolist(), targets[here][first:].tolist()))
    return found


def test_each_prompt_has_the_answer_before_its_own():
    batch = plain(0, [3, 2, 1, 0])
    before, after = texts(batch), texts(exchanged(batch))
    for row in range(2):
        prompts, answers = [prompt for prompt, _ in before[row]], [answer for _, answer in before[row]]
        assert after[row] == list(zip(prompts, answers[-1:] + answers[:-1], strict=True))
    assert after[2:] == [[], []]
    assert exchanged(batch)["input_ids"].shape == batch["input_ids"].shape


def test_a_turn_that_is_not_trained_stays_within_its_answer():
    ids = torch.arange(1, 9)
    row = packed_row([(ids, 2), (torch.tensor([20, 21, 22]), 1)], SEQ)
    row["targets"][3] = IGNORED  # token 5 is read and not trained
    found = exchanged({name: value[None] for name, value in row.items()})
    assert found["input_ids"][0, :9].tolist() == [1, 2, 21, 20, 3, 4, 5, 6, 7]
    assert found["targets"][0, :9].tolist() == [-100, 21, 22, 3, 4, -100, 6, 7, 8]


def test_the_baseline_is_the_mean_over_a_step_s_exchanged_answers_and_at_least_0():
    policy, reference = TransformerModel(MODEL, seed=1).double(), TransformerModel(MODEL, seed=2).double()
    step = [plain(3, [3, 2]), plain(4, [1, 2])]
    gains = []
    for batch in step:
        for row in texts(exchanged(batch)):
            for prompt, answer in row:
                ids, log_probs = torch.tensor([prompt + answer]), []
                for model in (policy, reference):
                    said = model(ids[:, :-1])[0].log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
                    log_probs.append(said.sum())
                gains.append((log_probs[0] - log_probs[1]).item())
    assert len(gains) == 7
    mean = sum(gains) / len(gains)
    forth, back = (next(iter(BaselinedLoader([step], *models)))[1]["baseline"] for models in
                   [(scorer(reference), scorer(policy)), (scorer(policy), scorer(reference))])  # fmt: skip
    torch.testing.assert_close(forth, torch.full((2, SEQ), max(mean, 0), dtype=torch.float64))
    torch.testing.assert_close(back, torch.full((2, SEQ), max(-mean, 0), dtype=torch.float64))
    assert mean != 0


def test_an_evaluation_is_one_step_and_ranks_share_the_mean():
    policy, reference = TransformerModel(MODEL, seed=1).double(), TransformerModel(MODEL, seed=2).double()
    batches = [plain(3, [3, 2]), plain(4, [1, 2]), plain(5, [3, 0])]
    one = [batch["baseline"][0, 0].item() for batch in BaselinedLoader(batches, scorer(reference), scorer(policy))]
    assert len(set(one)) == 1 and len(one) == 3 and one[0] > 0
    shares = [batches[:1], batches[1:]]
    loader = lambda world: BaselinedLoader(shares[world.rank], scorer(reference), scorer(policy), world)
    for found in run_threads(lambda world: [batch["baseline"] for batch in loader(world)], 2):
        assert all(torch.allclose(each, torch.tensor(one[0], dtype=torch.float64), rtol=1e-12) for each in found)


def test_rows_without_two_answers_have_a_baseline_of_0():
    policy, reference = TransformerModel(MODEL, seed=1), TransformerModel(MODEL, seed=2)
    (batch,) = next(iter(BaselinedLoader([[plain(0, [1, 0])]], scorer(reference), scorer(policy))))
    assert not batch["baseline"].any()
