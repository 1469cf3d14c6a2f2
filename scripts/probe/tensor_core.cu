// Runs every matrix instruction of an H200 on random tiles and writes operands and results, for
// `verify_tiles` (an example of the crate marlinspike) to compare with the emulation.
//
//   nvcc -O2 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o tensor_core tensor_core.cu
//   ./tensor_core FILE OUTPUTS_PER_INSTRUCTION
//
// Tiles cycle through exponent spreads, special values (zeros, subnormals, largest exponents,
// infinities, NaN), cancelling pairs, and accumulators of several magnitudes.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <string>
#include <vector>

#define CHECK(x)                                                              \
  do {                                                                        \
    cudaError_t e = (x);                                                      \
    if (e != cudaSuccess) {                                                   \
      fprintf(stderr, "%s: %s\n", #x, cudaGetErrorString(e));                 \
      exit(1);                                                                \
    }                                                                         \
  } while (0)

enum Type { F16, BF16, TF32, E4M3, E5M2, S8 };
enum Accumulator { ACC_F32, ACC_F16, ACC_S32 };

struct Instruction {
  const char *name;
  Type a, b;
  Accumulator accumulator;
  int rows;      // of a tile: 16 (mma.sync) or 64 (wgmma)
  int row_bytes; // of one row's k
};

const Instruction INSTRUCTIONS[] = {
    {"mma_f16_f32", F16, F16, ACC_F32, 16, 32},
    {"mma_bf16_f32", BF16, BF16, ACC_F32, 16, 32},
    {"mma_f16_f16", F16, F16, ACC_F16, 16, 32},
    {"mma_e4m3_f32", E4M3, E4M3, ACC_F32, 16, 32},
    {"mma_e5m2_f32", E5M2, E5M2, ACC_F32, 16, 32},
    {"mma_e4m3_e5m2_f32", E4M3, E5M2, ACC_F32, 16, 32},
    {"mma_e4m3_f16", E4M3, E4M3, ACC_F16, 16, 32},
    {"mma_e5m2_f16", E5M2, E5M2, ACC_F16, 16, 32},
    {"mma_s8_s32", S8, S8, ACC_S32, 16, 32},
    {"mma_tf32_f32", TF32, TF32, ACC_F32, 16, 32},
    {"mma_f16_f32", F16, F16, ACC_F32, 16, 16}, // m16n8k8
    {"wgmma_f16_f32", F16, F16, ACC_F32, 64, 32},
    {"wgmma_bf16_f32", BF16, BF16, ACC_F32, 64, 32},
    {"wgmma_f16_f16", F16, F16, ACC_F16, 64, 32},
    {"wgmma_e4m3_f32", E4M3, E4M3, ACC_F32, 64, 32},
    {"wgmma_e5m2_f32", E5M2, E5M2, ACC_F32, 64, 32},
    {"wgmma_e4m3_f16", E4M3, E4M3, ACC_F16, 64, 32},
    {"wgmma_e5m2_f16", E5M2, E5M2, ACC_F16, 64, 32},
    {"wgmma_s8_s32", S8, S8, ACC_S32, 64, 32},
};

// One warp per tile. a [16][32 bytes], b [8][32 bytes] (a column's k contiguous), c, d [16][8].
#define MMA_F32(TEXT)                                                         \
  asm volatile("mma.sync.aligned." TEXT                                       \
               " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"      \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]),       \
                 "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
#define MMA_F16(TEXT)                                                         \
  asm volatile("mma.sync.aligned." TEXT                                       \
               " {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%9};"                      \
               : "=r"(h[0]), "=r"(h[1])                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]),       \
                 "r"(b[1]), "r"(c[0] & 0xffff | c[1] << 16),                  \
                 "r"(c[2] & 0xffff | c[3] << 16))

