"""llama.cpp's own vocabularies and chat templates, and the token ids that llama.cpp gives texts
with special tokens in them.

    python tools/llama_vocabularies.py fetch [FOLDER]   unpacks both from the sources of llama-cpp-python
    python tools/llama_vocabularies.py ids [FOLDER]     asks llama.cpp for the ids and writes llama_ids.json

The second command needs llama_cpp (benchmarks/setup_peers.sh llamacpp).
tests/unit/models/gguf/test_vocabularies.py compares our tokenizers with the vocabularies and ids,
tests/unit/test_templates.py our renderer with transformers', on these templates.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / ".peers" / "vocabularies"
IDS = REPOSITORY / "tests" / "unit" / "models" / "gguf" / "llama_ids.json"
PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
NOT_SERVED = tuple(
    f"ggml-vocab-{name}.gguf" for name in ("aquila", "bert-bge", "gpt-neox", "nomic-bert-moe")
)
MAX_SPECIALS = 4
TEXTS = (  # {0}, {1} ... are special tokens of the vocabulary
    "", " ", "Hello", " Hello", "  Hello", "{0}", "{0}Hello", "{0} Hello", "{0}  Hello", "{0}\nHello", "Hello{0}", "Hello {0}",
    "Hello{0}world", "Hello {0} world", "{0}{1}Hello", "{0} {1} Hello", "{0}\n\n{1}\n\nHello\n",
    "{0}user\nWhy is the sky blue?{1}\n{2}assistant\n", "[INST] Hi [/INST]", "{0}[INST] Hi [/INST]", "a{0}b{1}c{2}d{3}e",
    "\t{0}\tx", "{0}é{1}日本 {2}🙂", "def f(x):\n    return x{1}\n{0}print(f(1))", " việt Việt{0}Việt", "{0} 12345 {1}67890",
    "<|user|>\nHello<|end|>\n<|assistant|>\n", "<s>[INST] Hi [/INST]", "<s> <|user|>\n\n Hi<unk> Hi<|endoftext|>\n Hi",
    "<|im_start|>user\n Hi<|im_end|>\n<|im_start|>assistant\n", "<start_of_turn>user\nHi<end_of_turn>\n",
)  # fmt: skip


def fetch(folder: Path) -> None:
    """Download the sources of llama-cpp-python and unpack its vocabularies and chat templates into
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "--disable-pip-version-check",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                downloads,
                "--no-binary",
                PACKAGE,
                f"{PACKAGE}=={VERSION}",
            ],
            check=True,
        )
        with tarfile.open(next(Path(downloads).glob("*.tar.gz"))) as sources:
            for member in sources:
                name = Path(member.name).name
                if member.isfile() and (name.startswith("ggml-vocab-") or name.endswith(".jinja")):
                    content = sources.extractfile(member)
                    assert content is not None
                    (folder / name).write_bytes(content.read())
    counts = [len(list(folder.glob(kind))) for kind in ("*.gguf", "*.jinja")]
    print(f"{counts[0]} vocabularies and {counts[1]} chat templates in {folder}", file=sys.stderr)


def write_ids(folder: Path) -> None:
    """Ask llama.cpp for the ids of every text, special tokens parsed, with and without what it puts
    around texts."""
    from llama_cpp import Llama

    answers = {}
    for path in sorted(folder.glob("*.gguf")):
        if path.name in NOT_SERVED:
            continue
        vocabulary = Llama(str(path), vocab_only=True, verbose=False)
        specials = _specials(path)
        cases = []
        for template in TEXTS:
            text = template.format(*specials)
            encoded = text.encode()
            bare = vocabulary.tokenize(encoded, add_bos=False, special=True)
            framed = vocabulary.tokenize(encoded, add_bos=True, special=True)
            cases.append({"text": text, "bare": bare, "framed": framed})
        answers[path.name] = cases
    lines = [
        f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, cases)) + "\n]"
        for name, cases in answers.items()
    ]
    IDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _specials(path: Path) -> list[str]:
    """Special tokens of a vocabulary: its first ones, the last one, and one that users defined."""
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    control = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL
    ]
    defined = [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == TokenType.USER_DEFINED and token.strip()
    ]
    chosen = [*control[:2], *control[-1:], *defined[-1:]] or ["<s>"]
    return (chosen * MAX_SPECIALS)[:MAX_SPECIALS]


def main() -> int:
    """Run one of the two commands."""
    commands = {"fetch": fetch, "ids": write_ids}
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    commands[sys.argv[1]](Path(sys.argv[2]) if len(sys.argv) == 3 else FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
