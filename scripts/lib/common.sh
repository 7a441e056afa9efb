# Shared by the commands in scripts/: paths, messages, locks and virtual environments.
# Source it from a script that runs under `set -euo pipefail`.
# shellcheck shell=bash

KVF_LIB_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
KVF_ROOT="$(cd "$KVF_LIB_DIR/../.." && pwd)"
KVF_DEPS="$KVF_ROOT/.deps"
export KVF_LIB_DIR KVF_ROOT KVF_DEPS

# Bytecode is kept, also where the environment forbids it beside the sources: each of the many processes that import vLLM
# would compile it anew.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$KVF_DEPS/pycache"

# say MESSAGE...: one progress line on stderr.
say() { printf '%s\n' "$*" >&2; }

# die MESSAGE...: an error that ends the script.
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# is_required WHAT: whether KVFERRY_REQUIRE names WHAT, for want of which tests must fail.
is_required() {
  local wanted="${KVFERRY_REQUIRE:-}"
  [[ ",${wanted//[ ,]/,}," == *",$1,"* ]]
}

# with_lock NAME COMMAND...: runs COMMAND while no other script holds the lock NAME of this checkout.
# The lock is a file descriptor, so it is gone with the last process of COMMAND, however that ended. What COMMAND runs has the
# lock too, and takes it again without waiting for it.
with_lock() {
  local name="$1" file="$KVF_DEPS/.lock-$1" fd rc=0
  shift
  if [[ ":${KVF_LOCKS:-}:" == *":$file:"* ]]; then
    "$@"
    return
  fi
  mkdir -p "$KVF_DEPS"
  exec {fd}>"$file"
  if ! flock -n "$fd"; then
    say "waiting for another script that holds the lock $name"
    flock "$fd"
  fi
  # Not `"$@" || rc=$?`: that would switch `set -e` off inside COMMAND.
  set +e
  (
    set -e
    export KVF_LOCKS="${KVF_LOCKS:-}:$file"
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

# stamp_of PROGRAM FILE...: a hash of the version that a program, such as Python, tells, and of the requirement files.
stamp_of() {
  local program="$1"
  shift
  { "$program" --version && cat "$@"; } | sha256sum | cut -d' ' -f1
}

# stamped DIR NAME STAMP: whether DIR was completed with exactly this stamp.
stamped() {
  [[ -f "$1/.stamp-$2" && "$(cat "$1/.stamp-$2")" == "$3" && -x "$1/bin/python" ]]
}

# kvf_build_env: the environment for cargo and maturin. The build finds libclang and UCX in .deps/venv by itself; a C++
# compiler from there (see scripts/setup) has to be named, together with the linker that knows its C++ library.
kvf_build_env() {
  local host
  if [[ -x "$KVF_DEPS/zig/c++" ]]; then
    host="$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')"
    export CXX="$KVF_DEPS/zig/c++" CXXSTDLIB=c++ "CARGO_TARGET_${host}_LINKER=$KVF_DEPS/zig/cc"
  fi
}

# kvf_share_dependencies DIR: lets a build of another workspace into DIR begin with what Cargo has already compiled of the
# same packages in the same way: links to it, but for this workspace's own packages, whose files would be written through
# the links. Nothing where DIR exists, or is on another file system.
kvf_share_dependencies() {
  local built="${CARGO_TARGET_DIR:-$KVF_ROOT/target}/debug"
  [[ ! -e "$1/debug" && -d "$built/deps" ]] || return 0
  mkdir -p "$1"
  rm -rf "$1/debug.new"
  mkdir "$1/debug.new"
  if ! cp -al "$built"/{deps,build,.fingerprint} "$1/debug.new" 2>/dev/null; then
    rm -rf "$1/debug.new"
    return 0
  fi
  find "$1/debug.new" -mindepth 2 -maxdepth 2 -regex '.*/\(lib\)?\(kvferry\(.proto\)?\|ucx.sys\)[-.].*' -exec rm -rf {} +
  mv "$1/debug.new" "$1/debug"
}

# kvf_zig: options that tell scripts/lib/inventory.py whose C++ library a build with kvf_build_env links in.
kvf_zig() {
  if [[ -x "$KVF_DEPS/zig/c++" ]]; then
    echo --zig
    "$KVF_DEPS/venv/bin/python" -c 'import importlib.metadata as m; print(m.version("ziglang"))'
  fi
}
