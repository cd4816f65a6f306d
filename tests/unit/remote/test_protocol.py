"""The generated modules are those of remote.proto; addresses, tokens and hashes work as documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.errors import CapabilityError, ConfigError
from outrider.remote.access import Access
from outrider.remote.endpoint import Endpoint
from outrider.remote.identity import check_protocol, check_vocabulary
from outrider.remote.protocol import PROTOCOL, messages
from outrider.remote.security import ServerSecurity

ROOT = Path(__file__).resolve().parents[3]
SOURCE = "outrider/remote/protocol/remote.proto"


def test_generated_modules_are_those_of_the_source(tmp_path: Path) -> None:
    """Guards against a changed remote.proto without `make proto`."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    out = tmp_path / "set"
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={out}", SOURCE]) == 0
    from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

    compiled = FileDescriptorSet.FromString(out.read_bytes()).file[0]
    compiled.ClearField("source_code_info")
    for message in compiled.message_type:  # protoc writes names for JSON here, and not into Python
        for field in [
            *message.field,
            *(field for nested in message.nested_type for field in nested.field),
        ]:
            field.ClearField("json_name")
    assert FileDescriptorProto.FromString(messages.DESCRIPTOR.serialized_pb) == compiled


@pytest.mark.parametrize(
    ("text", "target", "is_tls"),
    [
        ("grpc://draft:50051", "draft:50051", False),
        ("grpcs://draft.example:443/", "draft.example:443", True),
        ("localhost:50051", "localhost:50051", False),
        ("grpc://[::1]:7", "[::1]:7", False),
        ("unix:/run/draft.sock", "unix:/run/draft.sock", False),
    ],
)
def test_addresses(text: str, target: str, is_tls: bool) -> None:
    """The forms an operator writes."""
    assert Endpoint.parse(text) == Endpoint(target, is_tls)


WRONG = [
    "",
    "draft",
    "grpc://",
    "grpc://draft",
    "grpc://draft:0",
    "grpc://draft:99999",
    "ftp://a:1",
    "a b:1",
]


@pytest.mark.parametrize("text", WRONG)
def test_wrong_addresses_are_refused(text: str) -> None:
    """The message shows a correct address."""
    with pytest.raises(ConfigError, match="grpc://HOST:PORT"):
        Endpoint.parse(text, "--draft-endpoint")


def test_a_web_address_is_explained() -> None:
    """The likeliest mistake."""
    with pytest.raises(ConfigError, match="OpenAI server's"):
        Endpoint.parse("http://localhost:8000")


def test_half_a_certificate_is_refused() -> None:
    """Before anything listens or connects."""
    with pytest.raises(ConfigError, match="--tls-key"):
        ServerSecurity(certificate=Path("cert.pem"))
    with pytest.raises(ConfigError, match="--tls-cert"):
        ServerSecurity(client_ca=Path("ca.pem"))
    with pytest.raises(ConfigError, match="key"):
        Access(certificate=Path("cert.pem"))
    with pytest.raises(ConfigError, match="empty"):
        ServerSecurity(token="")


def test_what_both_sides_must_agree_on() -> None:
    """Another protocol or vocabulary is refused with both sides' facts."""
    ours = messages.ModelIdentity(name="a", vocab_size=10, vocabulary_sha256="1" * 64)
    other = messages.ModelIdentity(name="b", vocab_size=12, vocabulary_sha256="3" * 64)
    check_vocabulary(ours, ours, "it")
    with pytest.raises(CapabilityError, match=r"12 wide.*10 wide"):
        check_vocabulary(ours, other, "the draft service at grpc://d:1")
    with pytest.raises(CapabilityError, match=rf"version 99 .*this side speaks {PROTOCOL}"):
        check_protocol(messages.Hello(protocol=99, release="9.9"), "the asker")


@pytest.mark.slow
def test_without_its_libraries_the_drafter_names_the_extra() -> None:
    """An installation without gRPC."""
    script = (
        "import sys; sys.modules['grpc'] = None\n"
        "from outrider.drafters import DRAFTERS\nfrom outrider.errors import ConfigError\n"
        "try:\n    DRAFTERS.load('remote')\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pip install '.[services]' in a checkout" in done.stdout
