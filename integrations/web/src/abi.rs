//! The functions that the page calls in WebAssembly.
//!
//! A call writes its input at [`input`]'s address, calls a function, and reads the answer at
//! [`output`]'s address; the function returns the answer's length in bytes. WebAssembly here has one
//! thread, so the buffers are one pair.
#![allow(unsafe_code)] // `no_mangle` alone: the names are this module's, and no block is unsafe.

use std::cell::RefCell;

use crate::requests;

thread_local! {
    static INPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static OUTPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Makes room for an input of `len` bytes and returns its address.
#[unsafe(no_mangle)]
pub extern "C" fn input(len: usize) -> *mut u8 {
    INPUT.with_borrow_mut(|input| {
        *input = vec![0; len];
        input.as_mut_ptr()
    })
}

/// The address of the last answer.
#[unsafe(no_mangle)]
pub extern "C" fn output() -> *const u8 {
    OUTPUT.with_borrow(|output| output.as_ptr())
}

/// Stores an answer and returns its length.
fn answer(text: String) -> usize {
    OUTPUT.with_borrow_mut(|output| *output = text.into_bytes());
    OUTPUT.with_borrow(Vec::len)
}

/// [`requests::check`] of the input: a file's name of `name` bytes, then the file.
#[unsafe(no_mangle)]
pub extern "C" fn check(name: usize) -> usize {
    let input = INPUT.take();
    let (name, file) = input.split_at(name.min(input.len()));
    answer(requests::check(&String::from_utf8_lossy(name), file))
}

/// [`requests::MAX_FILE`].
#[unsafe(no_mangle)]
pub extern "C" fn max_file() -> usize {
    requests::MAX_FILE
}

/// [`requests::layouts`].
#[unsafe(no_mangle)]
pub extern "C" fn layouts() -> usize {
    answer(requests::layouts())
}

/// [`requests::positions`] of the JSON in the input.
#[unsafe(no_mangle)]
pub extern "C" fn positions() -> usize {
    INPUT.with_borrow(|input| answer(requests::positions(&String::from_utf8_lossy(input))))
}
