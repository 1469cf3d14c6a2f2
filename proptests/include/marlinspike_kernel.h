/* A kernel for `marlinspike fuzz --lib`: a shared library with the two functions below.
 *
 * Version 1. Tensors are DLPack's `DLTensor`; include dlpack.h first to use its definitions. */
#ifndef MARLINSPIKE_KERNEL_H
#define MARLINSPIKE_KERNEL_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MARLINSPIKE_KERNEL_ABI 1

/* Return values of marlinspike_kernel_run; every other value is an error of the kernel. */
#define MARLINSPIKE_OK 0
#define MARLINSPIKE_UNSUPPORTED 77

#ifndef DLPACK_VERSION
#ifndef DLPACK_MAJOR_VERSION
/* The part of DLPack that is used: CPU tensors, row-major, without strides. */
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
typedef enum { kDLCPU = 1 } DLDeviceType;
/* Values of DLDataType.code. Numbers of fewer than 8 bits are packed in tensors of kDLUInt. */
typedef enum {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e5m2 = 12,
  kDLFloat8_e8m0fnu = 14
} DLDataTypeCode;
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* NULL: row-major */
  uint64_t byte_offset; /* 0 */
} DLTensor;
#endif
#endif

typedef struct {
  const char *name; /* "qweight", "y" */
  DLTensor tensor;
} marlinspike_tensor;

/* A key of the config and its value as text: `16`, `true`, `float16`; nested keys have dots
 * (`tensor_parallel.size`), elements of lists their index (`weight_block_size.0`). Keys with null are absent. */
typedef struct {
  const char *key;
  const char *value;
} marlinspike_setting;

typedef struct {
  size_t size;                          /* sizeof(marlinspike_call); later versions append fields */
  const char *op;                       /* "linear" */
  const char *config;                   /* JSON; `settings` below has its keys and values apart */
  const marlinspike_tensor *inputs;     /* read-only: a write ends the process */
  size_t num_inputs;
  const marlinspike_tensor *reference;  /* the reference's packed weights and scales; read-only */
  size_t num_reference;
  const marlinspike_tensor *outputs;    /* to be written, every byte */
  size_t num_outputs;
  char *message;                        /* for an error or a reason, NUL-terminated */
  size_t message_bytes;
  const marlinspike_setting *settings;  /* the config, one entry for each key */
  size_t num_settings;
} marlinspike_call;

/* The text of a config key; NULL where the config lacks it. */
static inline const char *marlinspike_text(const marlinspike_call *call, const char *key) {
  size_t i;
  for (i = 0; i < call->num_settings; i++)
    if (!strcmp(call->settings[i].key, key)) return call->settings[i].value;
  return NULL;
}

/* Whether the config has this value: marlinspike_is(call, "weight_type", "uint4b8"). */
static inline int marlinspike_is(const marlinspike_call *call, const char *key, const char *value) {
  const char *found = marlinspike_text(call, key);
  return found && !strcmp(found, value);
}

/* A whole number of the config, such as size_k; `absent` where the config lacks it. */
static inline int64_t marlinspike_integer(const marlinspike_call *call, const char *key, int64_t absent) {
  const char *found = marlinspike_text(call, key);
  return found ? (int64_t)strtoll(found, NULL, 10) : absent;
}

/* A number of the config with a fraction, such as routed_scaling_factor. */
static inline double marlinspike_number(const marlinspike_call *call, const char *key, double absent) {
  const char *found = marlinspike_text(call, key);
  return found ? strtod(found, NULL) : absent;
}

/* Whether a key is true; an absent one is false. */
static inline int marlinspike_flag(const marlinspike_call *call, const char *key) {
  return marlinspike_is(call, key, "true");
}

/* The tensor of this name; NULL where there is none:
 * marlinspike_find(call->inputs, call->num_inputs, "qweight"). */
static inline const DLTensor *marlinspike_find(const marlinspike_tensor *tensors, size_t num, const char *name) {
  size_t i;
  for (i = 0; i < num; i++)
    if (!strcmp(tensors[i].name, name)) return &tensors[i].tensor;
  return NULL;
}

/* Returns MARLINSPIKE_KERNEL_ABI. */
int marlinspike_kernel_abi(void);

/* Computes the outputs from the inputs. Called twice for each case, with outputs filled with two
 * patterns: a byte that keeps both was not written. */
int marlinspike_kernel_run(const marlinspike_call *call);

#ifdef __cplusplus
}
#endif
#endif
