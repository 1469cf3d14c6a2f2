//! NVRTC's C interface, loaded from a library that is named at run time.
//!
//! Not cudarc's binding: that one panics where the library is absent, knows only the library
//! names of the CUDA version it was built for, and yields only PTX.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::Path,
    ptr,
};

use super::words;

type Program = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;

/// NVRTC's functions. The pointers stay valid as long as `_library` lives.
pub(crate) struct Library {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    _library: libloading::Library,
    _builtins: Vec<libloading::Library>,
}

/// The result of a compilation.
pub(crate) enum Outcome {
    /// Machine code.
    Cubin(Vec<u8>),
    /// NVRTC's name for the failure and the compiler's log.
    Refused { reason: String, log: String },
}

/// A program handle that is destroyed on every path.
struct Guard<'a> {
    library: &'a Library,
    program: Program,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        // SAFETY: `program` came from `create` and is destroyed only here.
        let _ = unsafe { (self.library.destroy)(&mut self.program) };
    }
}

/// NVRTC opens its companion library by bare name while it compiles. Where NVRTC was named by a
/// path outside the system's folders, that search fails unless the companion is loaded already.
fn load_builtins(path: &Path) -> Vec<libloading::Library> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let Some(Ok(entries)) = folder.map(std::fs::read_dir) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so"))
        // SAFETY: NVRTC's companion library, whose initializers may run on any thread. One that
        // does not load is left to NVRTC, which then names it in its log.
        .filter_map(|entry| unsafe { libloading::Library::new(entry.path()) }.ok())
        .collect()
}

impl Library {
    /// Loads the library; the error is the loader's reason or names the absent symbol.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let builtins = load_builtins(path);
        // SAFETY: loading runs the library's initializers; NVRTC's may run on any thread. A caller
        // who names another library runs that library's initializers, as with LD_PRELOAD.
        let library =
            unsafe { libloading::Library::new(path.as_os_str()) }.map_err(|e| words(&e))?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the field's type is the signature that nvrtc.h documents for this name,
                // unchanged since CUDA 11.2; the pointer is kept no longer than the library.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.map_err(|e| words(&e))?
            };
        }
        Ok(Self {
            create: symbol!("nvrtcCreateProgram"),
            destroy: symbol!("nvrtcDestroyProgram"),
            compile: symbol!("nvrtcCompileProgram"),
            cubin_size: symbol!("nvrtcGetCUBINSize"),
            cubin: symbol!("nvrtcGetCUBIN"),
            log_size: symbol!("nvrtcGetProgramLogSize"),
            log: symbol!("nvrtcGetProgramLog"),
            version: symbol!("nvrtcVersion"),
            error_string: symbol!("nvrtcGetErrorString"),
            _library: library,
            _builtins: builtins,
        })
    }

    /// The library's version (major, minor).
    pub(crate) fn version(&self) -> Result<(c_int, c_int), String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live integers.
        let status = unsafe { (self.version)(&mut major, &mut minor) };
        if status == SUCCESS { Ok((major, minor)) } else { Err(self.name_of(status)) }
    }

    /// Compiles one source to machine code.
    pub(crate) fn compile(&self, name: &str, text: &str, options: &[String]) -> Outcome {
        let refused = |reason: String| Outcome::Refused { reason, log: String::new() };
        let strings = CString::new(name).and_then(|name| {
            let options: Result<Vec<_>, _> =
                options.iter().map(|option| CString::new(option.as_str())).collect();
            Ok((name, CString::new(text)?, options?))
        });
        let Ok((name, text, options)) = strings else {
            return refused("a NUL byte in the source or an option".into());
        };
        let Ok(count) = c_int::try_from(options.len()) else {
            return refused("too many options".into());
        };

        let mut program: Program = ptr::null_mut();
        // SAFETY: `text` and `name` are NUL-terminated and outlive the program, which `guard`
        // destroys before they are dropped (it is declared after them); no headers are given.
        let status = unsafe {
            (self.create)(&mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        if status != SUCCESS {
            return refused(self.name_of(status));
        }
        let guard = Guard { library: self, program };

        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: a live program, and `count` pointers to NUL-terminated strings.
        let status = unsafe { (self.compile)(guard.program, count, pointers.as_ptr()) };
        if status != SUCCESS {
            let log = self.read(&guard, self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_string();
            return Outcome::Refused { reason: self.name_of(status), log };
        }
        match self.read(&guard, self.cubin_size, self.cubin) {
            Ok(cubin) => Outcome::Cubin(cubin),
            Err(status) => refused(self.name_of(status)),
        }
    }

    /// Reads one of the program's outputs: first its size, then its bytes.
    fn read(
        &self,
        guard: &Guard<'_>,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, Status> {
        let mut bytes = 0usize;
        // SAFETY: a live program and a pointer to a live integer.
        let status = unsafe { size(guard.program, &mut bytes) };
        if status != SUCCESS {
            return Err(status);
        }
        let mut buffer = vec![0u8; bytes];
        // SAFETY: a live program and a buffer of exactly the size that it asked for.
        let status = unsafe { fill(guard.program, buffer.as_mut_ptr().cast()) };
        if status == SUCCESS { Ok(buffer) } else { Err(status) }
    }

    fn name_of(&self, status: Status) -> String {
        // SAFETY: takes any integer; returns null or a static NUL-terminated string.
        let text = unsafe { (self.error_string)(status) };
        if text.is_null() {
            return format!("NVRTC status {status}");
        }
        // SAFETY: not null, so the static string above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
