# The parts of scripts/rdma-test, which sources this. Needs common.sh, `venv` and `python`.
# shellcheck shell=bash

install_wheels() {
  local stamp
  stamp="$(cat target/wheels/*.whl scripts/lib/requirements-dev.txt | sha256sum)"
  [[ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]] || return 0
  rm -rf "$venv"
  "$(base_python)" -m venv --without-pip "$venv"
  .deps/venv/bin/uv pip install --quiet --python "$venv/bin/python" -c scripts/lib/requirements-dev.txt target/wheels/*.whl numpy pytest
  printf '%s\n' "$stamp" >"$venv/.stamp"
}

# make_userland SUITE: a Debian of its own in .deps/rdma/userlands, with what the pages name and the wheels of kvferry.
make_userland() {
  local root="$KVF_DEPS/rdma/userlands/$1" tools="$KVF_DEPS/rdma/debootstrap" work
  if [[ ! -f "$root/.made" ]]; then
    if [[ ! -d "$tools" ]]; then
      work="$(mktemp -d)"
      (cd "$work" && apt-get -qq -o APT::Sandbox::User= download debootstrap >&2)
      rm -rf "$tools.new"
      dpkg-deb -x "$work"/*.deb "$tools.new"
      mv "$tools.new" "$tools"
      rm -rf "$work"
    fi
    # What an interrupted debootstrap has mounted there is not to be emptied.
    rm -rf --one-file-system "$root"
    mkdir -p "$root"
    say "making a Debian $1"
    DEBOOTSTRAP_DIR="$tools/usr/share/debootstrap" \
      "$tools/usr/sbin/debootstrap" --variant=minbase --include=python3-venv "$1" "$root" >&2
    # As docs/rdma.md has it.
    DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get -qq install --no-install-recommends ibverbs-providers librdmacm1 >&2
    : >"$root/.made"
  fi
  rm -rf "$root/wheels"
  # A virtual machine has no network to take them from.
  .deps/venv/bin/python -m pip download --quiet --only-binary=:all: --dest "$root/wheels" -c scripts/lib/requirements-dev.txt \
    --python-version "$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" target/wheels/*.whl
}

part_userlands() {
  local suite
  for suite in bookworm trixie; do
    with_lock rdma-userlands make_userland "$suite"
    scripts/rdma-vm --time 1800 "tests/python/rdma/userland.sh .deps/rdma/userlands/$suite"
  done
}

part_series() {
  local key transport
  for key in "" --key; do
    for transport in rc ud; do
      scripts/rdma-vm --time 2400 "PYTHONPATH=tests:. $python -m lab.chaos kill-consumer kill-producer freeze restart-listener sleep \
        --rounds 4 --transport $transport $key && PYTHONPATH=tests:. $python -m lab.chaos lease-race --rounds 200 --transport $transport $key"
    done
  done
}

part_agents() {
  local program ucx transport
  kvf_build_env
  program="$(cargo test --locked --no-run --message-format=json --test agent | "$python" -c '
import json, sys
built = (json.loads(line) for line in sys.stdin)
print(next(message["executable"] for message in built if message.get("executable")))')"
  ucx="$(echo "$venv"/lib/python3*/site-packages/kvferry_ucx/lib/libucp.so.0)"
  for transport in rc ud; do
    KVFERRY_UCX_LIB="$ucx" scripts/rdma-vm --time 3000 "export KVFERRY_TEST_RDMA=$transport
      '$program' --test-threads=1 transfer:: peers:: life:: keys:: verify::"
  done
}

part_vllm() {
  local key
  scripts/setup vllm
  for key in "" --key; do
    PYTHONPATH="tests:$(echo "$venv"/lib/python3*/site-packages)" scripts/rdma-vm --memory 10240 --time 1800 \
      "PYTHONPYCACHEPREFIX='$PYTHONPYCACHEPREFIX' UCX_TLS=rc .deps/vllm/bin/python tests/python/rdma/vllm_pair.py $key"
  done
}

part_short() {
  local elsewhere rc=0
  # A checkout may lie in a folder of which the guest has its own.
  elsewhere="$(mktemp -d -p /tmp)"
  mkdir "$elsewhere/tests"
  cp -r scripts "$elsewhere"
  cp -r tests/lab "$elsewhere/tests"
  ln -s "$KVF_DEPS" "$elsewhere/.deps"
  "$elsewhere/scripts/rdma-vm" "cd '$elsewhere' && test -x scripts/rdma-vm -a -d .deps/rdma && touch written" || rc=$?
  rm -r "$elsewhere"
  [[ $rc == 0 ]] || die "a virtual machine does not see a checkout in $elsewhere"
  scripts/rdma-vm --time 2400 "$python -m kvferry doctor --no-transfers --timeout 400 && $python -m pytest -q --durations=0 -p no:cacheprovider -m 'not long' tests/python/rdma"
}

part_all() {
  # A virtual machine has no network to take them from.
  .deps/venv/bin/python -m pip download --quiet --dest "$KVF_DEPS/rdma/wheels" -c scripts/lib/requirements-dev.txt target/wheels/*.whl
  rm -f "$KVF_DEPS"/rdma/wheels/kvferry*
  scripts/rdma-vm --time 1800 "$python -m kvferry doctor --timeout 400 && $python -m pytest -q -rs -p no:cacheprovider tests/python/rdma &&
    $python tests/python/rdma/registration.py"
  scripts/rdma-vm --time 1200 --hosts 2 "$python -u tests/python/rdma/two_hosts.py"
}
