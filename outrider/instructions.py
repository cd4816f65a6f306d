"""Sets of instructions that the C++ kernels are written for, and the compiler's flags for each. No torch: installers read it."""

# bf16 and byte products of AVX-512 (no processor has the first alone), or AVX2
INSTRUCTIONS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vnni", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
