"""Check of 01.cross_entropy. Oracle: torch.nn.functional.cross_entropy(reduction="sum"), on float32 or float64 logits.

Tolerances. Both sides reduce the same numbers in the same precision but may add them in another order. float64: sums of at
most 150 terms agree to 150 * 1e-16, so 1e-12 is generous and still ten digits below any mistake; 1e-15 beside it is for
gradients near 0. float32: 1e-6 is 8 units in the last place. A gradient in bfloat16 or float16 is rounded from float32, so
it may differ by one unit in the last place: 2**-7 or 2**-10. Next to a float32 logit of 10,000, whose last place is 2**-10,
no more than that can be asked for.
"""

import torch
import torch.nn.functional as F

from shared.course.checking import Case, Check

CONTRACT = "the contract"
ORACLE = 'torch.nn.functional.cross_entropy(..., reduction="sum")'
LOG_4 = "arithmetic: -log(1/4) = 1.3862944 nats for each target"


def exactly(logits: list, targets: list | int, dtype=torch.float32):
    return lambda: {"logits": torch.tensor(logits, dtype=dtype), "targets": torch.tensor(targets)}


def random(*shape: int, vocab: int, dtype=torch.float64, ignored: int = 0, scale: float = 1.0):
    """Logits [*shape, vocab] and targets [*shape], the same at each call; of every third target, the first `ignored` are -100."""

    def given():
        generator = torch.Generator().manual_seed(vocab)
        logits = torch.randn(*shape, vocab, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
        targets = torch.randint(vocab, shape, generator=generator)
        targets.view(-1)[::3][:ignored] = -100
        return {"logits": logits, "targets": targets}

    return given


def transposed():
    """The first two dimensions exchanged without a copy, as a model that works on [seq, batch] hands its logits over."""
    return {name: tensor.transpose(0, 1) for name, tensor in random(7, 3, vocab=5, ignored=2)().items()}


def none_counts():
    return {"logits": random(2, vocab=5)()["logits"], "targets": torch.tensor([-100, -100])}


def left_as_it_was(function, logits, targets):
    function(logits, targets)
    return {"logits.requires_grad afterwards": logits.requires_grad}


def answer(loss_sum: float, token_count: int, dtype=torch.float32):
    return lambda logits, targets: {"loss_sum": torch.tensor(loss_sum, dtype=dtype), "token_count": torch.tensor(token_count)}


def by_torch(logits, targets):
    exact = logits if logits.dtype == torch.float64 else logits.float()
    loss_sum = F.cross_entropy(exact.reshape(-1, exact.shape[-1]), targets.reshape(-1), reduction="sum", ignore_index=-100)
    return {"loss_sum": loss_sum, "token_count": torch.tensor(sum(target != -100 for target in targets.flatten().tolist()))}


def gradient(function, logits, targets):
    """What flows back to the logits when the loss is worth 1.7 to whoever uses it."""
    leaf = logits.clone().requires_grad_()
    loss_sum, _ = function(leaf, targets)
    (loss_sum * 1.7).backward()
    return {"gradient of 1.7 * loss_sum": leaf.grad}


def gradient_by_torch(logits, targets):
    return gradient(lambda z, t: tuple(by_torch(z, t).values()), logits, targets)


def shape_case(title: str, given) -> Case:
    return Case("shape and dtype", title, given, by_torch, CONTRACT)


def gradient_case(title: str, given, rtol: float = 1e-12) -> Case:
    return Case("oracle", title, given, gradient_by_torch, ORACLE, observe=gradient, rtol=rtol, atol=1e-15)


CHECK = Check(
    exercise="01.cross_entropy",
    outputs=("loss_sum", "token_count"),
    spoilt=("loss_sum", "token_count", "gradients through loss_sum"),
    forbidden=("cross_entropy", "nll_loss"),
    cases=[
        shape_case("the results for one prediction", exactly([[0.0, 1.0, 2.0]], [2])),
        shape_case("the results for logits [2, 3, 5]", random(2, 3, vocab=5, dtype=torch.float32)),
        shape_case("float64 logits keep their precision", random(3, vocab=5)),
        shape_case("half-precision logits are computed with in float32", random(3, vocab=5, dtype=torch.bfloat16)),
        Case("worked example", "one target among four equally likely tokens", exactly([[0.0] * 4], [3]), answer(1.3862944, 1), LOG_4),
        Case(
            "worked example", "two targets, one of them token 0, among four equally likely tokens", exactly([[0.0] * 4] * 2, [0, 3]),
            answer(2.7725887, 2), LOG_4,
        ),
        Case(
            "worked example", "two targets, and a third, -100, which changes nothing", exactly([[0.0] * 4] * 3, [0, 3, -100]),
            answer(2.7725887, 2), LOG_4,
        ),
        Case(
            "worked example", "probabilities 1/8 and 7/8, and the target is the less likely token",
            exactly([[0.0, 1.9459101]], [0]), answer(2.0794415, 1), "arithmetic: -log(1/8) = 2.0794415",
        ),
        Case("property", "one prediction without a batch dimension", exactly([0.0] * 4, 2), answer(1.3862944, 1), LOG_4),
        Case(
            "property", "a vocabulary of one token holds no surprise", exactly([[3.0], [5.0]], [0, -100]),
            answer(0.0, 1), "arithmetic: -log(1) = 0",
        ),
        Case(
            "property", "no target counts", exactly([[0.5, -1.0, 2.0]] * 2, [-100, -100]),
            answer(0.0, 0), "the contract: -100 costs nothing and is not counted",
        ),
        Case(
            "property", "a logit of 10,000 does not overflow", exactly([[10_000.0, 0.0, 5.0]], [2]),
            answer(9995.0, 1), "arithmetic: logsumexp is 10,000, and 10,000 - 5 = 9,995",
        ),
        Case(
            "property", "logits of -10,000 do not all vanish", exactly([[-10_000.0, -10_000.0]], [1]),
            answer(0.6931472, 1), "arithmetic: two equally likely tokens, log(2), up to the rounding of 10,000 in float32", atol=2**-10,
        ),
        Case(
            "property", "a logit of 30,000, and a loss of as much", exactly([[30_000.0, 0.0], [0.0, 3.0]], [1, 1]),
            answer(30_000.048587, 2), "arithmetic: 30,000 + log(1 + exp(-3))",
        ),
        Case(
            "property", "a prediction of NaN is not hidden", exactly([[float("nan"), 0.0], [0.0, 0.0]], [1, 1]),
            answer(float("nan"), 2), "the contract: logsumexp of NaN is NaN, and a run that hides it trains on nothing",
        ),
        Case(
            "property", "logits that require no gradient do not afterwards", exactly([[0.0, 1.0]], [1]),
            lambda **given: {"logits.requires_grad afterwards": False}, "the contract: left unchanged", left_as_it_was,
        ),
        Case("oracle", "three float64 predictions", random(3, vocab=5), by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "[2, 3] predictions, one ignored", random(2, 3, vocab=5, ignored=1), by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "logits and targets that are not contiguous", transposed, by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "[11, 13] predictions, wide logits", random(11, 13, vocab=17, ignored=23, scale=30), by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "float32", random(3, 7, vocab=11, dtype=torch.float32, ignored=2), by_torch, ORACLE),
        Case("oracle", "bfloat16", random(3, 7, vocab=11, dtype=torch.bfloat16, ignored=2), by_torch, ORACLE),
        Case("oracle", "bfloat16, 301 targets", random(301, vocab=3, dtype=torch.bfloat16), by_torch, ORACLE),
        Case("oracle", "a vocabulary of 40,000, and ids above 32,767", random(11, vocab=40_000), by_torch, ORACLE, rtol=1e-12),
        Case("oracle", "float16, sum above 65,504", random(13, 17, vocab=11, dtype=torch.float16, scale=300), by_torch, ORACLE),
        gradient_case("gradient of three predictions", random(3, vocab=5)),
        gradient_case("gradient where targets are ignored", random(2, 3, vocab=5, ignored=2)),
        gradient_case("gradient where no target counts", none_counts),
        gradient_case("gradient of wide logits", random(5, 7, vocab=11, ignored=5, scale=3000)),
        gradient_case("gradient in bfloat16", random(3, 7, vocab=11, dtype=torch.bfloat16, ignored=2), rtol=2**-7),
        gradient_case("gradient in float16", random(3, 7, vocab=11, dtype=torch.float16, ignored=2), rtol=2**-10),
    ],
)
