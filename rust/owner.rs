//! A sender's identity on this host: a random id, and a lock that ends with its process.
//!
//! The lock is `flock` on a file `mmcopy-<id>.lock`. It lives as long as the open file does, so `kill -9`, a crash and
//! the end of a container all release it, and nobody ever has to guess from a process id, which means something else in
//! another pid namespace. [`crate::sweep`] takes the locks of senders that are gone, and with them their segments.
//!
//! A child made by `fork` shares the open file and with it the lock. It owns nothing: there `close` and dropping only
//! close its copy of the descriptor. A child that keeps it open keeps the sender alive for others, so it should call
//! [`Owner::forget`] at once.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fork::Process;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::entry::{self, Identity};
use crate::name::{OwnerId, SegmentName};
use crate::{Error, Result};

/// How often a new id is tried: a collision of 64 random bits, or a sweep that comes between creating and locking.
const ATTEMPTS: usize = 64;

/// A live sender. Dropping it closes it.
#[derive(Debug)]
pub struct Owner {
    id: OwnerId,
    lock_path: PathBuf,
    _lock: OwnedFd,
    identity: Identity,
    next: AtomicU64,
    process: Process,
}

impl Owner {
    /// Creates and locks the lock file in this directory.
    pub fn create(shm_dir: &Path) -> Result<Self> {
        let mut last = Errno::EXIST;
        for _ in 0..ATTEMPTS {
            let id =
                OwnerId::from_bits(random_bits().map_err(|errno| Error::from_errno(errno, "getrandom", shm_dir, 0))?);
            let lock_path = id.lock_name().path_in(shm_dir);
            match lock_new_file(&lock_path) {
                Ok((lock, identity)) => {
                    return Ok(Self {
                        id,
                        lock_path,
                        _lock: lock,
                        identity,
                        next: AtomicU64::new(0),
                        process: Process::current(),
                    });
                }
                Err(errno @ (Errno::EXIST | Errno::WOULDBLOCK | Errno::STALE)) => last = errno,
                Err(errno) => return Err(Error::from_errno(errno, "creating a lock file", &lock_path, 0)),
            }
        }
        Err(Error::from_errno(last, "creating a lock file", shm_dir, 0))
    }

    /// The random part of this sender's names.
    pub const fn id(&self) -> &OwnerId {
        &self.id
    }

    /// A name that was never used before.
    pub fn next_name(&self) -> Result<SegmentName> {
        if self.is_inherited() {
            return Err(Error::Closed { what: format!("segment owner {}", self.id.as_str()) });
        }
        Ok(self.id.segment_name(self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// Removes the lock file and lets go of the lock. Segments that nobody has consumed yet stay for their consumers;
    /// a sweep removes them once they are old.
    pub fn close(self) {
        drop(self);
    }

    /// Closes the descriptor and touches nothing else: for a child after `fork`, or to die like a killed process.
    pub fn forget(self) {
        let mut kept_file = self;
        kept_file.lock_path = PathBuf::new();
    }

    fn is_inherited(&self) -> bool {
        !self.process.is_current()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.lock_path.as_os_str().is_empty() || self.is_inherited() {
            return;
        }
        // A lock file that cannot be removed is a dead sender's from now on, and the next sweep's work.
        let _ = entry::remove(&self.lock_path, self.identity);
    }
}

/// Creates a file of this name and locks it. `WOULDBLOCK` and `STALE`: a sweep was there first, and has it.
fn lock_new_file(path: &Path) -> std::result::Result<(OwnedFd, Identity), Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
    let identity = Identity::of(&rustix::fs::fstat(&lock)?);
    let locked = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
    if locked.is_ok() && entry::is_at(path, identity)? {
        return Ok((lock, identity));
    }
    let _ = entry::remove(path, identity);
    Err(locked.err().unwrap_or(Errno::STALE))
}

pub(crate) fn random_bits() -> std::result::Result<u64, Errno> {
    let mut bytes = [0_u8; 8];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests;
