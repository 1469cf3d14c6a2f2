#!/usr/bin/env bash
# Compiles FlashInfer's block-scale operators (csrc/nv_internal/tensorrt_llm/thop/fp4Op.cpp of its
# wheel, unchanged) for the CPU: their CUDA branches stay unresolved and are never called.
#   build_fp4op.sh FLASHINFER_DIR TVM_FFI_DIR OUT.so CUDA_INCLUDE...
# FLASHINFER_DIR and TVM_FFI_DIR are the unpacked packages `flashinfer` and `tvm_ffi`.
set -euo pipefail
data="$1/data" ffi="$2/include" out="$3"
shift 3
internal="$data/csrc/nv_internal"
includes=()
for path in "$@"; do includes+=(-I "$path"); done
g++ -std=c++17 -O1 -fPIC -shared -w -Wl,-z,lazy "${includes[@]}" \
  -I "$data/csrc" -I "$data/include" -I "$internal" -I "$internal/include" -I "$ffi" \
  "$internal/tensorrt_llm/thop/fp4Op.cpp" \
  "$internal/cpp/common/tllmException.cpp" "$internal/cpp/common/stringUtils.cpp" -o "$out"
