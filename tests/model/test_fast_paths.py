"""What makes a step fast must not change it: gradients written out, casts made once, memory that is kept."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from shared.model.context import to_compute_dtype
from shared.model.norm import RMSNormFunction, rms_norm
from shared.model.rope import apply_rope


def randn(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_norms_gradient_is_autograds_and_that_of_finite_differences():
    x, weight = randn(3, 5, 7).requires_grad_(), randn(7, seed=1).requires_grad_()
    torch.autograd.gradcheck(lambda x, w: RMSNormFunction.apply(x, w, 1e-3), (x, weight))
    cotangent = randn(3, 5, 7, seed=2)
    by_hand = torch.autograd.grad(RMSNormFunction.apply(x, weight, 1e-3), (x, weight), cotangent)
    by_autograd = torch.autograd.grad(rms_norm(x, weight, 1e-3), (x, weight), cotangent)
    for left, right in zip(by_hand, by_autograd, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]
)
def test_the_norms_gradient_in_half_precision_has_the_arguments_dtypes_and_size(x_dtype, weight_dtype):
    x, weight = randn(5, 64).to(x_dtype).requires_grad_(), randn(64, seed=1).to(weight_dtype).requires_grad_()
    out = RMSNormFunction.apply(x, weight, 1e-5)
    cotangent = randn(5, 64, seed=2)
    found = torch.autograd.grad(out, (x, weight), cotangent.to(out.dtype))
    wide = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    expected = torch.autograd.grad(rms_norm(*wide, 1e-5), wide, cotangent)
    assert [gradient.dtype for gradient in found] == [x_dtype, weight_dtype]
    for left, right in zip(found, expected, strict=True):
        assert (left.double() - right).abs().max() < 0.02 * right.abs().max()


def test_the_gradient_of_rope_is_the_rotation_back():
    x, angles, cotangent = randn(2, 3, 5, 8).requires_grad_(), randn(5, 4, seed=1), randn(2, 3, 5, 8, seed=2)
    (gradient,) = torch.autograd.grad(apply_rope(x, angles.cos(), angles.sin()), x, cotangent)
    torch.testing.assert_close(gradient, apply_rope(cotangent, angles.cos(), -angles.sin()), rtol=1e-12, atol=1e-14)


def saved_bytes(call) -> int:
    """What autograd keeps for the backward pass, each storage once, without the arguments' own."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        call()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_the_gradients_written_out_keep_less():
    x, weight, angles = randn(64, 96).requires_grad_(), randn(96).requires_grad_(), randn(64, 48)
    plain, by_hand = saved_bytes(lambda: rms_norm(x, weight, 1e-5)), saved_bytes(lambda: RMSNormFunction.apply(x, weight, 1e-5))
    assert by_hand == x.nbytes + weight.nbytes < plain
    assert saved_bytes(lambda: apply_rope(x, angles.cos(), angles.sin())) == 4 * angles.nbytes, "tables of the full width, nothing of x"


def test_what_several_layers_read_is_cast_once_under_autocast():
    x, casts = torch.randn(2, 5, 48), []
    layers = [nn.Linear(48, 8) for _ in range(3)]

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and args[0].shape == x.shape:
                casts.append(function)
            return function(*args, **(kwargs or {}))

    for prepare in (lambda x: x, to_compute_dtype):
        with torch.autocast("cpu", torch.bfloat16), Counting():
            prepared = prepare(x)
            outs = [layer(prepared) for layer in layers]
    assert len(casts) == 3 + 1 and outs[0].dtype == torch.bfloat16
    assert to_compute_dtype(x) is x


ALLOCATE = """
import ctypes, resource, sys, torch
if ctypes.CDLL(None).prctl(41, 1, 0, 0, 0):  # no huge pages, with which there would be a few faults only (PR_SET_THP_DISABLE)
    sys.exit("huge pages")
from shared.devices import keep_freed_memory
def faults(times=5):
    for _ in range(20): torch.zeros(5000, 2000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times): torch.zeros(5000, 2000)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // times
usual = faults()
print(keep_freed_memory(), usual, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the call is glibc's")
def test_freed_memory_is_kept():
    done = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True, timeout=180)
    if done.stderr.strip() == "huge pages":
        pytest.skip("this kernel does not let a process do without huge pages")
    listened, usual, kept = done.stdout.split()
    assert listened == "True", done.stderr
    assert int(usual) > 1000, "40 MB are 9,766 pages; without the call they are fetched anew each time"
    assert int(kept) < 20
