//! A shared mapping of a memfd (M1): a pointer and a length, read and written by copies and by atomic words.
#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::fork::Region;
use crate::memory::{Source, Target};

/// Whether we may write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

/// A mapped file. It stays mapped until this is dropped, whoever truncates or closes the file; that it cannot become
/// shorter is the seal's work. In a forked child there are zeros in its place.
#[derive(Debug)]
pub(super) struct Mapping {
    start: *mut u8,
    nbytes: usize,
    access: Access,
    region: Region,
}

// SAFETY: M1. A mapping is an address and a length; what is done with it from several threads are copies and atomic
// operations on memory that other processes use at the same time anyway.
unsafe impl Send for Mapping {}
// SAFETY: M1, as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `nbytes` bytes, of which there is at least one.
    pub(super) fn new(file: impl AsFd, nbytes: usize, access: Access) -> Result<Self, Errno> {
        if nbytes == 0 || isize::try_from(nbytes).is_err() {
            return Err(Errno::INVAL);
        }
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: no address is asked for, so nothing that is mapped already is touched.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), nbytes, protection, MapFlags::SHARED, file, 0) }?;
        // SAFETY: it was just mapped, and is unmapped only by `drop`.
        let region = unsafe { Region::new(start.cast(), nbytes) };
        Ok(Self { start: start.cast(), nbytes, access, region })
    }

    pub(super) const fn nbytes(&self) -> usize {
        self.nbytes
    }

    pub(super) fn address(&self) -> usize {
        self.start.expose_provenance()
    }

    /// All of it, to read.
    pub(super) fn source(&self) -> Source<'_> {
        // SAFETY: M1. These bytes are mapped while `self` lives, and at most isize::MAX.
        unsafe { Source::from_raw(self.start, self.nbytes) }
    }

    /// All of it, to write.
    ///
    /// # Panics
    ///
    /// When it was mapped to be read.
    pub(super) fn target(&self) -> Target<'_> {
        assert_eq!(self.access, Access::ReadWrite, "mapped to be read");
        // SAFETY: M1. As for `source`, mapped writable, and there is no reference to these bytes but to atomics.
        unsafe { Target::from_raw(self.start, self.nbytes) }
    }

    /// A word at this offset, which is a multiple of 4. In a mapping to be read it may only be loaded.
    pub(super) fn word32(&self, at: usize) -> &AtomicU32 {
        let place = self.place(at, 4).cast();
        // SAFETY: M1. It is mapped while `self` lives, aligned, and touched by atomic operations and, from a GPU or
        // another process, by whole-word stores.
        unsafe { AtomicU32::from_ptr(place) }
    }

    /// A word at this offset, which is a multiple of 8. In a mapping to be read it may only be loaded.
    pub(super) fn word64(&self, at: usize) -> &AtomicU64 {
        let place = self.place(at, 8).cast();
        // SAFETY: M1. As for `word32`.
        unsafe { AtomicU64::from_ptr(place) }
    }

    /// Advises the kernel on a range of whole pages.
    pub(super) fn advise(&self, start: usize, nbytes: usize, advice: Advice) -> Result<(), Errno> {
        let place = self.place(start, nbytes);
        // SAFETY: the range is mapped, and none of the advices used here (huge pages, populating) changes contents.
        unsafe { rustix::mm::madvise(place.cast(), nbytes, advice) }
    }

    fn place(&self, at: usize, nbytes: usize) -> *mut u8 {
        let end = at.checked_add(nbytes);
        assert!(end.is_some_and(|end| end <= self.nbytes), "{nbytes} bytes at {at} are not inside {}", self.nbytes);
        assert!(nbytes > 8 || at.is_multiple_of(nbytes.max(1)), "{at} is no multiple of {nbytes}");
        // SAFETY: just checked to be inside the mapping.
        unsafe { self.start.add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.region.end() {
            // SAFETY: it was mapped by `new` with this length, and every view borrows `self`.
            let unmapped = unsafe { rustix::mm::munmap(self.start.cast(), self.nbytes) };
            debug_assert_eq!(unmapped, Ok(()));
        }
    }
}
