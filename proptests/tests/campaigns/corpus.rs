//! The fuzzers' corpus and many mutations of it, on stable Rust: nothing panics, and every hostile
//! file gives the error of its name.

use std::path::Path;

use marlinspike::Error;
use marlinspike::case::CaseError as C;
use marlinspike::config::ConfigError as Q;
use marlinspike::container::{ContainerError as E, IndexError as I};
use marlinspike_golden::Tier;
use marlinspike_proptests::fuzz::corpus::{Corpus, MutatedFormat, mutations};
use marlinspike_proptests::fuzz::{self, ConfigFailure as F};

fn corpus<X>(target: &str, entry: fn(&[u8]) -> Result<(), X>) -> Corpus<X> {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/fuzz/corpus");
    Corpus::read(&corpora, target, entry)
}

fn hammer<X>(target: &str, entry: fn(&[u8]) -> Result<(), X>, format: MutatedFormat) {
    corpus(target, entry).hammer(
        0xf022,
        format,
        mutations(Tier::current().pick(4_000, 10_000, 30_000)),
    );
}

#[test]
fn container_corpus() {
    corpus("container", fuzz::container).replay(&[
        ("nothing", |e| matches!(e, E::Truncated { found: 0, expected: 8 })),
        ("short_length", |e| matches!(e, E::Truncated { found: 3, .. })),
        ("huge_header", |e| matches!(e, E::HeaderTooLarge { found: u64::MAX, .. })),
        ("header_past_end", |e| matches!(e, E::HeaderPastEnd { header: 0x10_0000, .. })),
        ("not_utf8", |e| matches!(e, E::NotUtf8 { offset: 2 })),
        ("not_an_object", |e| matches!(e, E::NotAnObject { .. })),
        ("not_json", |e| matches!(e, E::Json { .. })),
        ("overlap", |e| matches!(e, E::Overlap { begin: 2, expected: 4, .. })),
        ("gap", |e| matches!(e, E::Gap { begin: 6, expected: 4, .. })),
        ("past_end", |e| matches!(e, E::OutOfBounds { end: 400, data_len: 4, .. })),
        ("negative_offset", |e| matches!(e, E::BadInteger { key: "data_offsets", .. })),
        ("reversed_offsets", |e| matches!(e, E::ReversedOffsets { begin: 4, end: 0, .. })),
        ("wrong_shape", |e| matches!(e, E::SizeMismatch { found: 4, expected: 5, .. })),
        ("shape_overflow", |e| matches!(e, E::ShapeOverflow { .. })),
        ("fraction", |e| matches!(e, E::BadInteger { key: "shape", .. })),
        ("sub_byte", |e| matches!(e, E::SubByteDtype { .. })),
        ("unknown_dtype", |e| matches!(e, E::UnknownDtype { .. })),
        ("duplicate_tensor", |e| matches!(e, E::DuplicateTensor { .. })),
        ("duplicate_key", |e| matches!(e, E::DuplicateKey { .. })),
        ("duplicate_metadata", |e| matches!(e, E::DuplicateMetadata { .. })),
        ("metadata_number", |e| matches!(e, E::Metadata { .. })),
        ("missing_key", |e| matches!(e, E::MissingKey { key: "data_offsets", .. })),
        ("unknown_key", |e| matches!(e, E::UnknownKey { .. })),
        ("entry_is_a_list", |e| matches!(e, E::BadEntry { key: "", .. })),
        ("trailing_bytes", |e| matches!(e, E::TrailingBytes { found: 9, expected: 4 })),
        ("deep", |e| matches!(e, E::BadEntry { .. })),
    ]);
}

/// Whether `key` is the rejected config key.
fn refused(e: &Error, key: &str) -> bool {
    matches!(e.downcast_ref(), Some(C::ConfigValue { key: found, .. }) if found == key)
}

