/* marlin_permute_scales in C, as an example of a library under test:
 *
 *   marlinspike fuzz header > marlinspike_kernel.h
 *   cc -O2 -shared -fPIC -I . -o scales.so marlin_scales.c
 *   marlinspike fuzz --op linear --output marlin_scales --lib ./scales.so \
 *     --where checkpoint_format=gptq,input_dtype=null,tensor_parallel.size=null
 */
#include <stdio.h>

#include "marlinspike_kernel.h"

/* The column that position p of a packed row holds. */
static long column(long p, int grouped) {
  static const long single[8] = {0, 1, 8, 9, 16, 17, 24, 25};
  if (grouped) return p / 64 * 64 + p % 8 * 8 + p % 64 / 8;
  return p / 32 * 32 + p % 32 / 8 * 2 + single[p % 8];
}

int marlinspike_kernel_abi(void) { return MARLINSPIKE_KERNEL_ABI; }

int marlinspike_kernel_run(const marlinspike_call *call) {
  const DLTensor *scales = marlinspike_find(call->inputs, call->num_inputs, "scales");
  const DLTensor *out = marlinspike_find(call->outputs, call->num_outputs, "marlin_scales");
  if (!scales || !out || call->num_outputs != 1) {
    snprintf(call->message, call->message_bytes, "only marlin_scales of GPTQ's scales");
    return MARLINSPIKE_UNSUPPORTED;
  }
  int64_t group_size = marlinspike_integer(call, "group_size", -1);
  int64_t size_k = marlinspike_integer(call, "size_k", 0);
  int grouped = group_size != -1 && group_size < size_k;
  const unsigned short *from = scales->data;
  unsigned short *to = out->data;
  for (long g = 0; g < scales->shape[0]; g++)
    for (long n = 0; n < scales->shape[1]; n++)
      to[g * scales->shape[1] + n] = from[g * scales->shape[1] + column(n, grouped)];
  return MARLINSPIKE_OK;
}
