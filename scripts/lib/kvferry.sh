# Building the kvferry package and putting it into the vLLM environment. Needs common.sh.
# shellcheck shell=bash

# install_kvferry: builds the wheel and installs it into .deps/vllm, unless the same wheel is installed there already.
install_kvferry() {
  with_lock wheel _install_kvferry
}

_install_kvferry() {
  local wheels="$KVF_ROOT/target/wheels" wheel stamp
  say "building the kvferry wheel"
  "$KVF_ROOT/scripts/build-wheel" >&2
  wheel="$(find "$wheels" -maxdepth 1 -name 'kvferry-*.whl' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-)"
  [[ -n "$wheel" ]] || die "scripts/build-wheel left no kvferry-*.whl in $wheels"
  stamp="$(sha256sum "$wheel" | cut -d' ' -f1)"
  if [[ "$(cat "$KVF_DEPS/vllm/.stamp-kvferry" 2>/dev/null)" == "$stamp" ]]; then return 0; fi
  say "installing $(basename "$wheel") into .deps/vllm"
  rm -f "$KVF_DEPS/vllm/.stamp-kvferry"
  "$KVF_DEPS/venv/bin/uv" pip install --quiet --no-deps --reinstall --python "$KVF_DEPS/vllm/bin/python" "$wheel" >&2
  printf '%s\n' "$stamp" >"$KVF_DEPS/vllm/.stamp-kvferry"
}
