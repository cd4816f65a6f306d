#!/usr/bin/env bash
# Runs tests on ARM's kernels on another Linux machine: an arm64 Debian under QEMU's emulation, some 30 times slower than ARM.
#
#     tools/arm.sh FOLDER tests/unit/runtime/test_layers.py ...
#
# FOLDER gets the system and its packages, 2 GB, in ten minutes, and is used again. Needs root, Debian's packages debootstrap,
# qemu-user-static, binfmt-support and g++-aarch64-linux-gnu, and a Python 3.11 with pip (PYTHON). TORCH names a CPU build for arm64.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
folder=$(realpath -m "$1")
shift
source=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.9.1}

if [ ! -e "$folder/usr/bin/python3" ]; then
  debootstrap --arch=arm64 --variant=minbase --include=python3,libstdc++6,libgomp1 bookworm "$folder" http://deb.debian.org/debian
fi
if [ ! -e "$folder/site/.complete" ]; then
  platforms=()
  for minor in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
  install=("$python" -m pip install --quiet --target "$folder/site" --only-binary=:all: --python-version 3.11 --implementation cp
    "${platforms[@]}" --platform manylinux2014_aarch64)
  "${install[@]}" --no-deps "$torch" transformers==5.23.0
  "${install[@]}" numpy scipy safetensors tokenizers gguf 'huggingface-hub>=1.0' typing_extensions sympy networkx jinja2 fsspec \
    regex packaging requests pyyaml typer rich tqdm psutil filelock pydantic matplotlib httpx2 prometheus-client pytest hypothesis
  touch "$folder/site/.complete"
fi

rm -rf "$folder/outrider"
mkdir -p "$folder/outrider"
tar -C "$source" --exclude=.git --exclude=.venv --exclude='*.so' -cf - . | tar -C "$folder/outrider" -xf -
PYTHONPATH=$source "$python" - "$folder/outrider" <<'END'
import os, sys
from pathlib import Path
from outrider.runtime import building
os.environ["CXX"] = "aarch64-linux-gnu-g++"
building.build(Path(sys.argv[1]) / "outrider/runtime/lib" / building.file_name("neon"), "neon")
END

mountpoint -q "$folder/proc" || mount -t proc proc "$folder/proc"
exec chroot "$folder" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 PYTHONPATH=/outrider:/site OMP_NUM_THREADS=1 \
  sh -c 'cd /outrider && exec python3 -m pytest -q -p no:cacheprovider -m "not slow and not nightly and not gpu" "$@"' sh "$@"
