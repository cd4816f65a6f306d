"""Replay: acceptance of the model-free drafters, predicted from logged prompts and answers alone.

    target = load_text_target("meta-llama/Llama-3.1-8B-Instruct")        # its tokenizer, no weights
    texts = read_log(workload, target.tokenizer).texts
    found = replay(texts, Configuration.parse("suffix k=8"), target=target)
    summarise(found, texts).overall.tau
    search(texts, Configuration("suffix"), trials=50, target=target).configuration
"""

from outrider.lab.replay.loop import load_text_target, text_target
from outrider.lab.replay.replay import Replay, ReplayedText, default_configurations, replay, replayable
from outrider.lab.replay.search import search
from outrider.lab.replay.summary import summarise
from outrider.lab.replay.texts import Text, read_log

__all__ = [
    "Replay", "ReplayedText", "Text", "default_configurations", "load_text_target", "read_log", "replay", "replayable", "search",
    "summarise", "text_target",
]  # fmt: skip
