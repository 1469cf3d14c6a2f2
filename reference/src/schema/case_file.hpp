// Writes case files; C++17, no dependencies, little-endian machines.
#pragma once
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

using Bytes = std::vector<std::uint8_t>;

inline std::mt19937 rng(0);

template <class T, class Draw>
Bytes filled(std::size_t count, Draw draw) {
    Bytes bytes(count * sizeof(T));
    for (std::size_t i = 0; i < count; ++i) {
        T value = static_cast<T>(draw());
        std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
    return bytes;
}

inline Bytes random_bytes(std::size_t count, std::size_t width) {
    return filled<std::uint8_t>(count * width, [] { return rng() & 0xff; });
}
// Numbers of 0 or more: codes 0x00 to 0x7e.
inline Bytes random_e4m3(std::size_t count, std::size_t) {
    return filled<std::uint8_t>(count, [] { return rng() % 0x7f; });
}
inline Bytes random_e8m0(std::size_t count, std::size_t) {
    return filled<std::uint8_t>(count, [] { return 120 + rng() % 15; });
}
// Numbers from 0.5 below 1, by their bits.
inline Bytes random_f16(std::size_t count, std::size_t) {
    return filled<std::uint16_t>(count, [] { return 0x3800 + rng() % 1024; });
}
inline Bytes random_bf16(std::size_t count, std::size_t) {
    return filled<std::uint16_t>(count, [] { return 0x3f00 + rng() % 128; });
}
inline Bytes random_f32(std::size_t count, std::size_t) {
    return filled<float>(count, [] { return 0.5f + static_cast<float>(rng() % 4096) / 8192; });
}

class CaseFile {
public:
    CaseFile(const std::string& op, const std::string& config)
        : header_("{\"__metadata__\":{\"format\":\"marlinspike-case\",\"version\":\"1\",\"name\":\"example\",\"op\":\"" +
                  op + "\",\"config\":\"" + escaped(config) + "\"}") {}

    // dtype is the safetensors name: F16, BF16, F32, I32, I8, U8, F8_E4M3, F8_E8M0.
    void add(const std::string& name, const std::string& dtype, std::vector<std::size_t> shape, const Bytes& bytes) {
        std::string sizes;
        for (std::size_t size : shape) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
        header_ += ",\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + sizes + "],\"data_offsets\":[" +
                   std::to_string(data_.size()) + "," + std::to_string(data_.size() + bytes.size()) + "]}";
        data_.insert(data_.end(), bytes.begin(), bytes.end());
    }

    void add(const std::string& name, const std::string& dtype, std::vector<std::size_t> shape,
             Bytes (*fill)(std::size_t, std::size_t)) {
        std::size_t count = 1;
        for (std::size_t size : shape) count *= size;
        add(name, dtype, shape, fill(count, dtype == "F32" || dtype == "I32" ? 4 : dtype.find("16") != std::string::npos ? 2 : 1));
    }

    void add_topk_ids(std::vector<std::size_t> shape, std::size_t num_experts) {
        std::size_t i = 0;
        add("in.topk_ids", "I32", shape, filled<std::int32_t>(shape[0] * shape[1], [&] {
            std::size_t token = i / shape[1], slot = i % shape[1];
            return ++i, (token * 3 + slot) % num_experts;
        }));
    }

    void write(const std::string& path) const {
        std::string header = header_ + "}";
        header.resize((header.size() + 7) / 8 * 8, ' ');
        std::uint64_t length = header.size();
        std::ofstream file(path, std::ios::binary);
        file.write(reinterpret_cast<const char*>(&length), 8);
        file << header;
        file.write(reinterpret_cast<const char*>(data_.data()), static_cast<std::streamsize>(data_.size()));
    }

private:
    static std::string escaped(const std::string& text) {
        std::string out;
        for (char c : text) out += c == '"' ? std::string("\\\"") : std::string(1, c);
        return out;
    }

    std::string header_;
    Bytes data_;
};