template <int INDEX>
__global__ void mma(const uint8_t *A, const uint8_t *B, const uint32_t *C,
                    uint32_t *D, int tiles) {
  constexpr int ROW = INDEX == 10 ? 16 : 32;
  const int tile = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (tile >= tiles)
    return;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  A += (size_t)tile * 16 * ROW, B += (size_t)tile * 8 * ROW;
  C += (size_t)tile * 128, D += (size_t)tile * 128;
  auto word = [](const uint8_t *p) { return *(const uint32_t *)p; };
  uint32_t a[4] = {word(A + g * ROW + t * 4), word(A + (g + 8) * ROW + t * 4), 0, 0};
  uint32_t b[2] = {word(B + g * ROW + t * 4), 0}, c[4], d[4], h[2];
  if (ROW == 32) {
    a[2] = word(A + g * ROW + 16 + t * 4), a[3] = word(A + (g + 8) * ROW + 16 + t * 4);
    b[1] = word(B + g * ROW + 16 + t * 4);
  }
  auto place = [&](int i) { return (g + i / 2 * 8) * 8 + t * 2 + i % 2; };
  for (int i = 0; i < 4; i++)
    c[i] = C[place(i)];
  if constexpr (INDEX == 0) MMA_F32("m16n8k16.row.col.f32.f16.f16.f32");
  if constexpr (INDEX == 1) MMA_F32("m16n8k16.row.col.f32.bf16.bf16.f32");
  if constexpr (INDEX == 2) MMA_F16("m16n8k16.row.col.f16.f16.f16.f16");
  if constexpr (INDEX == 3) MMA_F32("m16n8k32.row.col.f32.e4m3.e4m3.f32");
  if constexpr (INDEX == 4) MMA_F32("m16n8k32.row.col.f32.e5m2.e5m2.f32");
  if constexpr (INDEX == 5) MMA_F32("m16n8k32.row.col.f32.e4m3.e5m2.f32");
  if constexpr (INDEX == 6) MMA_F16("m16n8k32.row.col.f16.e4m3.e4m3.f16");
  if constexpr (INDEX == 7) MMA_F16("m16n8k32.row.col.f16.e5m2.e5m2.f16");
  if constexpr (INDEX == 8) MMA_F32("m16n8k32.row.col.s32.s8.s8.s32");
  if constexpr (INDEX == 9) MMA_F32("m16n8k8.row.col.f32.tf32.tf32.f32");
  if constexpr (INDEX == 10)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]),
                   "r"(c[2]), "r"(c[3]));
  if constexpr (INDEX == 2 || INDEX == 6 || INDEX == 7)
    d[0] = h[0] & 0xffff, d[1] = h[0] >> 16, d[2] = h[1] & 0xffff, d[3] = h[1] >> 16;
  for (int i = 0; i < 4; i++)
    D[place(i)] = d[i];
}

// One warpgroup per tile: m64n8, a in registers, b in shared memory as two 8-row core matrices.
#define WGMMA(TEXT, TAIL)                                                     \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; "                         \
               "wgmma.mma_async.sync.aligned." TEXT                           \
               " {%0,%1,%2,%3},{%4,%5,%6,%7},%8,p" TAIL ";}"                  \
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor)  \
               : "memory")
#define WGMMA_F32(TEXT, TAIL)                                                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; "                         \
               "wgmma.mma_async.sync.aligned." TEXT                           \
               " {%0,%1,%2,%3},{%4,%5,%6,%7},%8,p" TAIL ";}"                  \
               : "+f"(f[0]), "+f"(f[1]), "+f"(f[2]), "+f"(f[3])               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor)  \
               : "memory")
#define WGMMA_F16(TEXT, TAIL)                                                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; "                         \
               "wgmma.mma_async.sync.aligned." TEXT                           \
               " {%0,%1},{%2,%3,%4,%5},%6,p" TAIL ";}"                        \
               : "+r"(h[0]), "+r"(h[1])                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor)  \
               : "memory")

