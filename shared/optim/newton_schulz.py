"""Chapter 05. Newton-Schulz: give a matrix singular values near 1 with nothing but matrix products.

A matrix G = U S V^T stretches some directions more than others. U V^T is the matrix nearest to it that stretches none. The singular
value decomposition would give it, slowly; an odd polynomial applied to G a few times acts on the singular values alone,

    p(X) = a X + b (X X^T) X + c (X X^T)^2 X,      p(U S V^T) = U p(S) V^T,      p(s) = a s + b s^3 + c s^5,

and needs only products. The coefficients of Jordan et al. 2024 ("Muon") do not converge to 1: their slope a at 0 is as steep as
possible, so that tiny singular values are lifted within five steps, and all end between about 0.7 and 1.2. That is enough.

Left out on purpose: coefficients that change from step to step (Polar Express), which get closer to 1.
"""

from torch import Tensor

from shared.course.binding import exercise


@exercise("05.newton_schulz")
def newton_schulz(
    matrices: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), eps: float = 1e-7
) -> Tensor:
    """The matrices with their singular values pushed towards 1 (Jordan et al. 2024, "Muon", section "Newton-Schulz").

        X = G / max(||G||, eps);   then, `steps` times,   X = a X + (b A + c A A) X   with   A = X X^T

    ||G|| is the Frobenius norm, the root of the sum of all squares of one matrix: no singular value is larger.

    Args:
        matrices: [..., rows, columns], any floating dtype, which the computation keeps. Left unchanged. Leading dimensions count
            matrices that have nothing to do with each other, such as experts.
        steps: how often the polynomial is applied.
        coefficients: (a, b, c).
        eps: the smallest norm to divide by, so that a matrix of zeros stays one.

    Returns:
        [..., rows, columns]. The product X X^T has the smaller of the two sides: a matrix with more rows than columns is
        transposed before, and back afterwards.

    >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0]])            # of norm 5: s = 0.6 and 0.8, and s + s^3 of each is
    >>> newton_schulz(matrix, steps=1, coefficients=(1.0, 1.0, 0.0))
    tensor([[0.8160, 0.0000],
            [0.0000, 1.3120]])

    The body stands in solutions/05_optimizers.py; `course read shared.optim.newton_schulz` shows it in place.
    """
