//! Removing the segments of senders that are gone.
//!
//! Only the lock of [`crate::owner`] says who is alive, and only of files of the same user: anybody may create a file
//! in a world-writable directory. Files that are not ours by name or by user, or not regular, are left alone (root
//! clears up after every user). Any number of sweeps may run at once, and each holds two descriptors at most.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::entry::{self, Identity};
use crate::fork::{Descriptor, Process};
use crate::name::OwnerId;
use crate::{Error, Result};

/// What a sweep removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Names of the segments.
    pub names: Vec<String>,
    /// Their bytes.
    pub nbytes: u64,
    /// Why files that should have gone are still there.
    pub failures: Vec<Error>,
}

/// Removes what senders that are gone left in this directory:
///
/// * a lock file that can be locked belonged to a sender that died: its segments go, then the lock file;
/// * a segment of ours without any lock file was sent by a sender that closed properly, and may still be on its way to
///   its consumer: it goes when it was last written more than `orphan_grace` ago.
///
/// A lock file of another user than the segment's counts as none. Lock files are not counted. What cannot be removed is
/// left for the next sweep. An error means that the directory itself cannot be read.
pub fn sweep(shm_dir: &Path, orphan_grace: Duration) -> Result<Swept> {
    let mut swept = Swept::default();
    for (id, names) in list(shm_dir)? {
        // Looked at behind the listing: a sender has its lock file before its first segment, so one without a lock file
        // by now writes nothing more.
        let lock = match Lock::look(shm_dir, &id) {
            Ok(lock) => lock,
            Err(error) => {
                swept.failures.push(error);
                continue;
            }
        };
        for name in names {
            match remove_segment(&shm_dir.join(&name), lock.as_ref(), orphan_grace) {
                Ok(Some(nbytes)) => {
                    swept.nbytes += nbytes;
                    swept.names.push(name);
                }
                Ok(None) => {}
                Err(error) => swept.failures.push(error),
            }
        }
        // Last, so that a sweep that is killed half way leaves the lock file for the next one. A segment that could not
        // be removed, or was written behind the listing, has no lock file from now on and is an orphan like any other.
        if let Some(error) = lock.and_then(|lock| lock.remove_if_dead(shm_dir, &id).err()) {
            swept.failures.push(error);
        }
    }
    Ok(swept)
}

/// A sender's lock file.
struct Lock {
    uid: u32,
    /// We hold it: its sender died, and no other sweep works on what that left.
    dead: Option<(Descriptor, Identity)>,
}

impl Lock {
    /// None when there is no such file. Another user's is not opened.
    fn look(shm_dir: &Path, id: &OwnerId) -> Result<Option<Self>> {
        let path = id.lock_name().path_in(shm_dir);
        let Some(found) = regular(&path)? else { return Ok(None) };
        let mut lock = Self { uid: found.st_uid, dead: None };
        if !is_ours(found.st_uid) {
            return Ok(Some(lock));
        }
        let Some((held, identity)) = open(&path, &found)? else { return Ok(None) };
        let failed = |errno, operation| Error::from_errno(errno, operation, &path, 0);
        match rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Some(lock)),
            Err(errno) => return Err(failed(errno, "flock")),
        }
        // Else another sweep was here first.
        if !entry::is_at(&path, identity).map_err(|errno| failed(errno, "lstat"))? {
            return Ok(None);
        }
        lock.dead = Some((held, identity));
        Ok(Some(lock))
    }

    fn remove_if_dead(self, shm_dir: &Path, id: &OwnerId) -> Result<()> {
        let Some((_held, identity)) = self.dead else { return Ok(()) };
        let path = id.lock_name().path_in(shm_dir);
        entry::remove(&path, identity, Process::current()).map(|_| ())
    }
}

/// Its bytes when it was left behind and is gone now.
fn remove_segment(path: &Path, lock: Option<&Lock>, orphan_grace: Duration) -> Result<Option<u64>> {
    let Some(found) = regular(path)?.filter(|found| is_ours(found.st_uid)) else { return Ok(None) };
    let is_left_behind = match lock.filter(|lock| lock.uid == found.st_uid) {
        Some(lock) => lock.dead.is_some(),
        None => is_old(&found, orphan_grace),
    };
    if !is_left_behind {
        return Ok(None);
    }
    let Some((_open, identity)) = open(path, &found)? else { return Ok(None) };
    let is_removed = entry::remove(path, identity, Process::current())?;
    Ok(is_removed.then(|| u64::try_from(found.st_size).unwrap_or(0)))
}

fn is_old(segment: &Stat, grace: Duration) -> bool {
    let seconds = u64::try_from(segment.st_mtime).unwrap_or(0);
    let nanoseconds = u32::try_from(segment.st_mtime_nsec).unwrap_or(0);
    let written = UNIX_EPOCH + Duration::new(seconds, nanoseconds);
    SystemTime::now().duration_since(written).is_ok_and(|age| age >= grace)
}

fn is_ours(uid: u32) -> bool {
    let euid = rustix::process::geteuid();
    euid.is_root() || euid.as_raw() == uid
}

/// What a regular file is; None for anything else, and when there is nothing.
fn regular(path: &Path) -> Result<Option<Stat>> {
    match rustix::fs::lstat(path) {
        Ok(found) => Ok(entry::unusual_kind(&found).is_none().then_some(found)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(Error::from_errno(errno, "lstat", path, 0)),
    }
}

/// Opens the file that was found here, so that its inode number is given to no other file meanwhile. None when it has
/// gone.
fn open(path: &Path, found: &Stat) -> Result<Option<(Descriptor, Identity)>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let failed = |operation| move |errno| Error::from_errno(errno, operation, path, 0);
    let open = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(open) => Descriptor::new(open),
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(failed("open")(errno)),
    };
    let identity = Identity::of(&rustix::fs::fstat(&open).map_err(failed("fstat"))?);
    Ok((identity == Identity::of(found)).then_some((open, identity)))
}

/// The senders that have files here, of users whom we clear up after, each with the names of its segments. The memory that
/// this takes does not grow with files of others.
fn list(shm_dir: &Path) -> Result<HashMap<OwnerId, Vec<String>>> {
    let failed = |error: &std::io::Error| {
        Error::from_errno(Errno::from_io_error(error).unwrap_or(Errno::IO), "listing", shm_dir, 0)
    };
    let mut found: HashMap<OwnerId, Vec<String>> = HashMap::new();
    for entry in std::fs::read_dir(shm_dir).map_err(|error| failed(&error))? {
        // Our own names are ASCII; what is not UTF-8 is not ours.
        let Ok(name) = entry.map_err(|error| failed(&error))?.file_name().into_string() else { continue };
        let (lock_of, segment_of) = (OwnerId::of_lock(&name), OwnerId::of_segment(&name));
        let is_segment = segment_of.is_some();
        let Some(id) = lock_of.or(segment_of) else { continue };
        if rustix::fs::lstat(shm_dir.join(&name)).is_ok_and(|found| is_ours(found.st_uid)) {
            let names = found.entry(id).or_default();
            if is_segment {
                names.push(name);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
