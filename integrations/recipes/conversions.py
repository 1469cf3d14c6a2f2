"""Number conversions of ml_dtypes, PyTorch and ggml against marlinspike's, and against numpy code in this file.

    pip install ./integrations/python ml_dtypes torch llama-cpp-python
    python conversions.py                        # every conversion of the installed libraries
    python conversions.py torch --every-float    # every f32 as well: minutes for each type

Inputs: every f16, every bf16, every code back to f32; f32 and f64 values around each value of the target and each tie
(with the numbers next to them, and next to the f32 that is next to the tie: two roundings show there), subnormal numbers,
infinities, NaN, and random bits. A difference counts as a finding only if marlinspike and the numpy code agree.
"""

import argparse
import ctypes
import glob
import importlib
import importlib.util
import os
import sys

import numpy as np

import marlinspike

# Exponent bits, mantissa bits, bias, largest finite code, infinity; every type but e8m0 has a sign.
FORMATS = {
    "float16": (5, 10, 15, 0x7BFF, True),
    "bfloat16": (8, 7, 127, 0x7F7F, True),
    "float8_e4m3fn": (4, 3, 7, 0x7E, False),
    "float8_e4m3fnuz": (4, 3, 8, 0x7F, False),
    "float8_e5m2": (5, 2, 15, 0x7B, True),
    "float8_e5m2fnuz": (5, 2, 16, 0x7F, False),
    "float8_e8m0fnu": (8, 0, 127, 0xFE, False),
    "float4_e2m1fn": (2, 1, 1, 0x7, False),
}
# The reference has no conversion to these: numpy's result alone is compared.
NUMPY_ONLY = ("float8_e4m3fnuz", "float8_e5m2fnuz")


def magnitudes(name):
    """The value of every finite code without sign, as float64: exact for each of these types."""
    exponent_bits, mantissa_bits, bias, largest, _ = FORMATS[name]
    codes = np.arange(largest + 1, dtype=np.int64)
    field, mantissa = codes >> mantissa_bits, (codes & ((1 << mantissa_bits) - 1)).astype(np.float64)
    if name == "float8_e8m0fnu":
        return np.ldexp(1.0, field - bias)
    normal = field > 0
    significand = mantissa + np.where(normal, 1 << mantissa_bits, 0)
    return np.ldexp(significand, np.where(normal, field, 1) - bias - mantissa_bits)


def nearest(values, name):
    """The magnitude code of each value by numpy: the nearer one, in the middle the even one, and for e8m0 the larger one.
    Values that round beyond the largest finite code get the next code."""
    exact = magnitudes(name)
    beyond = 2 * exact[-1] - exact[-2] if len(exact) > 1 and name != "float8_e8m0fnu" else 2.0**128
    exact = np.append(exact, beyond)
    # Halves of the types' steps are float64 numbers.
    middle = (exact[1:] + exact[:-1]) / 2
    size = np.abs(values)
    code = np.searchsorted(middle, size, side="left")
    at_tie = (code < len(middle)) & (size == middle[np.minimum(code, len(middle) - 1)])
    odd = (code & 1 == 1) | (name == "float8_e8m0fnu")
    return code + (at_tie & odd)


