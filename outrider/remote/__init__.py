"""Draft services, target services and the coordinator between them: docs/services.md shows the connections.

    protocol/    the messages (remote.proto and what is generated from it)
    endpoint.py  addresses: grpc://HOST:PORT, grpcs://HOST:PORT, unix:/PATH
    security.py  TLS, mutual TLS and tokens, for both sides
    identity.py  hashes of vocabulary, tokenizer and model, compared when a connection opens
    serving.py   the life of a gRPC server: listen, health, metrics, drain
    draft/       the draft service, and the drafter that asks it
    target/      the target service, and the engine that asks it
    coordinator/ the OpenAI server whose engines are target services
    troubles.py  why a call did not reach a service, in plain words
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its library writes to the terminal what an error says anyway