template <int INDEX>
__global__ void wgmma(const uint8_t *A, const uint8_t *B, const uint32_t *C, uint32_t *D) {
  __shared__ alignas(128) uint8_t columns[256];
  const size_t tile = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  A += tile * 64 * 32, B += tile * 8 * 32, C += tile * 512, D += tile * 512;
  for (int i = threadIdx.x; i < 256; i += 128) {
    const int n = i / 32, k = i % 32;
    columns[k / 16 * 128 + n * 16 + k % 16] = B[i];
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  const int row = warp * 16 + g;
  auto word = [](const uint8_t *p) { return *(const uint32_t *)p; };
  uint32_t a[4] = {word(A + row * 32 + t * 4), word(A + (row + 8) * 32 + t * 4),
                   word(A + row * 32 + 16 + t * 4), word(A + (row + 8) * 32 + 16 + t * 4)};
  auto place = [&](int i) { return (row + i / 2 * 8) * 8 + t * 2 + i % 2; };
  uint32_t c[4], h[2];
  float f[4];
  for (int i = 0; i < 4; i++)
    c[i] = C[place(i)], f[i] = __uint_as_float(c[i]);
  h[0] = c[0] & 0xffff | c[1] << 16, h[1] = c[2] & 0xffff | c[3] << 16;
  const uint64_t address = __cvta_generic_to_shared(columns);
  const uint64_t descriptor =
      (address & 0x3ffff) >> 4 | (uint64_t)(128 >> 4) << 16 | (uint64_t)(256 >> 4) << 32;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if constexpr (INDEX == 11) WGMMA_F32("m64n8k16.f32.f16.f16", ",1,1,0");
  if constexpr (INDEX == 12) WGMMA_F32("m64n8k16.f32.bf16.bf16", ",1,1,0");
  if constexpr (INDEX == 13) WGMMA_F16("m64n8k16.f16.f16.f16", ",1,1,0");
  if constexpr (INDEX == 14) WGMMA_F32("m64n8k32.f32.e4m3.e4m3", ",1,1");
  if constexpr (INDEX == 15) WGMMA_F32("m64n8k32.f32.e5m2.e5m2", ",1,1");
  if constexpr (INDEX == 16) WGMMA_F16("m64n8k32.f16.e4m3.e4m3", ",1,1");
  if constexpr (INDEX == 17) WGMMA_F16("m64n8k32.f16.e5m2.e5m2", ",1,1");
  if constexpr (INDEX == 18) WGMMA("m64n8k32.s32.s8.s8", "");
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; i++)
    asm volatile("" : "+r"(c[i]), "+f"(f[i])::"memory");
  asm volatile("" : "+r"(h[0]), "+r"(h[1])::"memory");
  constexpr bool HALF = INDEX == 13 || INDEX == 16 || INDEX == 17;
  for (int i = 0; i < 4; i++)
    D[place(i)] = HALF          ? h[i / 2] >> (i % 2 * 16) & 0xffff
                  : INDEX == 18 ? c[i]
                                : __float_as_uint(f[i]);
}

template <int INDEX = 0>
void launch(int index, const uint8_t *a, const uint8_t *b, const uint32_t *c,
            uint32_t *d, int tiles) {
  if constexpr (INDEX < 19) {
    if (index != INDEX)
      return launch<INDEX + 1>(index, a, b, c, d, tiles);
    if constexpr (INDEX < 11)
      mma<INDEX><<<(tiles + 3) / 4, 128>>>(a, b, c, d, tiles);
    else
      wgmma<INDEX><<<tiles, 128>>>(a, b, c, d);
  }
}

static uint64_t state = 88172645463325252ull;
static uint32_t draw() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state * 2685821657736338717ull >> 32);
}

struct Format {
  int exponent, mantissa, centre, top; // top: largest exponent field of a number
};
static Format format(Type type) {
  switch (type) {
  case F16: return {5, 10, 15, 30};
  case BF16: return {8, 7, 127, 254};
  case E4M3: return {4, 3, 7, 15};
  case E5M2: return {5, 2, 15, 30};
  default: return {8, 23, 127, 254};
  }
}

// A number around `centre`; `special` 1 adds finite special values, 2 anything.
static uint32_t number(Format f, int centre, int spread, int special) {
  const uint32_t mantissa = draw() & ((1u << f.mantissa) - 1);
  const uint32_t sign = (draw() & 1) << (f.exponent + f.mantissa);
  if (special == 2 && draw() % 64 == 0)
    return draw() & (uint32_t)((2ull << (f.exponent + f.mantissa)) - 1);
  if (special && draw() % 8 == 0)
    switch (draw() % 5) {
    case 0: return sign;
    case 1: return sign | mantissa;
    case 2: return sign | 1;
    case 3: return sign | (uint32_t)f.top << f.mantissa | mantissa;
    default: break;
    }
  int exponent = centre - spread + (int)(draw() % (2 * spread + 1));
  exponent = exponent < 0 ? 0 : exponent > f.top ? f.top : exponent;
  return sign | (uint32_t)exponent << f.mantissa | mantissa;
}

static int bytes(Type type) { return type == TF32 ? 4 : type == F16 || type == BF16 ? 2 : 1; }

