//! Every fault of a safetensors header gives its own error.

use marlinspike::container::{Container, ContainerError as E, HEADER_LIMIT, Header};
use proptest::prelude::*;

/// A file from a header's text and data of `data` zero bytes.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn error(header: &str, data: usize) -> E {
    Container::parse(&file(header, data)).expect_err(header)
}

/// One tensor `a` of four bytes with other parts replaced.
fn entry(dtype: &str, shape: &str, offsets: &str) -> E {
    error(&format!(r#"{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#), 4)
}

fn a() -> String {
    "a".to_owned()
}

#[test]
fn a_file_too_short_for_its_header() {
    assert_eq!(Container::parse(b"").unwrap_err(), E::Truncated { found: 0, expected: 8 });
    assert_eq!(Container::parse(b"1234567").unwrap_err(), E::Truncated { found: 7, expected: 8 });
    let mut long = file("{}", 0);
    long[0] = 3;
    assert_eq!(Container::parse(&long).unwrap_err(), E::HeaderPastEnd { header: 3, file: 10 });
    // A prefix that ends inside the header, of a file that holds it.
    assert_eq!(
        Header::parse(&file("{}", 0)[..9], 10).unwrap_err(),
        E::Truncated { found: 9, expected: 10 }
    );
}

#[test]
fn an_enormous_header_is_not_read() {
    for length in [HEADER_LIMIT + 1, u64::MAX, u64::MAX - 7, 1 << 63] {
        let bytes = length.to_le_bytes();
        let expected = E::HeaderTooLarge { found: length, limit: HEADER_LIMIT };
        assert_eq!(Header::parse(&bytes, u64::MAX).unwrap_err(), expected);
    }
}

#[test]
fn a_header_that_is_no_json_object() {
    let mut bytes = file("{}  ", 0);
    bytes[9] = 0xff;
    assert_eq!(Container::parse(&bytes).unwrap_err(), E::NotUtf8 { offset: 1 });
    assert_eq!(error("[]", 0), E::NotAnObject { found: "'['".into() });
    assert_eq!(error("", 0), E::NotAnObject { found: "nothing".into() });
    assert_eq!(error(" {}", 0), E::NotAnObject { found: "' '".into() });
    for text in ["{", "{]", "{}x", "{\"a\":}", "{\"a\" 1}", "{} {}", "{\"\\ud800\":1}"] {
        assert!(matches!(error(text, 0), E::Json { .. }), "{text}: {:?}", error(text, 0));
    }
}

#[test]
fn deep_nesting_neither_parses_nor_overflows() {
    let deep = |open: &str, n: usize| format!("{{\"a\":{}", open.repeat(n));
    assert!(matches!(error(&deep("[", 100_000), 0), E::BadEntry { key: "", .. }));
    let in_shape = r#"{"a":{"dtype":"U8","shape":"#.to_owned() + &"[".repeat(100_000);
    assert!(matches!(error(&in_shape, 0), E::BadEntry { key: "shape", .. }));
    assert!(matches!(error(&deep("{\"dtype\":", 50_000), 0), E::BadEntry { key: "dtype", .. }));
    let metadata = r#"{"__metadata__":"#.to_owned() + &"{\"x\":".repeat(50_000);
    assert!(matches!(error(&metadata, 0), E::Metadata { .. }));
}

#[test]
fn repeated_keys() {
    let t = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    assert_eq!(error(&format!(r#"{{"a":{t},"a":{t}}}"#), 0), E::DuplicateTensor { tensor: a() });
    // The same name, spelled with an escape.
    assert_eq!(
        error(&format!(r#"{{"a":{t},"\u0061":{t}}}"#), 0),
        E::DuplicateTensor { tensor: a() }
    );
    for (key, twice) in [
        ("dtype", r#"{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}"#),
        ("shape", r#"{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}"#),
        ("data_offsets", r#"{"dtype":"U8","data_offsets":[0,0],"shape":[0],"data_offsets":[0,0]}"#),
    ] {
        assert_eq!(
            error(&format!(r#"{{"a":{twice}}}"#), 0),
            E::DuplicateKey { tensor: a(), key: key.into() }
        );
    }
    assert_eq!(
        error(r#"{"__metadata__":{"k":"1","k":"2"}}"#, 0),
        E::DuplicateMetadata { key: "k".into() }
    );
    assert_eq!(
        error(r#"{"__metadata__":{},"__metadata__":{}}"#, 0),
        E::DuplicateMetadata { key: "__metadata__".into() }
    );
}

#[test]
fn metadata_that_is_not_strings() {
    for (key, text) in [
        ("k", r#"{"__metadata__":{"k":1}}"#),
        ("k", r#"{"__metadata__":{"k":null}}"#),
        ("k", r#"{"__metadata__":{"k":{"deeper":"x"}}}"#),
        ("__metadata__", r#"{"__metadata__":"text"}"#),
        ("__metadata__", r#"{"__metadata__":[]}"#),
    ] {
        match error(text, 0) {
            E::Metadata { key: found, problem } => {
                assert_eq!(found, key);
                assert!(problem.contains("expected"), "{problem}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn integers_out_of_their_domain() {
    for (shape, found) in [
        ("[-1]", "-1"),
        ("[4.0]", "4.0"),
        ("[1e3]", "1000.0"),
        ("[18446744073709551616]", "1.8446744073709552e19"),
        ("[-9223372036854775809]", "-9.223372036854776e18"),
    ] {
        let expected = E::BadInteger { tensor: a(), key: "shape", found: found.into() };
        assert_eq!(entry("\"U8\"", shape, "[0,4]"), expected);
        let offsets = format!("[0,{}]", &shape[1..shape.len() - 1]);
        let expected = E::BadInteger { tensor: a(), key: "data_offsets", found: found.into() };
        assert_eq!(entry("\"U8\"", "[4]", &offsets), expected);
    }
}

#[test]
fn parts_of_another_type_or_absent() {
    let bad = |e: E, key: &str| match e {
        E::BadEntry { tensor, key: found, problem } => {
            assert_eq!((tensor.as_str(), found), ("a", key), "{problem}");
        }
        other => panic!("{other:?}"),
    };
    bad(entry("3", "[4]", "[0,4]"), "dtype");
    bad(entry("null", "[4]", "[0,4]"), "dtype");
    bad(entry("\"U8\"", "4", "[0,4]"), "shape");
    bad(entry("\"U8\"", "[\"4\"]", "[0,4]"), "shape");
    bad(entry("\"U8\"", "[[4]]", "[0,4]"), "shape");
    bad(entry("\"U8\"", "[null]", "[0,4]"), "shape");
    bad(entry("\"U8\"", "[4]", "[0]"), "data_offsets");
    bad(entry("\"U8\"", "[4]", "[0,4,4]"), "data_offsets");
    bad(entry("\"U8\"", "[4]", "{}"), "data_offsets");
    bad(error(r#"{"a":7}"#, 0), "");
    bad(error(r#"{"a":null}"#, 0), "");
    for (key, text) in [
        ("dtype", r#"{"a":{"shape":[0],"data_offsets":[0,0]}}"#),
        ("shape", r#"{"a":{"dtype":"U8","data_offsets":[0,0]}}"#),
        ("data_offsets", r#"{"a":{"dtype":"U8","shape":[0]}}"#),
    ] {
        assert_eq!(error(text, 0), E::MissingKey { tensor: a(), key });
    }
    let more = r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"extra":1}}"#;
    assert_eq!(error(more, 0), E::UnknownKey { tensor: a(), key: "extra".into() });
}

#[test]
fn element_types() {
    for sub in ["F4", "F6_E2M3", "F6_E3M2"] {
        let e = entry(&format!("\"{sub}\""), "[8]", "[0,4]");
        assert_eq!(e, E::SubByteDtype { tensor: a(), found: sub.into() });
        assert!(e.to_string().contains("sub-byte types are not supported"), "{e}");
    }
    for unknown in ["u8", "F8", "", "C64"] {
        assert_eq!(
            entry(&format!("\"{unknown}\""), "[4]", "[0,4]"),
            E::UnknownDtype { tensor: a(), found: unknown.into() }
        );
    }
}

#[test]
fn shapes_and_ranges_of_one_tensor() {
    assert_eq!(
        entry("\"U8\"", "[4]", "[4,0]"),
        E::ReversedOffsets { tensor: a(), begin: 4, end: 0 }
    );
    assert_eq!(
        entry("\"F32\"", "[2]", "[0,4]"),
        E::SizeMismatch { tensor: a(), found: 4, expected: 8 }
    );
    assert_eq!(
        entry("\"U8\"", "[]", "[0,4]"),
        E::SizeMismatch { tensor: a(), found: 4, expected: 1 }
    );
    for shape in [
        vec![u64::MAX, 2],
        vec![1 << 63],
        vec![1 << 62, 1 << 2],
        // Zero elements, but no machine can count the others.
        vec![0, 1 << 40, 1 << 40],
    ] {
        assert_eq!(
            entry("\"F32\"", &format!("{shape:?}"), "[0,0]"),
            E::ShapeOverflow { tensor: a(), shape }
        );
    }
    assert_eq!(
        entry("\"U8\"", "[8]", "[0,8]"),
        E::OutOfBounds { tensor: a(), end: 8, data_len: 4 }
    );
    // Offsets near 2^64, where adding the data's own start would wrap.
    let near = u64::MAX;
    assert!(matches!(
        entry("\"U8\"", "[4]", &format!("[{},{near}]", near - 4)),
        E::OutOfBounds { .. }
    ));
}

#[test]
fn ranges_of_several_tensors() {
    let two = |first: [u64; 2], second: [u64; 2], data| {
        let t = |[b, e]: [u64; 2]| {
            format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{b},{e}]}}"#, e - b)
        };
        error(&format!(r#"{{"a":{},"b":{}}}"#, t(first), t(second)), data)
    };
    let overlap = |begin, expected| E::Overlap { tensor: "b".into(), other: a(), begin, expected };
    assert_eq!(two([0, 4], [3, 5], 5), overlap(3, 4));
    assert_eq!(two([0, 4], [0, 4], 4), overlap(0, 4));
    // An empty tensor in the middle of another.
    assert_eq!(two([0, 4], [2, 2], 4), overlap(2, 4));
    assert_eq!(two([0, 4], [5, 6], 6), E::Gap { tensor: "b".into(), begin: 5, expected: 4 });
    assert_eq!(two([1, 4], [4, 6], 6), E::Gap { tensor: a(), begin: 1, expected: 0 });
    assert_eq!(two([0, 4], [4, 6], 7), E::TrailingBytes { found: 7, expected: 6 });
    assert_eq!(error("{}", 1), E::TrailingBytes { found: 1, expected: 0 });
}

#[test]
fn a_tensor_that_is_not_there() {
    let bytes = file("{}", 0);
    let container = Container::parse(&bytes).unwrap();
    let expected = marlinspike::Error::from(E::NoSuchTensor { tensor: a() });
    assert_eq!(container.tensor("a").unwrap_err(), expected);
}

/// Why headers are not read by the `safetensors` crate (0.6): it accepts each of these, and takes the
/// last of what is repeated.
#[test]
fn the_safetensors_crate_accepts_what_is_refused_here() {
    let one = r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let twice = r#""a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}"#;
    let deep = format!("{}{}", "1,".repeat(64), 4);
    let cases = [
        (format!("{{{one},{twice}}}"), E::DuplicateTensor { tensor: a() }),
        (
            format!(r#"{{"__metadata__":{{"k":"v","k":"w"}},{one}}}"#),
            E::DuplicateMetadata { key: "k".to_owned() },
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"order":"F"}}"#.to_owned(),
            E::UnknownKey { tensor: a(), key: "order".to_owned() },
        ),
        (format!(" {{{one}}}"), E::NotAnObject { found: "' '".to_owned() }),
    ];
    for (header, expected) in cases {
        assert_eq!(error(&header, 4), expected, "{header}");
        let bytes = file(&header, 4);
        assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok(), "{header}");
    }
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{deep}],"data_offsets":[0,4]}}}}"#);
    assert!(matches!(error(&header, 4), E::BadEntry { key: "shape", .. }), "65 dimensions");
    assert!(safetensors::SafeTensors::deserialize(&file(&header, 4)).is_ok());
}

proptest! {
    /// Parsing arbitrary bytes gives a value or an error, and the safetensors crate accepts every
    /// file that this reader accepts.
    #[test]
    fn arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if Container::parse(&bytes).is_ok() {
            prop_assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok());
        }
    }

    /// Valid files with a few bytes of the header changed.
    #[test]
    fn mutated_header(edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let header = r#"{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]}}"#;
        let mut bytes = file(header, 8);
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(ours) = Container::parse(&bytes) {
            let theirs = safetensors::SafeTensors::deserialize(&bytes);
            prop_assert!(theirs.is_ok(), "{:?}", theirs.err());
            prop_assert_eq!(ours.len(), theirs.unwrap().len());
        }
    }
}
