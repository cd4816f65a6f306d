"""How a process calls another one: whom it trusts, and what it shows of itself. Without gRPC, which
a coordinator does not need."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.settings import checked

TOKEN_VARIABLE = "OUTRIDER_SERVICE_TOKEN"


@checked()
@dataclass(frozen=True, kw_only=True)
class Access:
    """A caller's credentials, and the authorities that it trusts. Raises ConfigError for half a
    certificate, and for a token that no header can carry."""

    # PEM: who may have signed the other side's certificate; None: the system's authorities
    ca: Path | None = None
    certificate: Path | None = None  # PEM, for mutual TLS
    key: Path | None = None
    token: str | None = None
    server_name: str | None = None  # in the other side's certificate, where it is not the address

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "mutual TLS needs a certificate and its key: --tls-cert FILE and --tls-key FILE"
            )
        check_token(self.token)

    @property
    def files(self) -> list[Path]:
        """The files that only TLS has a use for."""
        return [file for file in (self.ca, self.certificate, self.key) if file is not None]

    def context(self) -> ssl.SSLContext:
        """TLS of calls. Raises ConfigError for files that cannot be read or do not fit."""
        context = ssl.create_default_context()
        if self.ca is not None:
            load_authority(context, self.ca)
        if self.certificate is not None and self.key is not None:
            load_pair(context, self.certificate, self.key)
        return context


def check_token(token: str | None) -> None:
    """Raises ConfigError for a token that no header can carry; a file's last line break is the
    usual reason."""
    wrong = next((sign for sign in token or "" if not " " <= sign <= "~"), None)
    if token is not None and wrong is not None:
        raise ConfigError(
            f"a service token has printable ASCII characters only; this one ({TOKEN_VARIABLE}) "
            f"has {wrong!a} at place {token.index(wrong) + 1} of {len(token)}"
        )


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Take in a certificate and its key. Raises ConfigError for files that cannot be read or do not
    fit."""
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        why = (
            "are not of one pair"
            if "MISMATCH" in str(error)
            else "are no PEM certificate and private key without a password"
        )
        raise ConfigError(
            f"{certificate} and {key} {why}: make both anew, or name the files that belong together"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {certificate} and {key}: {error.strerror}") from error


def load_authority(context: ssl.SSLContext, file: Path) -> None:
    """Take in an authority's certificates. Raises ConfigError for a file without any."""
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ConfigError(f"{file} holds no PEM certificate of an authority") from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
