#!/usr/bin/env bash
# Builds the libFuzzer targets and their seed corpora into $OUT, as ClusterFuzzLite and OSS-Fuzz ask.
# Their image sets OUT and RUSTUP_TOOLCHAIN, and has cargo-fuzz, zip and a nightly compiler. Locally:
#
#   OUT=/tmp/out RUSTUP_TOOLCHAIN=nightly tools/fuzz/oss-fuzz.sh
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p "$OUT"

# Without debug assertions, an overflow would wrap instead of crash.
cargo fuzz build -O --debug-assertions

built=${CARGO_TARGET_DIR:-target}/x86_64-unknown-linux-gnu/release
for source in fuzz_targets/*.rs; do
  target=$(basename "$source" .rs)
  cp "$built/$target" "$OUT/"
  # The golden cases are seeds, too. libFuzzer leaves out seeds above its limit of 1 MiB.
  seeds=(corpus/"$target")
  [ "$target" != case ] || seeds+=(../../golden/data/cases)
  rm -f "$OUT/${target}_seed_corpus.zip"
  find "${seeds[@]}" -type f -size -1024k -print0 | sort -z |
    xargs -0 zip -q -j -X "$OUT/${target}_seed_corpus.zip"
done
