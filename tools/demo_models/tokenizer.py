"""The demo pair's tokenizer: 4096-token byte-level BPE, every digit a token of its own.

Why digits alone: column arithmetic is learnable from few examples only if `47` is always `4`, `7`.
A space before a number is a token too, so a digit looks the same wherever it stands. Saved as a
transformers fast tokenizer with the chat template below; `<s>` = 0 is put in front of plain
prompts, `</s>` = 1 ends a solution.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.demo_models.corpus import BOS, BOS_ID, EOS

VOCABULARY_SIZE = 4096
CONTEXT_TOKENS = 1024

# A conversation becomes a run of training documents: `<s>Question: u\nAnswer: a</s><s>Question:
# ...`. The model has seen no system messages, so one is put in front of the first question rather
# than dropped.
CHAT_TEMPLATE = """\
{%- set ns = namespace(system='', open=false) -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('demo model: a system message must come first') }}{%- endif -%}
{%- set ns.system = message['content'] | trim + '\\n' -%}
{%- elif message['role'] == 'user' -%}
{%- if ns.open -%}{{ raise_exception('demo model: user and assistant turns must alternate') }}{%- endif -%}
{{- bos_token + 'Question: ' + ns.system + message['content'] | trim + '\\nAnswer:' -}}
{%- set ns.system = '' -%}{%- set ns.open = true -%}
{%- elif message['role'] == 'assistant' -%}
{%- if not ns.open -%}
{{ raise_exception('demo model: an assistant turn must follow a user turn') }}
{%- endif -%}
{{- ' ' + message['content'] | trim + eos_token -}}
{%- set ns.open = false -%}
{%- else -%}{{ raise_exception('demo model: unknown role ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}
{{- raise_exception('demo model: the last turn must be the user') -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[BOS, EOS],  # ids 0 and 1
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
