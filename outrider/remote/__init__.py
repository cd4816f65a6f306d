"""The draft service, the drafter that asks it, and the coordinator before several servers:
docs/services.md.

    coordinator/ an HTTP router with resumption
    draft/       the draft service, and the drafter that asks it
    protocol/    their messages (remote.proto and what is generated from it)
    endpoint.py  addresses: grpc://HOST:PORT, grpcs://HOST:PORT, unix:/PATH
    access.py    what a caller shows and trusts: TLS files, token
    security.py  TLS, mutual TLS and tokens of gRPC, for both sides
    identity.py  the hash of a vocabulary, compared when a connection opens
    serving.py   the life of a gRPC server: listen, health, metrics, drain
    probe.py     the health of a service, asked from outside; gRPC's messages in plain words
"""

import os

# its library writes to the terminal what an error says anyway
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
