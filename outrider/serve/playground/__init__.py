"""The page at `/`: talk to the server from a browser, with and without speculation side by side."""

from outrider.serve.playground.page import assets, page, policy, router

__all__ = ["assets", "page", "policy", "router"]
