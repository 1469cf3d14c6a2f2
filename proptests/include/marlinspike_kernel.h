/* A kernel for `marlinspike fuzz --lib`: a shared library with the two functions below.
 *
 * Version 1. Tensors are DLPack's `DLTensor`; include dlpack.h first to use its definitions. */
#ifndef MARLINSPIKE_KERNEL_H
#define MARLINSPIKE_KERNEL_H

#include <stddef.h>
#include <stdint.h>

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
/* code: 0 int, 1 unsigned, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn, 12 float8_e5m2, 14 float8_e8m0fnu */
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

typedef struct {
  size_t size;                          /* sizeof(marlinspike_call); later versions append fields */
  const char *op;                       /* "linear" */
  const char *config;                   /* JSON: the keys of `marlinspike vectors --op OP --list` */
  const marlinspike_tensor *inputs;     /* read-only: a write ends the process */
  size_t num_inputs;
  const marlinspike_tensor *reference;  /* the reference's packed weights and scales; read-only */
  size_t num_reference;
  const marlinspike_tensor *outputs;    /* to be written, every byte */
  size_t num_outputs;
  char *message;                        /* for an error or a reason, NUL-terminated */
  size_t message_bytes;
} marlinspike_call;

/* Returns MARLINSPIKE_KERNEL_ABI. */
int marlinspike_kernel_abi(void);

/* Computes the outputs from the inputs. Called twice for each case, with outputs filled with two
 * patterns: a byte that keeps both was not written. */
int marlinspike_kernel_run(const marlinspike_call *call);

#ifdef __cplusplus
}
#endif
#endif
