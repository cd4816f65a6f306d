#!/usr/bin/env bash
# Runs tests on a native runtime that GCC's sanitizers watch: memory errors and undefined behaviour, or data races.
#
#     tools/sanitize.sh memory  tests/unit/runtime tests/unit/models/gguf
#     tools/sanitize.sh threads tests/unit/runtime/test_several_threads.py tests/unit/runtime/test_run.py
#
# Works on a copy of the sources, on Linux with x86-64 and g++. Exit code 1: a test failed or a sanitizer reported; its reports are shown.
set -euo pipefail
case "${1:-}" in
  memory) flags="-fsanitize=address,undefined -fno-sanitize=alignment" libraries="libasan libubsan" ;;
  threads) flags="-fsanitize=thread" libraries="libtsan" ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
shift
source=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$source/.venv/bin/python}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/reports" "$copy/outrider"
tar -C "$source" --exclude=.git --exclude=.venv --exclude='*.so' -cf - . | tar -C "$copy/outrider" -xf -
cd "$copy/outrider"
[ ! -e "$source/../shared" ] || ln -s "$(realpath "$source/../shared")" "$copy/shared"

FLAGS=$flags PYTHONPATH=. "$python" - <<'END'
import os
from outrider.instructions import of_this_cpu
from outrider.runtime import building
kind = of_this_cpu()
name = building.file_name(kind)  # as it is found later, when these flags are forgotten
building.FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", *building.FLAGS[1:], *os.environ["FLAGS"].split())
building.build(building.PREBUILT / name, kind)
END

preloaded=""
for library in $libraries libstdc++; do preloaded+="$(gcc -print-file-name=$library.so) "; done
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=0:log_path=$copy/reports/address"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$copy/reports/undefined"
export TSAN_OPTIONS="halt_on_error=0:ignore_noninstrumented_modules=1:log_path=$copy/reports/thread"
status=0
LD_PRELOAD=$preloaded PYTHONPATH=. OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} \
  "$python" -m pytest -q -p no:cacheprovider -m "not slow and not nightly and not gpu" "$@" || status=1
if [ -n "$(ls "$copy/reports")" ]; then
  cat "$copy"/reports/* >&2
  status=1
fi
exit $status
