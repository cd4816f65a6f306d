"""Certificates for tests, made by the system's openssl: nothing secret is kept in the repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate for `name` that signs itself, and its key, as PEM files. Skips the test where
    there is no openssl."""
    certificate = folder / "cert.pem"
    key = folder / "key.pem"
    _openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-addext",
        f"subjectAltName=DNS:{name}",
        "-keyout",
        key,
        "-out",
        certificate,
    )
    return certificate, key


class Authority:
    """Signs certificates; its own is `certificate`. Skips the test where there is no openssl."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = folder / "authority.key"
        self.certificate = folder / "authority.pem"
        _openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN=authority of {folder.name}",
            "-keyout",
            self._key,
            "-out",
            self.certificate,
        )

    def signed(self, name: str, alternatives: str) -> tuple[Path, Path]:
        """A certificate and its key; `alternatives` as openssl writes them: IP:127.0.0.1, DNS:name."""
        certificate = self._folder / f"{name}.pem"
        key = self._folder / f"{name}.key"
        request = self._folder / f"{name}.csr"
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternatives}\n", encoding="utf-8")
        _openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            f"/CN={name}",
            "-keyout",
            key,
            "-out",
            request,
        )
        _openssl(
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            self.certificate,
            "-CAkey",
            self._key,
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            extensions,
            "-out",
            certificate,
        )
        return certificate, key


def _openssl(*arguments: str | Path) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl")
    subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, timeout=60)
