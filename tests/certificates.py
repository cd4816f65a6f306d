"""Certificates for tests, made by the system's openssl: nothing secret is kept in the repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for `name` that signs itself, and its key, as PEM files. Skips the test where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
        "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
