"""Sets of instructions that the C++ kernels are written for, and the compiler's flags for each. No torch: installers read it."""

# bf16 and byte products of AVX-512 (no processor has the first alone), or AVX2
INSTRUCTIONS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vnni", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}


def of_this_cpu() -> str | None:
    """The best of INSTRUCTIONS that this CPU has; None: it has none of them."""
    import torch

    if torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported():
        return "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else None
