"""The coordinator: the OpenAI server whose engines are target services. docs/services/target.md is the operator's side.

    engine.py    `RemoteEngine`: what the HTTP side sees, in place of `outrider.engine.engine.Engine`
    journey.py   one request on its way over replicas: it owns the committed tokens
    fleet.py     the replicas of one model, and which of them may replace one another
    replica.py   one target service: connection, handshake, state
    choice.py    which replica takes a request: load, and which has read its beginning before
    tally.py     what an answer cost, from replies alone
    metrics.py   replicas and retries in /metrics
    settings.py  what an operator decides
    run.py       the life of the process
"""
