#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = marlinspike_model::fuzz::input(data);
});
