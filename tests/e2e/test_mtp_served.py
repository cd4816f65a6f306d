"""A server whose drafter is the head in the target's own checkpoint, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from outrider.build import Options
from outrider.engine.engine import make_engine
from outrider.engine.request import EngineSettings
from outrider.serve.app import make_app
from outrider.serve.served import ServerState
from outrider.serve.settings import ServedModel, ServerSettings
from tests.helpers import byte_tokenizer, tiny_llama
from tests.mtp_heads import save_with_mtp


def test_the_head_drafts_and_the_text_is_that_without_it(tmp_path: Path) -> None:
    """Catches a server that loads the checkpoint's head and does not ask it, or lets its drafts
    change the text."""
    save_with_mtp(tmp_path, lambda seed: tiny_llama(257, seed=seed), "deepseek")
    byte_tokenizer().save_pretrained(tmp_path)
    options = Options(target=str(tmp_path), drafter="mtp", dtype="float32", num_draft_tokens=3)
    engine = make_engine(options, EngineSettings(kv_memory=16 << 20), name="m")
    engine.start()
    state = ServerState(ServerSettings(models=(ServedModel(name="m", options=options),)))
    state.serve([engine], created=1_700_000_000)
    body: dict[str, Any] = {
        "model": "m",
        "prompt": [3, 4, 5, 3, 4],
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    with TestClient(make_app(state)) as client:
        drafted = client.post("/v1/completions", json=body).json()
        plain = client.post("/v1/completions", json=body | {"speculation": {"mode": "off"}}).json()
        streamed = client.post("/v1/completions", json=body | {"stream": True}).text
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert streamed.endswith("data: [DONE]\n\n")
    assert engine.drain(60)
    engine.stop()
    assert drafted["metrics"]["drafter"] == "mtp"
    assert drafted["metrics"]["speculative_decoding"] is not None
    assert plain["metrics"]["speculative_decoding"] is None