#[test]
fn case_corpus() {
    corpus("case", fuzz::case).replay(
        &[
            (
                "no_op",
                |e| matches!(e.downcast_ref(), Some(C::MissingMetadata { key }) if key == "op"),
            ),
            ("format", |e| matches!(e.downcast_ref(), Some(C::Format { .. }))),
            ("version", |e| matches!(e.downcast_ref(), Some(C::Version { .. }))),
            ("op", |e| matches!(e.downcast_ref(), Some(C::UnknownOp { .. }))),
            ("config_json", |e| matches!(e.downcast_ref(), Some(C::ConfigJson { .. }))),
            ("config_twice", |e| matches!(e.downcast_ref(), Some(C::DuplicateConfigKey { .. }))),
            (
                "config_missing",
                |e| matches!(e.downcast_ref(), Some(C::MissingConfigKey { key, .. }) if key == "size_n"),
            ),
            ("group_zero", |e| refused(e, "group_size")),
            ("group_minus_two", |e| refused(e, "group_size")),
            ("size_huge", |e| refused(e, "size_k")),
            ("size_negative", |e| refused(e, "size_n")),
            (
                "weight_type",
                |e| matches!(e.downcast_ref(), Some(C::Contradiction { key, .. }) if key == "weight_type"),
            ),
            ("group_not_dividing", |e| refused(e, "size_k")),
            (
                "nan_scale",
                |e| matches!(e, Error::Value { tensor, index, .. } if tensor == "in.scales" && *index == [0, 3]),
            ),
            (
                "infinite_scale",
                |e| matches!(e, Error::Value { tensor, .. } if tensor == "in.scales"),
            ),
            (
                "g_idx_too_large",
                |e| matches!(e, Error::Value { tensor, index, .. } if tensor == "in.g_idx" && *index == [5]),
            ),
            (
                "g_idx_negative",
                |e| matches!(e, Error::Value { tensor, .. } if tensor == "in.g_idx"),
            ),
            (
                "missing_input",
                |e| matches!(e, Error::Missing { tensor, .. } if tensor == "in.scales"),
            ),
            (
                "unknown_tensor",
                |e| matches!(e, Error::Unknown { tensor, .. } if tensor == "in.qzeros2"),
            ),
            (
                "tensor_prefix",
                |e| matches!(e, Error::Unknown { tensor, .. } if tensor == "weights"),
            ),
            ("shape", |e| matches!(e, Error::Shape { tensor, .. } if tensor == "in.qweight")),
            ("dtype", |e| matches!(e, Error::Dtype { tensor, .. } if tensor == "in.qweight")),
            ("truncated", |e| matches!(e.downcast_ref(), Some(E::OutOfBounds { .. }))),
        ],
    );
}

#[test]
fn config_corpus() {
    corpus("config", fuzz::config).replay(&[
        ("not_json", |e| matches!(e, F::Json(_))),
        (
            "absent_method",
            |e| matches!(e, F::Config(Q::MissingKey { key }) if key.ends_with("quant_method")),
        ),
        ("unknown_method", |e| matches!(e, F::Config(Q::UnknownMethod { .. }))),
        ("bits_type", |e| matches!(e, F::Config(Q::WrongType { .. }))),
        ("bits_3", |e| matches!(e, F::Config(Q::UnsupportedType { bits: 3, .. }))),
        ("bits_missing", |e| matches!(e, F::Config(Q::MissingKey { .. }))),
        ("group_zero", |e| matches!(e, F::Config(Q::BadValue { .. }))),
        ("pattern", |e| matches!(e, F::Config(Q::InvalidPattern { .. }))),
        ("ct_list", |e| matches!(e, F::Config(Q::WrongType { .. }))),
        ("fp8_block", |e| matches!(e, F::Config(Q::BadValue { .. }))),
        ("deep", |e| matches!(e, F::Json(_))),
        ("number", |e| matches!(e, F::Json(_))),
    ]);
}

