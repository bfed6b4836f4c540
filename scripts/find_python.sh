#!/usr/bin/env bash
# Prints the first Python >= 3.12 with a working venv module: python3.13, python3.12, python3 on the PATH, then pyenv's
# versions folder. Where there is none it says what to do, and fails.
set -u
candidates=(python3.13 python3.12 python3)
for root in "${PYENV_ROOT:-}" "$HOME/.pyenv"; do
  for version in 3.13 3.12; do
    [ -n "$root" ] && candidates+=("$root"/versions/"$version".*/bin/python)
  done
done
for candidate in "${candidates[@]}"; do
  path=$(command -v "$candidate" 2>/dev/null) || continue
  if "$path" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2])' >/dev/null 2>&1; then
    echo "$path"
    exit 0
  fi
done
cat >&2 <<'MESSAGE'
jaxkv needs Python 3.12 or newer (with the venv module), and none was found as python3.13, python3.12, python3 or under
pyenv's versions folder. Install one of: uv (it brings a Python of its own: https://docs.astral.sh/uv), your system's
python3.12 and python3.12-venv, or `pyenv install 3.12`; then run make again.
MESSAGE
exit 1
