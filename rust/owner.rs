//! A sender's identity on this host: a random id, and a lock that ends with its process.
//!
//! The lock is `flock` on a file `mmcopy-<id>.lock`. It lives as long as the open file does, so `kill -9`, a crash and
//! the end of a container all release it, and nobody ever has to guess from a process id, which means something else in
//! another pid namespace. [`crate::sweep`] takes the locks of senders that are gone, and with them their segments.
//!
//! Half of a segment's number is random. In a world-writable directory another user could otherwise make files of all names
//! that come next.
//!
//! A child made by `fork` does not keep the open file (see [`crate::fork`]), so it does not keep the sender alive for
//! others. It owns nothing, and removes nothing.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::cast::Cast;
use crate::entry::{self, Identity};
use crate::fork::{Descriptor, Process};
use crate::memory::Source;
use crate::name::{OwnerId, SegmentName};
use crate::{Error, Result, segment};

/// How often a new id is tried: a collision of 64 random bits, or a sweep that comes between creating and locking.
const ATTEMPTS: usize = 64;
/// How many names are tried for one segment. Of a live sender's next names another user hits one by chance alone.
const NAMES_A_SEGMENT: usize = 8;

/// A live sender. Dropping it closes it.
#[derive(Debug)]
pub struct Owner {
    id: OwnerId,
    shm_dir: PathBuf,
    _lock: Descriptor,
    identity: Identity,
    next: AtomicU32,
    is_forgotten: AtomicBool,
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
                        shm_dir: shm_dir.to_path_buf(),
                        _lock: lock,
                        identity,
                        next: AtomicU32::new(0),
                        is_forgotten: AtomicBool::new(false),
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
        if !self.process.is_current() {
            return Err(Error::Closed { what: format!("segment owner {}", self.id.as_str()) });
        }
        let random = random_bits().map_err(|errno| Error::from_errno(errno, "getrandom", &self.shm_dir, 0))?;
        let count = u64::from(self.next.fetch_add(1, Ordering::Relaxed));
        Ok(self.id.segment_name(count << 32 | random >> 32))
    }

    /// Writes a segment under a new name, as [`segment::write`] does.
    pub fn write(&self, source: Source<'_>, cast: Option<Cast>, num_threads: NonZeroUsize) -> Result<Written> {
        let write = |name: &SegmentName| segment::write(&self.shm_dir, name, source, cast, num_threads);
        let (name, nbytes) = under_a_new_name(|| self.next_name(), write)?;
        let (shm_dir, is_handed_on) = (self.shm_dir.clone(), AtomicBool::new(false));
        Ok(Written { shm_dir, name, nbytes, is_handed_on, process: self.process })
    }

    /// Removes the lock file and lets go of the lock. Segments that nobody has consumed yet stay for their consumers;
    /// a sweep removes them once they are old.
    pub fn close(self) {
        drop(self);
    }

    /// Dropping it closes the descriptor and touches nothing else, as when a process is killed.
    pub fn forget(&self) {
        self.is_forgotten.store(true, Ordering::Relaxed);
    }
}

/// A segment that its sender has written. Dropping it removes it unless it was handed on.
#[derive(Debug)]
pub struct Written {
    shm_dir: PathBuf,
    name: SegmentName,
    nbytes: u64,
    is_handed_on: AtomicBool,
    process: Process,
}

impl Written {
    /// Its name.
    pub const fn name(&self) -> &SegmentName {
        &self.name
    }

    /// Its bytes.
    pub const fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// It is a message's, or another's, from now on.
    pub fn hand_on(&self) {
        self.is_handed_on.store(true, Ordering::Relaxed);
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        if !*self.is_handed_on.get_mut() {
            // Left behind it would be a sweep's work.
            let _ = segment::unlink(&self.shm_dir, &self.name, self.process);
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if !*self.is_forgotten.get_mut() {
            // A lock file that cannot be removed is a dead sender's from now on, and the next sweep's work.
            let _ = entry::remove(&self.id.lock_name().path_in(&self.shm_dir), self.identity, self.process);
        }
    }
}

/// The first name under which there is no file yet, and the bytes written there.
fn under_a_new_name(
    mut next: impl FnMut() -> Result<SegmentName>,
    mut write: impl FnMut(&SegmentName) -> Result<u64>,
) -> Result<(SegmentName, u64)> {
    let mut attempt = 0;
    loop {
        let name = next()?;
        attempt += 1;
        match write(&name) {
            Ok(nbytes) => return Ok((name, nbytes)),
            Err(Error::Exists { .. }) if attempt < NAMES_A_SEGMENT => {}
            Err(error) => return Err(error),
        }
    }
}

/// Creates a file of this name and locks it. `WOULDBLOCK` and `STALE`: a sweep was there first, and has it.
fn lock_new_file(path: &Path) -> std::result::Result<(Descriptor, Identity), Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = Descriptor::new(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
    let identity = Identity::of(&rustix::fs::fstat(&lock)?);
    let locked = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive);
    if locked.is_ok() && entry::is_at(path, identity)? {
        return Ok((lock, identity));
    }
    let _ = entry::remove(path, identity, lock.process());
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
