"""What a model of transformers says of itself."""

from __future__ import annotations

from torch import nn
from transformers import GenerationMixin

from outrider.models.probes.reference import writes_otherwise


def test_who_writes_in_a_way_of_its_own() -> None:
    """Catches a checkpoint's own class that has no `generate` at all, which ended in a traceback."""

    class Plain(nn.Module, GenerationMixin):
        pass

    class Own(Plain):
        def generate(self) -> None:  # type: ignore[override]
            pass

    assert [writes_otherwise(kind()) for kind in (nn.Module, Plain, Own)] == [False, False, True]
