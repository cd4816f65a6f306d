"""What the command line leaves out when it imports transformers is there for whoever asks for it later."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "sympy")
LATER = f"""
import sys
import torch
from transformers.utils import import_utils
before = torch.compiler.disable, import_utils.is_torch_distributed_available, import_utils.is_scipy_available
from outrider.cli.lean import import_models
import_models()
assert before == (torch.compiler.disable, import_utils.is_torch_distributed_available, import_utils.is_scipy_available)
import outrider.llm
from tests.helpers import tiny_llama
model, tokens = tiny_llama(50), torch.tensor([[3, 4, 5]])
model.set_attn_implementation("eager")
plain = model.generate(tokens, max_new_tokens=4, do_sample=False)
print([name for name in {HEAVY!r} if name in sys.modules])
model.set_attn_implementation("sdpa")
assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), plain)
from transformers.masking_utils import create_causal_mask
further = {{"config": model.config, "inputs_embeds": torch.zeros(1, 3, 8), "attention_mask": None, "past_key_values": None}}
mask = create_causal_mask(**further, or_mask_function=lambda batch, head, query, key: (query == 0) & (key == 2))
assert mask[0, 0].tolist() == [[True, False, True], [True, True, False], [True, True, True]], mask
import torch._dynamo
assert torch._dynamo.__file__ and torch._dynamo.config.cache_size_limit
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
"""


def test_what_was_left_out_works_afterwards() -> None:
    """Catches stand-ins that stay, a mask that needs the compiler and meets one, and heavy modules that come in all the same."""
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
