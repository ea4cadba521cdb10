#!/usr/bin/env bash
# What a node needs before Ray starts on it. `setup_commands` of every cluster file and the Dockerfile run it, so this is
# the one list. A node that has it all already, from an image, is done at once.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! python cluster/missing.py 2> /dev/null; then
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh # needs no Python, brings its own
  [ -d "$HOME/venv" ] || uv venv --seed --python 3.12 "$HOME/venv" # with pip, for cluster.pip
  uv pip install --python "$HOME/venv" -c constraints.txt --editable '.[cluster]' # torch from PyPI is built for CUDA
  export PATH="$HOME/venv/bin:$PATH"
  python cluster/missing.py
fi

python cluster/driver.py

profile="$HOME/.bashrc" # which Ray reads before every command; the first lines, since some end early when nobody types
grep -q '# steadfast$' "$profile" 2> /dev/null || {
  before=$(cat "$profile" 2> /dev/null || true)
  printf '%s\n' \
    "export PATH=$(dirname "$(command -v python)"):\$HOME/.local/bin:\$PATH # steadfast" \
    'export RAY_AUTH_MODE=token # steadfast' \
    "$before" > "$profile"
}
