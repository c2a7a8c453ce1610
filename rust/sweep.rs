//! Removing the segments of senders that are gone.
//!
//! Only the lock of [`crate::owner`] says who is alive. Files that are not ours by name, not regular, or that we may
//! not open are left alone, and any number of sweeps may run at once.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::entry::{self, Identity};
use crate::name::OwnerId;
use crate::{Error, Result};

/// What a sweep removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Names of the segments.
    pub names: Vec<String>,
    /// Their bytes.
    pub nbytes: u64,
}

/// Removes what senders that are gone left in this directory:
///
/// * a lock file that can be locked belonged to a sender that died: its segments go, then the lock file;
/// * a segment of ours without any lock file was sent by a sender that closed properly, and may still be on its way to
///   its consumer: it goes when it was last written more than `orphan_grace` ago.
///
/// Lock files are not counted. What cannot be removed is left for the next sweep. An error means that the directory
/// itself cannot be read.
pub fn sweep(shm_dir: &Path, orphan_grace: Duration) -> Result<Swept> {
    let mut dead = HashMap::new();
    for file_name in file_names(shm_dir)? {
        if let Some(id) = OwnerId::of_lock(&file_name)
            && let Some(lock) = DeadLock::take(shm_dir, &id)
        {
            dead.insert(id, lock);
        }
    }
    // Listed again, because the locks are held only now: a sender that is dead now writes nothing more.
    let mut swept = Swept::default();
    for file_name in file_names(shm_dir)? {
        let Some(id) = OwnerId::of_segment(&file_name) else { continue };
        let path = shm_dir.join(&file_name);
        let Some((_open, found)) = open_regular(&path) else { continue };
        let is_left_behind = dead.contains_key(&id) || is_orphan(shm_dir, &id, &found, orphan_grace);
        if is_left_behind && entry::remove(&path, Identity::of(&found)) == Ok(true) {
            swept.nbytes += u64::try_from(found.st_size).unwrap_or(0);
            swept.names.push(file_name);
        }
    }
    // Last, so that a sweep that is killed half way leaves the lock file for the next one. A segment that could not be
    // removed has no lock file from now on and is an orphan like any other.
    for (id, lock) in dead {
        lock.remove(shm_dir, &id);
    }
    Ok(swept)
}

/// The lock of a sender that died. We hold it, so no other sweep works on this sender.
struct DeadLock {
    _held: OwnedFd,
    identity: Identity,
}

impl DeadLock {
    /// None when the sender is alive, when another sweep was here first, and when we may not touch the file.
    fn take(shm_dir: &Path, id: &OwnerId) -> Option<Self> {
        let path = id.lock_name().path_in(shm_dir);
        let (held, found) = open_regular(&path)?;
        let identity = Identity::of(&found);
        rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive).ok()?;
        entry::is_at(&path, identity).ok()?.then_some(Self { _held: held, identity })
    }

    fn remove(self, shm_dir: &Path, id: &OwnerId) {
        // An error leaves a lock file that nobody holds: the next sweep finds it again.
        let _ = entry::remove(&id.lock_name().path_in(shm_dir), self.identity);
    }
}

/// Whether a segment has no sender any more and is old. A sender has its lock file before its first segment and removes
/// it when it closes, so a lock file that is not there now is not there any more.
fn is_orphan(shm_dir: &Path, id: &OwnerId, segment: &Stat, grace: Duration) -> bool {
    let lock_path = id.lock_name().path_in(shm_dir);
    let seconds = u64::try_from(segment.st_mtime).unwrap_or(0);
    let nanoseconds = u32::try_from(segment.st_mtime_nsec).unwrap_or(0);
    let written = UNIX_EPOCH + Duration::new(seconds, nanoseconds);
    let is_old = SystemTime::now().duration_since(written).is_ok_and(|age| age >= grace);
    is_old && rustix::fs::lstat(&lock_path).err() == Some(Errno::NOENT)
}

fn open_regular(path: &Path) -> Option<(OwnedFd, Stat)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let open = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let found = rustix::fs::fstat(&open).ok()?;
    entry::unusual_kind(&found).is_none().then_some((open, found))
}

fn file_names(shm_dir: &Path) -> Result<Vec<String>> {
    let failed = |error: &std::io::Error| {
        Error::from_errno(Errno::from_io_error(error).unwrap_or(Errno::IO), "listing", shm_dir, 0)
    };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(shm_dir).map_err(|error| failed(&error))? {
        // Our own names are ASCII; what is not UTF-8 is not ours.
        if let Ok(name) = entry.map_err(|error| failed(&error))?.file_name().into_string() {
            names.push(name);
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests;
