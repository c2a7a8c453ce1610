//! The two system calls that move bytes between a file and memory that others may write (rules M1, M4).
//!
//! rustix and the standard library want slices here, which M1 does not allow, so these two come from libc. The kernel
//! does the copying: an address that is no longer mapped is EFAULT, a file that became shorter is a short read.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::memory::{Source, Target};

/// The most that Linux moves in one `read` or `write`: `INT_MAX` rounded down to a page.
pub const MAX_CALL_BYTES: usize = 0x7fff_f000;

/// Reads until `target` is full or the file ends, in calls of at most `max_call_bytes`; the bytes read.
pub fn read_at(fd: BorrowedFd<'_>, target: Target<'_>, offset: u64, max_call_bytes: usize) -> Result<usize, Errno> {
    let mut done = 0;
    while done < target.nbytes() {
        let end = target.nbytes().min(done.saturating_add(max_call_bytes));
        let part = target.slice(done..end);
        let position = file_position(offset, done)?;
        // SAFETY: M1. `part` is valid for writes of its length, and only the kernel writes to it here.
        let moved = unsafe { libc::pread64(fd.as_raw_fd(), part.as_mut_ptr().cast(), part.nbytes(), position) };
        match count(moved) {
            Ok(0) => break,
            Ok(moved) => done += moved,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Writes all of `source`, in calls of at most `max_call_bytes`.
pub fn write_at(fd: BorrowedFd<'_>, source: Source<'_>, offset: u64, max_call_bytes: usize) -> Result<(), Errno> {
    let mut done = 0;
    while done < source.nbytes() {
        let end = source.nbytes().min(done.saturating_add(max_call_bytes));
        let part = source.slice(done..end);
        let position = file_position(offset, done)?;
        // SAFETY: M1. `part` is valid for reads of its length, and only the kernel reads it here.
        let moved = unsafe { libc::pwrite64(fd.as_raw_fd(), part.as_ptr().cast(), part.nbytes(), position) };
        match count(moved) {
            // POSIX has no meaning for this; going on would be an endless loop.
            Ok(0) => return Err(Errno::IO),
            Ok(moved) => done += moved,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn file_position(offset: u64, done: usize) -> Result<i64, Errno> {
    u64::try_from(done)
        .ok()
        .and_then(|done| offset.checked_add(done))
        .and_then(|position| i64::try_from(position).ok())
        .ok_or(Errno::OVERFLOW)
}

fn count(returned: isize) -> Result<usize, Errno> {
    usize::try_from(returned).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn the_loop_moves_every_byte_whatever_a_call_may_move() {
        let bytes: Vec<u8> = (0..=255).cycle().take(10_007).collect();
        for max_call_bytes in [1, 3, 4096, 10_006, 10_007, 10_008, MAX_CALL_BYTES] {
            let file = tempfile::tempfile().unwrap();
            write_at(file.as_fd(), Source::from_slice(&bytes), 5, max_call_bytes).unwrap();
            assert_eq!(file.metadata().unwrap().len(), 10_012);
            let mut back = vec![0; bytes.len()];
            let read = read_at(file.as_fd(), Target::from_slice(&mut back), 5, max_call_bytes).unwrap();
            assert_eq!((read, &back), (bytes.len(), &bytes), "{max_call_bytes}");
        }
    }

    #[test]
    fn the_end_of_the_file_ends_a_read() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abcdef").unwrap();
        let mut target = [9; 8];
        assert_eq!(read_at(file.as_fd(), Target::from_slice(&mut target), 4, 1), Ok(2));
        assert_eq!(&target, b"ef\x09\x09\x09\x09\x09\x09");
        assert_eq!(read_at(file.as_fd(), Target::from_slice(&mut target), 100, 1), Ok(0));
    }

    #[test]
    fn positions_beyond_the_largest_file_are_an_error() {
        let file = tempfile::tempfile().unwrap();
        let mut target = [0; 8];
        for offset in [u64::MAX, u64::MAX - 3, 1 << 63] {
            assert_eq!(read_at(file.as_fd(), Target::from_slice(&mut target), offset, 4), Err(Errno::OVERFLOW));
            assert_eq!(write_at(file.as_fd(), Source::from_slice(&target), offset, 4), Err(Errno::OVERFLOW));
        }
    }

    #[test]
    fn a_refused_call_is_its_errno() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read_only = std::fs::File::open(file.path()).unwrap();
        assert_eq!(write_at(read_only.as_fd(), Source::from_slice(b"x"), 0, 4), Err(Errno::BADF));
    }
}
