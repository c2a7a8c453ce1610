//! Memory that others may write while we look at it: a pointer and a length, never a slice (rule M1).
//!
//! [`Source`] and [`Target`] are the only types through which the crate touches a caller's bytes. They are checked
//! views: a sub-range is checked against the length, and the few functions that move bytes are all in this file.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;

/// Numbers of which every bit pattern is valid, so that racing writers can give a wrong value and nothing worse.
pub trait Plain: Copy + Default + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! plain {
    ($($number:ty),*) => { $(impl sealed::Sealed for $number {} impl Plain for $number {})* };
}
plain!(u8, u16, u32, f32);

/// Bytes to read.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    start: *const u8,
    nbytes: usize,
    keeps: PhantomData<&'a ()>,
}

/// Bytes to write. Copies of one `Target` name the same bytes: whoever divides a target among threads gives each its
/// own range, as `copy` and `cast` do.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    start: *mut u8,
    nbytes: usize,
    keeps: PhantomData<&'a ()>,
}

// SAFETY: M1. A Source is an address and a length; what is done with it from several threads is a copy out of memory
// that may be written at any time anyway.
unsafe impl Send for Source<'_> {}
// SAFETY: M1, as for Send.
unsafe impl Sync for Source<'_> {}
// SAFETY: M1. A Target is an address and a length; two threads that write one range give wrong data, not a wrong
// length or pointer.
unsafe impl Send for Target<'_> {}
// SAFETY: M1, as for Send.
unsafe impl Sync for Target<'_> {}

impl<'a> Source<'a> {
    /// Views memory that others may write.
    ///
    /// # Safety
    ///
    /// * `start` is valid for reads of `nbytes` bytes for all of `'a`, or `nbytes` is 0.
    /// * `nbytes` is at most `isize::MAX`.
    pub const unsafe fn from_raw(start: *const u8, nbytes: usize) -> Self {
        Self { start, nbytes, keeps: PhantomData }
    }

    /// Views bytes of our own.
    pub const fn from_slice(bytes: &'a [u8]) -> Self {
        Self { start: bytes.as_ptr(), nbytes: bytes.len(), keeps: PhantomData }
    }

    /// Length.
    pub const fn nbytes(self) -> usize {
        self.nbytes
    }

    /// Address of the first byte.
    pub const fn as_ptr(self) -> *const u8 {
        self.start
    }

    /// A part of it.
    ///
    /// # Panics
    ///
    /// When the range is not inside.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        inside(&range, self.nbytes);
        // SAFETY: `start` is inside one allocation of `nbytes` bytes and the range was just checked against it.
        let start = unsafe { self.start.add(range.start) };
        Self { start, nbytes: range.len(), keeps: PhantomData }
    }

    /// The same bytes, for a [`crate::pool::Job`], whose threads know no lifetime.
    ///
    /// # Safety
    ///
    /// * The memory stays valid for reads until the last use of what is returned, which for a job is its end (M5).
    pub const unsafe fn lasting(self) -> Source<'static> {
        Source { start: self.start, nbytes: self.nbytes, keeps: PhantomData }
    }

    /// Copies all of it to a target of the same length. The two may overlap.
    ///
    /// # Panics
    ///
    /// When the lengths differ.
    pub fn copy_to(self, target: Target<'_>) {
        assert_eq!(self.nbytes, target.nbytes, "source and target differ in length");
        if self.nbytes > 0 {
            // SAFETY: M1. Both are valid for `nbytes` bytes, bytes need no alignment, and `copy` allows an overlap.
            unsafe { ptr::copy(self.start, target.start, self.nbytes) }
        }
    }

    /// Copies `numbers.len()` numbers out, beginning `at` bytes after the start. No alignment is asked for.
    ///
    /// # Panics
    ///
    /// When the range is not inside.
    pub fn load<T: Plain>(self, at: usize, numbers: &mut [T]) {
        let nbytes = size_of_val(numbers);
        let part = self.slice(at..at + nbytes);
        // SAFETY: M1. `part` was checked to have these bytes, `numbers` is ours alone and so does not overlap, and
        // every bit pattern is a valid T.
        unsafe { ptr::copy_nonoverlapping(part.start, numbers.as_mut_ptr().cast::<u8>(), nbytes) }
    }

    /// Whether a byte is in both.
    pub fn overlaps(self, target: Target<'_>) -> bool {
        let (ours, theirs) = (self.start.addr(), target.start.addr());
        self.nbytes > 0 && target.nbytes > 0 && ours < theirs + target.nbytes && theirs < ours + self.nbytes
    }
}

