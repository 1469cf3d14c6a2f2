// Measures the multiply-adds per second of a device's matrix unit, with bf16 or e4m3 operands and f32 sums that stay in
// registers: the upper bound for every product.
//
//   result  f32 [gridDim.x * blockDim.x]: the sum of a thread's accumulators
//
// Parameter:
//   WGMMA  0: mma.sync m16n8k16, eight chains in each warp; an instruction is 4096 operations
//          1: wgmma m64n256k16 (sm_90a), operands in shared memory, a chain in each warpgroup; an
//             instruction is 524288 operations
//          2: likewise m64n256k32 of e4m3 operands, 1048576 operations
//
// A chain is `rounds` times eight instructions. Operands are normal numbers of magnitude 1/4 to 4 and both signs:
// chips are faster with zeros. Launch with blocks of 256 threads; SHARED_BYTES of dynamic shared memory.

constexpr unsigned THREADS = 256;
// Operands in shared memory: four steps of k, A of 64 rows, then B of 256, 32 bytes of each row.
constexpr unsigned OPERAND_WORDS = 4 * (64 + 256) * 8;
constexpr unsigned SHARED_BYTES = WGMMA ? OPERAND_WORDS * 4 : 0;

// Two bf16 numbers, or four of e4m3, that depend on their place.
__device__ __forceinline__ unsigned operand(unsigned at) {
    unsigned h = (at + 1) * 2654435761u;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    if constexpr (WGMMA == 2) {
        return (0x28282828u + (h & 0x1f1f1f1fu)) | (h & 0x80808080u);
    }
    return (0x3e803e80u + (h & 0x01ff01ffu)) | (h & 0x80008000u);
}

// A descriptor of a K-major operand without swizzle: cores of 8 rows by 16 bytes, two along k 128
// bytes apart, along rows 256.
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
    return static_cast<unsigned long long>(address >> 4 & 0x3fffu) | (128ull >> 4) << 16 |
           (256ull >> 4) << 32;
}

// One instruction of that shape and those types; FLAGS end its operands.
#define WGMMA_256(SHAPE, FLAGS) \
    asm volatile( \
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, 1, 0;\n" \
        "wgmma.mma_async.sync.aligned." SHAPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, " \
        "%8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, " \
        "%24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, " \
        "%40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, " \
        "%56, %57, %58, %59, %60, %61, %62, %63, " \
        "%64, %65, %66, %67, %68, %69, %70, %71, " \
        "%72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, " \
        "%88, %89, %90, %91, %92, %93, %94, %95, " \
        "%96, %97, %98, %99, %100, %101, %102, %103, " \
        "%104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, " \
        "%120, %121, %122, %123, %124, %125, %126, %127}, " \
        "%128, %129, accumulate, 1, 1" FLAGS ";\n}\n" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
            "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
            "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
            "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
            "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
            "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
            "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
            "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
            "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
            "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
            "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
            "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
            "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), \
            "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
            "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), \
            "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127]) \
        : "l"(a), "l"(b))

__device__ __forceinline__ void multiply_add(float (&d)[128], unsigned long long a,
                                             unsigned long long b) {
    if constexpr (WGMMA == 2) {
        WGMMA_256("m64n256k32.f32.e4m3.e4m3", "");
    } else {
        WGMMA_256("m64n256k16.f32.bf16.bf16", ", 0, 0");
    }
}

// The sum of a thread's accumulators after `rounds` rounds of wgmma; instantiated for sm_90a alone.
template <unsigned>
__device__ __forceinline__ float warpgroup_rounds(unsigned rounds) {
    extern __shared__ __align__(128) unsigned char memory[];
    unsigned *words = reinterpret_cast<unsigned *>(memory);
    for (unsigned i = threadIdx.x; i < OPERAND_WORDS; i += blockDim.x) {
        words[i] = operand(i);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(memory));
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) {
        d[i] = 0.0f;
    }
    for (unsigned round = 0; round < rounds; ++round) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            multiply_add(d, descriptor(base + step % 4 * 2048),
                         descriptor(base + 4 * 2048 + step % 4 * 8192));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; ++i) {
        sum += d[i];
    }
    return sum;
}

// Likewise by mma.sync.
__device__ __forceinline__ float warp_rounds(unsigned rounds) {
    float d[8][4];
    unsigned a[4], b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        a[i] = operand(threadIdx.x * 8 + i);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        b[i] = operand(threadIdx.x * 8 + 4 + i);
    }
#pragma unroll
    for (int chain = 0; chain < 8; ++chain) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            d[chain][i] = 0.0f;
        }
    }
    for (unsigned round = 0; round < rounds; ++round) {
#pragma unroll
        for (int chain = 0; chain < 8; ++chain) {
            float(&c)[4] = d[chain];
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int chain = 0; chain < 8; ++chain) {
        sum += d[chain][0] + d[chain][1] + d[chain][2] + d[chain][3];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) matrix_limit(float *__restrict__ result, unsigned rounds) {
    float sum;
    if constexpr (WGMMA) {
        sum = warpgroup_rounds<WGMMA>(rounds);
    } else {
        sum = warp_rounds(rounds);
    }
    result[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
