"""The target service: an engine behind gRPC, tokens in, tokens and text out. docs/services/target.md is the operator's side.

    requests.py  `Request` <-> GenerateRequest
    replies.py   `Update` and `Finish` <-> GenerateReply; used by both ends
    refusals.py  our errors <-> gRPC's statuses
    facts.py     what decides a replica's texts, hashed for the handshake
    service.py   the three calls
    run.py       the life of the process
"""