static void fill(Type type, int spread, int special, bool tiny, uint8_t *out, size_t len) {
  Format f = format(type);
  if (tiny && f.exponent == 8)
    f.centre -= 70; // products near f32's smallest numbers
  for (size_t i = 0; i < len; i += bytes(type)) {
    uint32_t x = type == S8 ? draw() : number(f, f.centre, spread, special);
    if (type == E4M3 && (x & 0x7f) == 0x7f && (special < 2 || draw() % 8))
      x ^= 1; // rarely NaN
    if (type == TF32)
      x &= 0xffffe000;
    memcpy(out + i, &x, bytes(type));
  }
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: tensor_core FILE OUTPUTS_PER_INSTRUCTION\n");
    return 2;
  }
  FILE *file = fopen(argv[1], "wb");
  const long outputs = atol(argv[2]);
  const int spreads[] = {0, 1, 2, 4, 8, 15, 30, 3};
  for (int index = 0; index < 19; index++) {
    const Instruction &in = INSTRUCTIONS[index];
    const int per = in.rows * 8, tiles = (int)((outputs + per - 1) / per);
    const size_t la = (size_t)in.rows * in.row_bytes, lb = (size_t)8 * in.row_bytes;
    std::vector<uint8_t> a(tiles * la), b(tiles * lb);
    std::vector<uint32_t> c((size_t)tiles * per), d(c.size());
    for (int t = 0; t < tiles; t++) {
      const int spread = spreads[t % 8], special = t / 8 % 3, magnitude = t / 24 % 4;
      const bool tiny = t / 768 % 4 == 3;
      fill(in.a, spread, special, tiny, &a[t * la], la);
      fill(in.b, spread, special, tiny, &b[t * lb], lb);
      for (int i = 0; i < per; i++) {
        const Format f = format(in.accumulator == ACC_F16 ? F16 : TF32);
        const int centre = f.centre + (magnitude - 2) * (in.accumulator == ACC_F16 ? 3 : 6);
        uint32_t x = number(f, centre, spread, special);
        if (tiny && draw() % 2)
          x = number(f, 0, spread, special);
        if (in.accumulator == ACC_S32)
          x = magnitude == 3 ? draw() : draw() >> 12;
        else if (magnitude == 0)
          x = 0;
        c[(size_t)t * per + i] = x;
      }
      if (t / 96 % 2 == 0 || in.a == S8 || in.a == TF32)
        continue;
      // Cancellation: the second of a pair of k repeats the first, negated.
      const int size = bytes(in.a);
      auto pairs = [&](uint8_t *row, bool negate) {
        for (int k = 0; k + size < in.row_bytes; k += 2 * size)
          if (draw() % 4) {
            memcpy(row + k + size, row + k, size);
            row[k + 2 * size - 1] ^= negate ? 0x80 : 0;
          }
      };
      for (int m = 0; m < in.rows; m++)
        pairs(&a[t * la + m * in.row_bytes], true);
      for (int n = 0; n < 8; n++)
        pairs(&b[t * lb + n * in.row_bytes], false);
    }
    uint8_t *da, *db;
    uint32_t *dc, *dd;
    CHECK(cudaMalloc(&da, a.size()));
    CHECK(cudaMalloc(&db, b.size()));
    CHECK(cudaMalloc(&dc, c.size() * 4));
    CHECK(cudaMalloc(&dd, d.size() * 4));
    CHECK(cudaMemcpy(da, a.data(), a.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), b.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(dc, c.data(), c.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(dd, 0xee, d.size() * 4));
    launch(index, da, db, dc, dd, tiles);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(d.data(), dd, d.size() * 4, cudaMemcpyDeviceToHost));
    char name[32] = {0};
    strncpy(name, in.name, 31);
    const int32_t header[6] = {index, in.a, in.accumulator, in.row_bytes, in.rows, tiles};
    fwrite(name, 1, 32, file), fwrite(header, 4, 6, file);
    fwrite(a.data(), 1, a.size(), file), fwrite(b.data(), 1, b.size(), file);
    fwrite(c.data(), 4, c.size(), file), fwrite(d.data(), 4, d.size(), file);
    CHECK(cudaFree(da));
    CHECK(cudaFree(db));
    CHECK(cudaFree(dc));
    CHECK(cudaFree(dd));
  }
  int version = 0;
  CHECK(cudaRuntimeGetVersion(&version));
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  printf("%s, CUDA %d.%d\n", device.name, version / 1000, version % 1000 / 10);
  return fclose(file);
}
