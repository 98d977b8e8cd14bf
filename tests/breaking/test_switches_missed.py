"""What broke once or still does: switches that choose kernels."""

import pytest
import torch

from accel.guard import Ambient

C = torch._C
SWITCHES = {
    "matmul.allow_fp16_accumulation": (
        C._get_cublas_allow_fp16_accumulation,
        C._set_cublas_allow_fp16_accumulation,
    ),
    "math sdp reduction": (
        C._get_math_sdp_allow_fp16_bf16_reduction,
        C._set_math_sdp_allow_fp16_bf16_reduction,
    ),
    "fa3 sdp": (C._get_fa3_sdp_enabled, C._set_sdp_use_fa3),
    "deterministic fill": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda v: setattr(torch.utils.deterministic, "fill_uninitialized_memory", v),
    ),
    "multi-head attention's fast path": (
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
    ),
    "the order of einsum": (
        lambda: torch.backends.opt_einsum.enabled,
        lambda v: setattr(torch.backends.opt_einsum, "enabled", v),
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_part_of_the_key(name, sim):
    read, write = SWITCHES[name]
    before, key = read(), Ambient("sim").key
    write(not before)
    try:
        assert read() != before and Ambient("sim").key != key
    finally:
        write(before)


def test_the_preferred_blas_library_is_part_of_the_key(sim, monkeypatch):
    key = Ambient("sim").key
    before = C._get_blas_preferred_backend()
    other = next(b for b in (C._BlasBackend.Cublaslt, C._BlasBackend.Cublas) if b != before)
    try:
        C._set_blas_preferred_backend(other)
    except RuntimeError:
        pytest.skip("needs CUDA")
    try:
        assert Ambient("sim").key != key
    finally:
        C._set_blas_preferred_backend(before)
