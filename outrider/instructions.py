"""Sets of instructions that the C++ kernels are written for, and the compiler's flags for each. No
torch: installers read it."""

import ctypes
import platform
import sys

# bf16 and byte products of AVX-512 (no processor has the first alone), or AVX2; NEON with byte
# products and fp16
INSTRUCTIONS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vnni", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": ("-march=armv8.2-a+dotprod+fp16",),
}
# system and processor, as Python calls them: what libraries for it are built with, the best first
ARCHITECTURES = {
    ("linux", "x86_64"): ("avx512", "avx2"),
    ("linux", "aarch64"): ("neon",),
    ("darwin", "arm64"): ("neon",),
    ("win32", "AMD64"): ("avx512", "avx2"),
}
# Linux: asm/hwcap.h
AT_HWCAP = 16
FP16 = 1 << 10
BYTE_PRODUCTS = 1 << 20


def of_this_architecture() -> tuple[str, ...]:
    """The sets of instructions that libraries for this system are built with, the best first; none
    on a system that has no library."""
    return ARCHITECTURES.get((sys.platform, platform.machine()), ())


def of_this_cpu() -> str | None:
    """The best of INSTRUCTIONS that this CPU has; None: it has none of them, or its system has no
    library."""
    kinds = of_this_architecture()
    if "neon" in kinds:
        return "neon" if _has_neon_products() else None
    if not kinds:
        return None
    import torch

    if torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported():
        return "avx512"
    return "avx2" if torch.cpu._is_avx2_supported() else None


def _has_neon_products() -> bool:
    """Whether an ARM processor has fp16 and byte products; all that run macOS have."""
    if sys.platform != "linux":
        return True
    capabilities = ctypes.CDLL(None).getauxval(AT_HWCAP)
    return bool(capabilities & FP16 and capabilities & BYTE_PRODUCTS)
