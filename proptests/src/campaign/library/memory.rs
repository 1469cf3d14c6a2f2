//! Memory between inaccessible pages.

use std::ffi::c_void;

/// Fill pattern around tensors.
const CANARY: u8 = 0xc3;
/// Alignment of tensors, in bytes: what vector loads need.
const ALIGNMENT: usize = 16;

/// Pages between two inaccessible guard pages.
pub(super) struct Guarded {
    base: *mut c_void,
    mapped: usize,
    /// From the first accessible byte.
    offset: usize,
    accessible: usize,
    len: usize,
}

impl Guarded {
    pub(super) fn new(len: usize) -> std::io::Result<Self> {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
        let page = rustix::param::page_size();
        let accessible = len.max(1).next_multiple_of(page);
        let mapped = accessible + 2 * page;
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping at an address that the system chooses overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, flags, MapFlags::PRIVATE)?
        };
        let offset = (accessible - len) / ALIGNMENT * ALIGNMENT;
        let guarded = Self { base, mapped, offset, accessible, len };
        for at in [0, mapped - page] {
            // SAFETY: both pages lie inside the mapping, and nothing refers to them.
            unsafe {
                rustix::mm::mprotect(base.byte_add(at), page, MprotectFlags::empty())?;
            }
        }
        guarded.pages().fill(CANARY);
        Ok(guarded)
    }

    fn first(&self) -> *mut u8 {
        // SAFETY: the first page is inside the mapping, and the accessible ones follow it.
        unsafe { self.base.cast::<u8>().add(rustix::param::page_size()) }
    }

    /// The accessible bytes: the tensor and what lies around it.
    #[expect(clippy::mut_from_ref, reason = "the memory is the mapping's, not the struct's")]
    fn pages(&self) -> &mut [u8] {
        // SAFETY: `accessible` bytes from `first` are mapped, readable and writable until
        // `protect`; callers hold one slice at a time and none while the kernel runs.
        unsafe { std::slice::from_raw_parts_mut(self.first(), self.accessible) }
    }

    pub(super) fn data(&self) -> &[u8] {
        &self.pages()[self.offset..self.offset + self.len]
    }

    pub(super) fn fill(&self, with: impl Fn(&mut [u8])) {
        with(&mut self.pages()[self.offset..self.offset + self.len]);
    }

    /// Makes the bytes read-only; [`Guarded::fill`] must not follow.
    pub(super) fn protect(&self) -> std::io::Result<()> {
        // SAFETY: the range is the accessible part of the mapping, and no slice of it is alive.
        unsafe {
            let flags = rustix::mm::MprotectFlags::READ;
            rustix::mm::mprotect(self.first().cast(), self.accessible, flags)?;
        }
        Ok(())
    }

    /// Where the bytes around the tensor were overwritten, from the tensor's start.
    pub(super) fn overwritten(&self) -> Option<isize> {
        let at = |&(_, byte): &(usize, &u8)| *byte != CANARY;
        let outside = |&(i, _): &(usize, &u8)| i < self.offset || i >= self.offset + self.len;
        let (i, _) = self.pages().iter().enumerate().filter(outside).find(at)?;
        Some(i as isize - self.offset as isize)
    }
}

impl Guarded {
    /// Bytes of the tensor.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address of the tensor.
    pub(super) fn address(&self) -> *mut c_void {
        // SAFETY: `offset` is at most `accessible`, so the address is inside the mapping.
        unsafe { self.first().add(self.offset).cast() }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: `base` and `mapped` are those of the mapping, which nothing refers to any more.
        let _ = unsafe { rustix::mm::munmap(self.base, self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_around_a_tensor_are_watched() {
        for len in [0, 1, 20, 4096, 4100] {
            let memory = Guarded::new(len).unwrap();
            memory.fill(|data| data.fill(0));
            assert_eq!(memory.overwritten(), None, "{len}");
            let (start, end) = (memory.offset, memory.offset + len);
            assert!(memory.accessible - end < ALIGNMENT && start.is_multiple_of(ALIGNMENT));
            if end < memory.accessible {
                memory.pages()[end] = 0;
                assert_eq!(memory.overwritten(), Some(len as isize));
                memory.pages()[end] = CANARY;
            }
            if start > 0 {
                memory.pages()[start - 1] = 0;
                assert_eq!(memory.overwritten(), Some(-1));
            }
        }
    }
}
