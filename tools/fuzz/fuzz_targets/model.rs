#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Ok(temp) = tempfile::tempdir() else { return };
    let _ = marlinspike_model::fuzz::model(data, temp.path());
});
