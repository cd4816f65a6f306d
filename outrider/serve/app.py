"""The HTTP application: endpoints, gate, errors and the page at `/`, around one `ServerState`."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from outrider.serve import refusals
from outrider.serve.api.generating import generating_routes
from outrider.serve.gate import guard
from outrider.serve.information import information_routes
from outrider.serve.playground import router as playground_routes
from outrider.serve.served import ServerState
from outrider.version import __version__


def make_app(state: ServerState) -> FastAPI:
    """Answers /health at once, everything else when `state` has models. The OpenAPI document is at
    /openapi.json and, to read and try, at /docs: FastAPI's own pages would load scripts from
    elsewhere."""
    app = FastAPIOffline(title="Outrider", version=__version__, redoc_url=None)
    refusals.install(app)
    app.include_router(generating_routes(state))
    app.include_router(information_routes(state))
    app.include_router(playground_routes())
    guard(app, state.settings, state.metrics)
    return app