#[test]
fn index_corpus() {
    let outside = |e: &I| matches!(e, I::FileName { tensor, .. } if tensor == "a");
    corpus("index", fuzz::index).replay(&[
        ("nothing", |e| matches!(e, I::Json { .. })),
        ("truncated", |e| matches!(e, I::Json { .. })),
        ("not_utf8", |e| matches!(e, I::Json { .. })),
        ("deep", |e| matches!(e, I::Form { .. })),
        ("deep_map", |e| matches!(e, I::Form { .. })),
        ("not_an_object", |e| matches!(e, I::Form { .. })),
        ("no_map", |e| matches!(e, I::Form { reason } if reason.contains("weight_map"))),
        ("two_maps", |e| matches!(e, I::Form { reason } if reason.contains("duplicate"))),
        ("map_is_a_list", |e| matches!(e, I::Form { .. })),
        ("file_is_a_number", |e| matches!(e, I::Form { .. })),
        ("file_is_null", |e| matches!(e, I::Form { .. })),
        ("twice", |e| matches!(e, I::DuplicateTensor { tensor } if tensor == "a")),
        ("twice_escaped", |e| matches!(e, I::DuplicateTensor { tensor } if tensor == "a")),
        ("parent", outside),
        ("parent_escaped", outside),
        ("absolute", outside),
        ("folder", outside),
        ("backslash", outside),
        ("drive", outside),
        ("hidden", outside),
        ("zero_byte", outside),
        ("line_break", outside),
        ("itself", outside),
        ("long", outside),
        ("empty_name", outside),
    ]);
}

#[test]
fn packed_corpus() {
    corpus("packed", fuzz::packed).replay(&[
        ("not_json", |e| is_value(e, "w4a8.m")),
        ("list", |e| is_value(e, "w4a8.m")),
        ("version", |e| is_value(e, "version")),
        ("layer", |e| is_value(e, "layer")),
        ("unknown_key", |e| is_value(e, "bias")),
        ("missing_key", |e| is_value(e, "w4a8.m")),
        ("nr_zero", |e| is_size(e, "nr")),
        ("group_zero", |e| is_value(e, "group_size")),
        ("sizes_overflow", |e| is_size(e, "w4a8.m")),
        ("size_negative", |e| is_value(e, "size_n")),
        ("bytes_missing", |e| is_shape(e, "m.rhs_packed")),
        ("no_tensor", |e| matches!(e.downcast_ref(), Some(E::NoSuchTensor { .. }))),
        ("shape", |e| is_shape(e, "m.rhs_packed")),
        ("dtype", |e| matches!(e, Error::Dtype { .. })),
        ("no_w2", |e| matches!(e.downcast_ref(), Some(E::NoSuchTensor { .. }))),
        ("experts_many", |e| is_value(e, "num_experts")),
        ("experts_fewer", |e| is_shape(e, "m.w13_packed")),
        ("top_k", |e| is_value(e, "top_k")),
        ("map_twice", |e| is_value(e, "expert_map")),
        ("map_short", |e| is_shape(e, "expert_map")),
        ("map_negative", |e| is_value(e, "expert_map")),
        ("activation", |e| is_value(e, "activation")),
        ("no_bytes", |e| is_value(e, "hidden_size")),
        ("doubled", |e| is_size(e, "intermediate_size")),
    ]);
}

/// Whether a value of this tensor or key is rejected.
fn is_value(e: &Error, name: &str) -> bool {
    matches!(e, Error::Value { tensor, .. } if tensor.ends_with(name))
}

fn is_shape(e: &Error, name: &str) -> bool {
    matches!(e, Error::Shape { tensor, .. } if tensor.ends_with(name))
}

fn is_size(e: &Error, name: &str) -> bool {
    matches!(e, Error::Size { what, .. } if what.contains(name))
}

#[test]
fn packed_mutations() {
    hammer("packed", fuzz::packed, MutatedFormat::Safetensors);
}

#[test]
fn container_mutations() {
    hammer("container", fuzz::container, MutatedFormat::Safetensors);
}

#[test]
fn case_mutations() {
    hammer("case", fuzz::case, MutatedFormat::Safetensors);
}

#[test]
fn config_mutations() {
    hammer("config", fuzz::config, MutatedFormat::Text);
}

#[test]
fn index_mutations() {
    hammer("index", fuzz::index, MutatedFormat::Text);
}
