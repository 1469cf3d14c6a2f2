#!/usr/bin/env bash
# Builds the device tests here and runs them on a machine with a GPU but without Rust.
#
#   scripts/gpu.sh build [FOLDER]   binaries of the profile dist, stripped, into FOLDER (target/gpu)
#   FOLDER/gpu.sh run [TEST ...]    runs all laws, or the tests whose names contain a text (`gemm::`), on
#                                   that machine's GPU. Needs the driver, NVRTC (on the library path or
#                                   in MARLINSPIKE_NVRTC), and the golden cases (golden/ here or above,
#                                   or MARLINSPIKE_GOLDEN)
#
# `run` computes every layer of the golden checkpoints with `marlinspike run --backend cuda --check`, too.
# It prints one line for each layer, one for each law, with the number of compared cases and outputs, one line for each
# wrong kernel that a law rejected, and at the end "N laws held, N tests failed". The program `marlinspike`
# is built, too: `FOLDER/marlinspike check --backend cuda` and `FOLDER/marlinspike bench gpu`, with
# `FOLDER/gpu_peers` next to it.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

build() {
  local root=$here/.. out name program
  out=$(realpath -m "${1:-${CARGO_TARGET_DIR:-$root/target}/gpu}")
  mkdir -p "$out/tests"
  cd "$root"
  # Cargo's JSON messages name the path of each program.
  {
    cargo build --profile dist --locked -p marlinspike-accel --tests --examples --message-format=json-render-diagnostics
    cargo build --profile dist --locked -p marlinspike-cli --all-features --bins --message-format=json-render-diagnostics
  } |
    sed -n 's/.*"kind":\["\(test\|example\|bin\)"\].*"name":"\([a-z0-9_]*\)".*"executable":"\([^"]*\)".*/\1 \2 \3/p' |
    while read -r kind name program; do
      if [ "$kind" = test ]; then name=tests/$name; fi
      strip -o "$out/$name" "$program"
    done
  cp "${BASH_SOURCE[0]}" "$(dirname "${BASH_SOURCE[0]}")/gpu_peers" "$out/"
  du -sh "$out"
}

run() {
  local failed=0 held=0 log program wrong
  export MARLINSPIKE_REQUIRE_GPU=1
  log=$(mktemp)
  for program in "$here"/tests/*; do
    if ! "$program" "$@" >"$log" 2>&1; then
      # The harness's sum; a program that ends without it (a signal) counts as one test.
      wrong=$(sed -n 's/^test result: .* \([0-9]*\) failed;.*/\1/p' "$log")
      failed=$((failed + ${wrong:-1}))
      echo "FAILED: ${program##*/}: ${wrong:-ended without a result}"
      grep -A12 "panicked at" "$log" | head -60 || true
    fi
    sed -n 's/^LAW //p; /^MUTANT /p' "$log"
    held=$((held + $(grep -c '^LAW ' "$log" || true)))
  done
  rm -f "$log"
  if [ $# -eq 0 ]; then layers || failed=$((failed + $?)); fi
  echo "$held laws held, $failed tests failed"
  [ "$failed" -eq 0 ]
}

# Every layer of the golden checkpoints and models on the GPU: equal to the reference in every bit, or
# refused with a reason. Returns the number of layers that differ.
layers() {
  local golden=${MARLINSPIKE_GOLDEN:-$here/../golden} model layer text status wrong=0
  for model in "$golden"/data/checkpoints/*/ "$golden"/data/models/*/; do
    while read -r layer; do
      status=0
      text=$("$here/marlinspike" run "$model" --layer "$layer" --backend cuda --check --repeat 3 2>&1) || status=$?
      case $status in
        0) echo "LAYER $(basename "$model") $layer: equal, $(grep ' ms with ' <<<"$text")" ;;
        2) echo "LAYER $(basename "$model") $layer: $(head -1 <<<"$text")" ;;
        *)
          echo "FAILED: LAYER $(basename "$model") $layer: $text"
          wrong=$((wrong + 1))
          ;;
      esac
    done < <("$here/marlinspike" run "$model" --list)
  done
  return $wrong
}

case ${1:-} in
  build) shift && build "$@" ;;
  run) shift && run "$@" ;;
  *)
    sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