def hard(name, dtype):
    """Values of a type at which a conversion to `name` may fail."""
    exact = magnitudes(name)
    middle = (exact[1:] + exact[:-1]) / 2
    top = exact[-1] + (exact[-1] - exact[-2]) / 2 if name != "float8_e8m0fnu" else 1.5 * 2.0**127
    points = np.concatenate([exact, middle, [top, 2 * top]])
    random = np.random.default_rng(16)
    if dtype == np.float32:
        with np.errstate(over="ignore"):
            bits = points.astype(np.float32).view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)
        drawn = random.integers(0, 2**31, 1 << 20).astype(np.int32)
        special = np.array([0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    else:
        # Around a tie and around the f32 numbers next to it.
        with np.errstate(over="ignore"):
            single = points.astype(np.float32).view(np.int32)[:, None] + np.arange(-1, 2, dtype=np.int32)
        near = np.concatenate([points, np.maximum(single, 0).view(np.float32).astype(np.float64).ravel()])
        halves = (near[:-1] + near[1:]) / 2
        near = np.concatenate([near, halves[np.isfinite(halves)]])
        bits = near.view(np.int64)[:, None] + np.arange(-2, 3)
        # f32's halfway points between neighbours, where the first of two roundings ties.
        drawn = random.integers(0, 2**63, 1 << 20)
        special = np.array([0, 1, (1 << 52) - 1, 0x7FF0 << 48, 0x7FF8 << 48, (0x7FF0 << 48) + 1, 0x7FEF << 48])
    word = np.int32 if dtype == np.float32 else np.int64
    bits = np.concatenate([np.maximum(bits.ravel(), 0), drawn, special.astype(word)]).astype(word)
    return np.concatenate([bits, bits | np.iinfo(word).min]).view(dtype)


def expected(values, name):
    """The right code of each finite value by both routes, and whether they agree."""
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    largest = FORMATS[name][3]
    code = nearest(np.where(finite, wide, 0.0), name)
    inside = finite & (code <= largest)
    sign = np.signbit(wide).astype(np.int64) << (FORMATS[name][0] + FORMATS[name][1])
    code = np.where(inside, code | (0 if name == "float8_e8m0fnu" else sign), -1)
    if name in NUMPY_ONLY:
        # They have no negative zero.
        return np.where(code == 1 << 7, 0, code), inside
    made = np.asarray(marlinspike.encode(wide, name))
    made = made.view(np.uint16 if made.dtype.itemsize == 2 else np.uint8).astype(np.int64)
    if not np.array_equal(made[inside], code[inside]):
        raise SystemExit(f"{name}: marlinspike and numpy disagree")
    return code, inside


def all_bits(name):
    """Every code of a type."""
    if name in ("float16", "bfloat16"):
        return np.arange(1 << 16).astype(np.uint16)
    return np.arange(16 if name == "float4_e2m1fn" else 256).astype(np.uint8)


def bits_of(array):
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8).astype(np.int64)


class MlDtypes:
    """ml_dtypes' astype."""

    types = list(FORMATS)

    def __init__(self):
        self.module = importlib.import_module("ml_dtypes")
        self.version = f"ml_dtypes {self.module.__version__}"

    def type(self, name):
        return np.float16 if name == "float16" else getattr(self.module, name)

    def encode(self, values, name):
        return bits_of(values.astype(self.type(name)))

    def recode(self, bits, source, name):
        return bits_of(bits.view(self.type(source)).astype(self.type(name)))

    def decode(self, bits, name, dtype):
        return bits.view(self.type(name)).astype(dtype)


class Torch:
    """`Tensor.to` on the CPU: with vectors, and element by element from a strided tensor."""

    types = [name for name in FORMATS if name != "float4_e2m1fn"]

    def __init__(self, strided=False):
        self.torch = importlib.import_module("torch")
        self.strided = strided
        self.version = f"torch {self.torch.__version__}" + (" strided" if strided else "")

    def to(self, tensor, name):
        if self.strided:
            tensor = self.torch.stack([tensor, tensor], dim=1)[:, 0]
        made = tensor.to(getattr(self.torch, name)).contiguous()
        return made.view(self.torch.uint16 if made.itemsize == 2 else self.torch.uint8).numpy().astype(np.int64)

    def encode(self, values, name):
        return self.to(self.torch.from_numpy(values.copy()), name)

    def recode(self, bits, source, name):
        return self.to(self.torch.from_numpy(bits.copy()).view(getattr(self.torch, source)), name)

    def decode(self, bits, name, dtype):
        codes = self.torch.from_numpy(bits.copy()).view(getattr(self.torch, name))
        return codes.to(self.torch.float32 if dtype == np.float32 else self.torch.float64).numpy()


class Ggml:
    """Rows of f16 and bfloat16 by ggml's library and by its CPU backend."""

    types = ["float16", "bfloat16"]
    names = {"float16": "fp16", "bfloat16": "bf16"}
    folder = None

    def __init__(self, backend=False):
        folder = self.folder
        if folder is None:
            spec = importlib.util.find_spec("llama_cpp")
            if spec is None:
                raise ImportError("pip install llama-cpp-python, or --ggml FOLDER")
            folder = os.path.join(os.path.dirname(spec.origin), "lib")
        path = lambda part: sorted(glob.glob(os.path.join(folder, f"libggml-{part}.so*")))[0]  # noqa: E731
        self.base = ctypes.CDLL(path("base"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(path("cpu")) if backend else None
        if backend:
            self.cpu.ggml_cpu_init()
        self.base.ggml_version.restype = ctypes.c_char_p
        self.version = f"ggml {self.base.ggml_version().decode()}" + (" backend" if backend else "")

    def call(self, name, source, target):
        function = getattr(self.cpu, f"ggml_cpu_{name}") if self.cpu else getattr(self.base, f"ggml_{name}_row")
        function(source.ctypes.data_as(ctypes.c_void_p), target.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(source.size))
        return target

    def encode(self, values, name):
        if values.dtype != np.float32:
            raise TypeError("f32 only")
        values = np.ascontiguousarray(values)
        codes = np.zeros(values.shape, np.uint16)
        return self.call(f"fp32_to_{self.names[name]}", values, codes).astype(np.int64)

    def recode(self, bits, source, name):
        raise TypeError("f32 only")

    def decode(self, bits, name, dtype):
        if dtype != np.float32:
            raise TypeError("f32 only")
        return self.call(f"{self.names[name]}_to_fp32", bits.copy(), np.zeros(bits.shape, np.float32))


LIBRARIES = {
    "ml_dtypes": [MlDtypes],
    "torch": [Torch, lambda: Torch(strided=True)],
    "ggml": [Ggml, lambda: Ggml(backend=True)],
}


class Tally:
    """Judged values and findings of one conversion."""

    def __init__(self, library, what):
        self.library, self.what, self.judged, self.wrong, self.first = library, what, 0, 0, None

    def add(self, source, found, right, mask):
        self.judged += int(mask.sum())
        wrong = np.flatnonzero(mask & (found != right))
        self.wrong += len(wrong)
        if len(wrong) and self.first is None:
            i = wrong[0]
            show = [x.item() if hasattr(x, "item") else x for x in (source[i], found[i], right[i])]
            self.first = f"{show[0]!r}: found {show[1]:#x}, expected {show[2]:#x}" if isinstance(show[1], int) else (
                f"{show[0]!r}: found {show[1]!r}, expected {show[2]!r}")

    def __str__(self):
        note = f"; first: {self.first}" if self.wrong else ""
        return f"{self.library:28} {self.what:32} {self.judged:12,} judged, {self.wrong:9,} wrong{note}"


def judge_codes(tally, name, values, found):
    right, mask = expected(values, name)
    if name == "float8_e8m0fnu":
        # Zero and negative numbers have no code, and f32 makes zero of smaller ones: libraries choose.
        mask = mask & (values >= 2.0**-149)
    tally.add(values, found, right, mask)
    # NaN and infinities: what the format can hold must stay what it is.
    special, infinite = np.isnan(values), np.isinf(values)
    back = np.asarray(found, np.int64)
    largest, has_infinity = FORMATS[name][3], FORMATS[name][4]
    if name in NUMPY_ONLY:
        tally.add(values, back == 0x80, special, special)
    elif name == "float8_e8m0fnu":
        tally.add(values, back == 0xFF, special, special)
    elif name != "float4_e2m1fn":
        sign = 1 << (FORMATS[name][0] + FORMATS[name][1])
        tally.add(values, (back & (sign - 1)) > largest + has_infinity, special, special)
        if has_infinity:
            tally.add(values, back, np.where(values < 0, sign, 0) | (largest + 1), infinite)


def judge_every_float(tally, name, library):
    """Every f32 that is a number of the target's range, with marlinspike's code as the right one."""
    largest, sign = FORMATS[name][3], 0 if name == "float8_e8m0fnu" else 1 << (FORMATS[name][0] + FORMATS[name][1])
    for high in range(1 << 8):
        values = (np.arange(1 << 24, dtype=np.uint32) | np.uint32(high << 24)).view(np.float32)
        if name == "float8_e8m0fnu" and high == 0x80:
            break
        right = np.asarray(marlinspike.encode(values, name))
        right = right.view(np.uint16 if right.dtype.itemsize == 2 else np.uint8)
        mask = np.isfinite(values) & ((right & ~np.array(sign, right.dtype)) <= largest)
        if name == "float8_e8m0fnu":
            mask &= values > 0
        tally.add(values, library.encode(values, name).astype(right.dtype), right, mask)


def judge_back(tally, name, library, dtype):
    largest, has_infinity = FORMATS[name][3], FORMATS[name][4]
    codes = all_bits(name)
    bits = codes.astype(np.int64)
    sign = 0 if name == "float8_e8m0fnu" else 1 << (FORMATS[name][0] + FORMATS[name][1])
    exact, size = np.append(magnitudes(name), np.inf), bits & (sign - 1) if sign else bits
    right = np.where(bits & sign, -1.0, 1.0) * exact[np.minimum(size, len(exact) - 1)]
    nan = (size > largest + has_infinity) | (False if name in NUMPY_ONLY else (size > largest) & (not has_infinity))
    if name in NUMPY_ONLY:
        nan = bits == 0x80
    if name not in NUMPY_ONLY:
        reference = np.asarray(marlinspike.decode(codes, name))
        same = (reference == right) | (np.isnan(reference) & nan)
        if not same.all():
            raise SystemExit(f"{name}: marlinspike and numpy disagree on code {np.flatnonzero(~same)[0]:#x}")
    found = library.decode(codes, name, dtype).astype(np.float64)
    # Signs of zeros count.
    word = lambda x: np.where(nan, -1, x.view(np.int64))  # noqa: E731
    tally.add(bits, word(found), word(right), ~nan)
    tally.add(bits, np.isnan(found), nan, nan)


def judge_int4(tallies, library):
    """int4 and uint4 of ml_dtypes, which cuts off fractions as C does: values in range, and every code back."""
    for name, low, high in (("int4", -8, 7), ("uint4", 0, 15)):
        kind = getattr(library.module, name)
        near = np.concatenate([np.arange(low, high + 1) + step / 8 for step in range(-7, 8)]).astype(np.float32)
        near = np.concatenate([near, np.nextafter(near, np.float32(99)), np.nextafter(near, np.float32(-99))])
        for dtype in (np.float32, np.float64):
            values = near.astype(dtype)
            values = values[(np.trunc(values) >= low) & (np.trunc(values) <= high)]
            right = np.asarray(marlinspike.encode(values, name, "toward_zero")).view(np.uint8) & 15
            tallies.append(Tally(library.version, f"f{8 * values.itemsize} -> {name}"))
            found = values.astype(kind).view(np.uint8).astype(np.int64) & 15
            tallies[-1].add(values, found, right.astype(np.int64), np.ones(len(values), bool))
            codes = np.arange(16, dtype=np.uint8)
            back = codes.view(kind).astype(dtype).astype(np.float64)
            tallies.append(Tally(library.version, f"{name} -> f{8 * values.itemsize}"))
            tallies[-1].add(codes, back, np.asarray(marlinspike.decode(codes, name)), np.ones(16, bool))


def run(library, every_float=False):
    """The tallies of a library."""
    tallies = []

    def start(what):
        tallies.append(Tally(library.version, what))
        return tallies[-1]

    with np.errstate(all="ignore"):
        for name in library.types:
            for source, dtype in (("f32", np.float32), ("f64", np.float64)):
                values = hard(name, dtype)
                try:
                    found = library.encode(values, name)
                except TypeError:
                    continue
                judge_codes(start(f"{source} -> {name}"), name, values, found)
                judge_back(start(f"{name} -> {source}"), name, library, dtype)
            for source in library.types:
                if source == name or source in NUMPY_ONLY:
                    continue
                bits = all_bits(source)
                try:
                    found = library.recode(bits, source, name)
                except TypeError:
                    # Not every pair of types has a conversion.
                    continue
                values = np.asarray(marlinspike.decode(bits, source))
                judge_codes(start(f"{source} -> {name}"), name, values, found)
            if every_float and name not in NUMPY_ONLY:
                judge_every_float(start(f"every finite f32 -> {name}"), name, library)
        if isinstance(library, MlDtypes):
            judge_int4(tallies, library)
    return tallies


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=", ".join(LIBRARIES))
    parser.add_argument("--every-float", action="store_true", help="every f32, too")
    parser.add_argument("--ggml", metavar="FOLDER", help="folder of libggml-base.so and libggml-cpu.so")
    parser.add_argument("--types", help="names, separated by commas")
    options = parser.parse_args(arguments)
    Ggml.folder, found = options.ggml, 0
    for name in options.libraries or LIBRARIES:
        for make in LIBRARIES[name]:
            try:
                library = make()
            except ImportError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            if options.types:
                library.types = [t for t in library.types if t in options.types.split(",")]
            for tally in run(library, options.every_float):
                print(tally, flush=True)
                found += tally.wrong
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
