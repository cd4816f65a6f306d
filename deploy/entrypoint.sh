#!/bin/sh
# What the image runs: `service draft|target|coordinator ...` is that part of a deployment in parts, `outrider VERB ...` any verb,
# and everything else goes to `outrider serve`, with the address that a container must listen on.
set -eu

case "${1:-}" in
service) exec outrider "$@" ;;
outrider) exec "$@" ;;
*) exec outrider serve --host 0.0.0.0 --port 8000 "$@" ;;
esac
