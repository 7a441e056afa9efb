# Shared by the commands in scripts/: paths, messages, locks and virtual environments.
# Source it from a script that runs under `set -euo pipefail`.
# shellcheck shell=bash

KVF_LIB_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
KVF_ROOT="$(cd "$KVF_LIB_DIR/../.." && pwd)"
KVF_DEPS="$KVF_ROOT/.deps"
export KVF_LIB_DIR KVF_ROOT KVF_DEPS

# say MESSAGE...: one progress line on stderr.
say() { printf '%s\n' "$*" >&2; }

# die MESSAGE...: an error that ends the script.
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# with_lock NAME COMMAND...: runs COMMAND while no other script holds the lock NAME of this checkout.
# The lock is a file descriptor, so it is gone with the last process of COMMAND, however that ended.
with_lock() {
  local name="$1" fd rc=0
  shift
  mkdir -p "$KVF_DEPS"
  exec {fd}>"$KVF_DEPS/.lock-$name"
  if ! flock -n "$fd"; then
    say "waiting for another script that holds the lock $name"
    flock "$fd"
  fi
  # Not `"$@" || rc=$?`: that would switch `set -e` off inside COMMAND.
  set +e
  (
    set -e
    "$@"
  )
  rc=$?
  set -e
  exec {fd}>&-
  return "$rc"
}

# base_python: the interpreter that virtual environments are made from (KVFERRY_PYTHON, else python3).
base_python() {
  local python="${KVFERRY_PYTHON:-python3}"
  command -v "$python" >/dev/null 2>&1 ||
    die "no Python found as '$python': install Python 3.10 or newer, or set KVFERRY_PYTHON to one"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "'$python' is $("$python" --version 2>&1): Python 3.10 or newer is needed; set KVFERRY_PYTHON to one"
  "$python" -c 'import sys; print(sys.executable)'
}

# stamp_of PYTHON FILE...: a hash of the interpreter's version and of the requirement files.
stamp_of() {
  local python="$1"
  shift
  { "$python" --version && cat "$@"; } | sha256sum | cut -d' ' -f1
}

# stamped DIR NAME STAMP: whether DIR was completed with exactly this stamp.
stamped() {
  [[ -f "$1/.stamp-$2" && "$(cat "$1/.stamp-$2")" == "$3" && -x "$1/bin/python" ]]
}

# site_packages VENV: its site-packages folder.
site_packages() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# kvf_build_env: what compiling needs and the system may lack, from the tools that scripts/setup installed.
# Exports LIBCLANG_PATH and KVFERRY_UCX_PREFIX unless they are set already, and a C++ compiler where there is none.
kvf_build_env() {
  local site
  site="$(site_packages "$KVF_DEPS/venv")"
  if [[ -z "${LIBCLANG_PATH:-}" && -d "$site/clang/native" ]]; then
    export LIBCLANG_PATH="$site/clang/native"
  fi
  if [[ -z "${KVFERRY_UCX_PREFIX:-}" && -d "$site/libucx" ]]; then
    export KVFERRY_UCX_PREFIX="$site/libucx"
  fi
  if [[ -x "$KVF_DEPS/zig/c++" ]]; then
    export CXX="$KVF_DEPS/zig/c++" CXXSTDLIB=c++
  fi
}
