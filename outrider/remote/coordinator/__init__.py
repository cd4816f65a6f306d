"""The coordinator: an HTTP router before several `outrider serve`. docs/services.md is the
operator's side.

    journey.py   one request on its way over targets: it keeps what the client has, and continues elsewhere
    fleet.py     the targets, and which of them takes a request
    target.py    one target: watched, and given up when it is silent or lies
    identity.py  what targets must agree in to continue each other's answers
    app.py       endpoints, metrics, and the life of the process
    settings.py  what an operator decides
"""
