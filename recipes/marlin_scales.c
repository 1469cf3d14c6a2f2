/* marlin_permute_scales in C, as an example of a library under test:
 *
 *   marlinspike fuzz header > marlinspike_kernel.h
 *   cc -O2 -shared -fPIC -I . -o scales.so marlin_scales.c
 *   marlinspike fuzz --op linear --output marlin_scales --lib ./scales.so \
 *     --where checkpoint_format=gptq,input_dtype=null,tensor_parallel.size=null
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "marlinspike_kernel.h"

/* The column that position p of a packed row holds. */
static long column(long p, int grouped) {
  static const long single[8] = {0, 1, 8, 9, 16, 17, 24, 25};
  if (grouped) return p / 64 * 64 + p % 8 * 8 + p % 64 / 8;
  return p / 32 * 32 + p % 32 / 8 * 2 + single[p % 8];
}

static long config_number(const char *config, const char *key) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\":", key);
  const char *at = strstr(config, quoted);
  return at ? strtol(at + strlen(quoted), NULL, 10) : 0;
}

int marlinspike_kernel_abi(void) { return MARLINSPIKE_KERNEL_ABI; }

int marlinspike_kernel_run(const marlinspike_call *call) {
  const DLTensor *scales = NULL, *out = &call->outputs[0].tensor;
  for (size_t i = 0; i < call->num_inputs; i++)
    if (!strcmp(call->inputs[i].name, "scales")) scales = &call->inputs[i].tensor;
  if (!scales || call->num_outputs != 1 || strcmp(call->outputs[0].name, "marlin_scales")) {
    snprintf(call->message, call->message_bytes, "only marlin_scales of GPTQ's scales");
    return MARLINSPIKE_UNSUPPORTED;
  }
  long group_size = config_number(call->config, "group_size");
  long size_k = config_number(call->config, "size_k");
  int grouped = group_size != -1 && group_size < size_k;
  const unsigned short *from = scales->data;
  unsigned short *to = out->data;
  for (long g = 0; g < scales->shape[0]; g++)
    for (long n = 0; n < scales->shape[1]; n++)
      to[g * scales->shape[1] + n] = from[g * scales->shape[1] + column(n, grouped)];
  return MARLINSPIKE_OK;
}