impl<'a> Target<'a> {
    /// Views memory that others may read and write.
    ///
    /// # Safety
    ///
    /// * `start` is valid for writes of `nbytes` bytes for all of `'a`, or `nbytes` is 0.
    /// * No Rust reference to these bytes is used during `'a`.
    /// * `nbytes` is at most `isize::MAX`.
    pub const unsafe fn from_raw(start: *mut u8, nbytes: usize) -> Self {
        Self { start, nbytes, keeps: PhantomData }
    }

    /// Views bytes of our own.
    pub const fn from_slice(bytes: &'a mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), nbytes: bytes.len(), keeps: PhantomData }
    }

    /// Length.
    pub const fn nbytes(self) -> usize {
        self.nbytes
    }

    /// Address of the first byte.
    pub const fn as_mut_ptr(self) -> *mut u8 {
        self.start
    }

    /// A part of it.
    ///
    /// # Panics
    ///
    /// When the range is not inside.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        inside(&range, self.nbytes);
        // SAFETY: `start` is inside one allocation of `nbytes` bytes and the range was just checked against it.
        let start = unsafe { self.start.add(range.start) };
        Self { start, nbytes: range.len(), keeps: PhantomData }
    }

    /// The same bytes, for a [`crate::pool::Job`], whose threads know no lifetime.
    ///
    /// # Safety
    ///
    /// * The memory stays valid for writes, and no Rust reference to it is used, until the last use of what is
    ///   returned, which for a job is its end (M5).
    pub const unsafe fn lasting(self) -> Target<'static> {
        Target { start: self.start, nbytes: self.nbytes, keeps: PhantomData }
    }

    /// Copies the numbers in, beginning `at` bytes after the start. No alignment is asked for.
    ///
    /// # Panics
    ///
    /// When the range is not inside.
    pub fn store<T: Plain>(self, at: usize, numbers: &[T]) {
        let nbytes = size_of_val(numbers);
        let part = self.slice(at..at + nbytes);
        // SAFETY: M1. `part` was checked to have these bytes; `numbers` is ours alone and so does not overlap.
        unsafe { ptr::copy_nonoverlapping(numbers.as_ptr().cast::<u8>(), part.start, nbytes) }
    }
}

fn inside(range: &Range<usize>, nbytes: usize) {
    assert!(
        range.start <= range.end && range.end <= nbytes,
        "range {}..{} is not inside {nbytes} bytes",
        range.start,
        range.end
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_checked() {
        let bytes = [1_u8, 2, 3, 4];
        let source = Source::from_slice(&bytes);
        assert_eq!(source.slice(1..3).nbytes(), 2);
        assert_eq!(source.slice(4..4).nbytes(), 0);
        for (start, end) in [(0, 5), (3, 2), (5, 5), (0, usize::MAX)] {
            assert!(std::panic::catch_unwind(|| source.slice(start..end)).is_err(), "{start}..{end}");
        }
    }

    #[test]
    fn numbers_move_without_alignment() {
        let bytes = [0_u8, 1, 2, 3, 4, 5, 6, 7];
        let mut numbers = [0_u16; 3];
        Source::from_slice(&bytes).load(1, &mut numbers);
        assert_eq!(numbers, [0x0201, 0x0403, 0x0605]);
        let mut back = [9_u8; 8];
        Target::from_slice(&mut back).store(1, &numbers);
        assert_eq!(back, [9, 1, 2, 3, 4, 5, 6, 9]);
    }

    #[test]
    fn overlap_is_seen_from_both_sides() {
        let mut bytes = [0_u8; 16];
        let target = Target::from_slice(&mut bytes);
        // SAFETY: the same 16 bytes, of which no reference is used while the views are.
        let source = unsafe { Source::from_raw(target.as_mut_ptr(), 16) };
        assert!(source.slice(0..8).overlaps(target.slice(7..16)));
        assert!(source.slice(7..16).overlaps(target.slice(0..8)));
        assert!(!source.slice(0..8).overlaps(target.slice(8..16)));
        assert!(!source.slice(8..8).overlaps(target.slice(0..16)));
    }
}
