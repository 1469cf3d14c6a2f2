// gptq_marlin_repack of int4 codes in C++, as an example of a library under test:
//
//   marlinspike fuzz header > marlinspike_kernel.h
//   c++ -std=c++17 -O2 -shared -fPIC -I . -o repack.so marlin_repack.cpp
//   marlinspike fuzz --op linear --output marlin_qweight --lib ./repack.so
//     --where checkpoint_format=gptq,weight_type=uint4b8,input_dtype=null,desc_act=false
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "marlinspike_kernel.h"

namespace {

const DLTensor *input(const marlinspike_call &call, std::string_view name) {
  for (std::size_t i = 0; i < call.num_inputs; ++i)
    if (call.inputs[i].name == name) return &call.inputs[i].tensor;
  return nullptr;
}

// Words of 8 codes: each lane holds, for four blocks of 16 columns, rows 2c, 2c + 1, 2c + 8 and 2c + 9 of two columns.
void repack(const std::uint32_t *from, std::uint32_t *to, std::int64_t size_k, std::int64_t size_n) {
  constexpr int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (std::int64_t tile_k = 0; tile_k < size_k / 16; ++tile_k)
    for (std::int64_t tile_n = 0; tile_n < size_n / 64; ++tile_n)
      for (int lane = 0; lane < 32; ++lane)
        for (int block = 0; block < 4; ++block) {
          std::uint32_t word = 0;
          for (int field = 0; field < 8; ++field) {
            const int value = order[field], pair = value % 4;
            const std::int64_t k = tile_k * 16 + lane % 4 * 2 + pair % 2 + pair / 2 * 8;
            const std::int64_t n = tile_n * 64 + block * 16 + value / 4 * 8 + lane / 4;
            word |= (from[k / 8 * size_n + n] >> (k % 8 * 4) & 15) << (4 * field);
          }
          to[tile_k * size_n * 2 + tile_n * 128 + lane * 4 + block] = word;
        }
}

}  // namespace

int marlinspike_kernel_abi() { return MARLINSPIKE_KERNEL_ABI; }

int marlinspike_kernel_run(const marlinspike_call *call) {
  const DLTensor *codes = input(*call, "qweight");
  const std::string_view config = call->config;
  if (!codes || call->num_outputs != 1 || config.find("\"uint4b8\"") == config.npos || input(*call, "g_idx")) {
    std::snprintf(call->message, call->message_bytes, "only marlin_qweight of int4 codes without act-order");
    return MARLINSPIKE_UNSUPPORTED;
  }
  repack(static_cast<const std::uint32_t *>(codes->data), static_cast<std::uint32_t *>(call->outputs[0].tensor.data),
         codes->shape[0] * 8, codes->shape[1]);
  return MARLINSPIKE_OK;
}
