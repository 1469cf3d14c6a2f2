#!/usr/bin/env python3
"""Measures rcp.approx.ftz.f32 of this machine's GPU for every mantissa.

Needs only the driver (libcuda.so.1). Prints a histogram of the differences from the correctly rounded
reciprocal in units in the last place, the results for multiples of an eighth, and at how many sampled
mantissas the result's mantissa depends on the exponent.
"""

import array
import collections
import ctypes
import struct

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry reciprocals(.param .u64 out, .param .u32 first) {
    .reg .u32 %r<6>;
    .reg .u64 %d<4>;
    .reg .f32 %f<3>;
    ld.param.u64 %d1, [out];
    ld.param.u32 %r5, [first];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r3, %r1, 256, %r2;
    add.u32 %r4, %r3, %r5;
    mov.b32 %f1, %r4;
    rcp.approx.ftz.f32 %f2, %f1;
    mul.wide.u32 %d2, %r3, 4;
    add.u64 %d3, %d1, %d2;
    st.global.f32 [%d3], %f2;
    ret;
}
\0"""
MANTISSAS = 1 << 23
ONE = 0x3F800000

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise SystemExit(f"{name}: error {code}")


def bits(value):
    return struct.unpack("I", struct.pack("f", value))[0]


def number(word):
    return struct.unpack("f", struct.pack("I", word))[0]


def prepare():
    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, function, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"reciprocals")
    call("cuMemAlloc_v2", ctypes.byref(memory), MANTISSAS * 4)
    return function, memory


def measure(function, memory, first):
    """The bits of the reciprocals of the 2^23 numbers from `first` on."""
    values = ctypes.c_uint64(memory.value), ctypes.c_uint32(first)
    pointers = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
    call("cuLaunchKernel", function, MANTISSAS // 256, 1, 1, 256, 1, 1, 0, None, pointers, None)
    out = array.array("I", bytes(MANTISSAS * 4))
    address = ctypes.c_void_p(out.buffer_info()[0])
    call("cuMemcpyDtoH_v2", address, memory, ctypes.c_size_t(MANTISSAS * 4))
    return out


def main():
    function, memory = prepare()
    found = measure(function, memory, ONE)
    units = lambda i: found[i] - bits(1.0 / number(ONE + i))
    print("units off:", dict(sorted(collections.Counter(map(units, range(MANTISSAS))).items())))
    print("multiples of an eighth:", [units(i << 20) for i in range(8)])
    for exponent in (20, 100, 126, 200, 240):
        other = measure(function, memory, exponent << 23)
        shift = (127 - exponent) << 23
        wrong = sum(other[i] - found[i] != shift for i in range(0, MANTISSAS, 7))
        print(f"exponent {exponent - 127}: {wrong} other mantissas")


main()
