"""The messages of remote.proto. `make proto` generates the modules beside this file; a test compares them with the source."""

from outrider.remote.protocol import remote_pb2 as messages
from outrider.remote.protocol import stubs

PROTOCOL = 1  # what Hello and Welcome carry; both sides must have the same one
INSTANCE = "outrider-instance"  # metadata of a stream: the `instance` that its Open announced
MAX_MESSAGE_BYTES = 16 << 20  # a prompt of a million tokens has 3 MB

__all__ = ["INSTANCE", "MAX_MESSAGE_BYTES", "PROTOCOL", "messages", "stubs"]
