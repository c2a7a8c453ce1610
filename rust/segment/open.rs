//! The consumer's side: open, check, read, remove.

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::entry::{self, Identity};
use crate::fork::{Descriptor, Process};
use crate::memory::Target;
use crate::name::SegmentName;
use crate::transfer;
use crate::workers::Plan;
use crate::{Error, Result};

/// An open segment. Dropping it closes the file and leaves the name. A forked child has no part in it.
#[derive(Debug)]
pub struct Segment {
    name: SegmentName,
    path: PathBuf,
    file: Descriptor,
    identity: Identity,
    file_nbytes: u64,
    uid: u32,
    is_unlinked: Mutex<bool>,
}

impl Segment {
    /// Opens a segment for reading. Never blocks, also not on a FIFO; anything but a regular file is refused and left
    /// alone, a symbolic link is not followed.
    pub fn open(shm_dir: &Path, name: &SegmentName) -> Result<Self> {
        let path = name.path_in(shm_dir);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| refused(errno, &path))?;
        let file = Descriptor::new(file);
        let found = rustix::fs::fstat(&file).map_err(|errno| Error::from_errno(errno, "fstat", &path, 0))?;
        if let Some(kind) = entry::unusual_kind(&found) {
            return Err(unusual(&path, &found, kind));
        }
        Ok(Self {
            name: name.clone(),
            path,
            file,
            identity: Identity::of(&found),
            // fstat gives no regular file a negative size.
            file_nbytes: u64::try_from(found.st_size).unwrap_or(0),
            uid: found.st_uid,
            is_unlinked: Mutex::new(false),
        })
    }

    /// Its name.
    pub const fn name(&self) -> &SegmentName {
        &self.name
    }

    /// Bytes of the file when it was opened.
    pub const fn file_nbytes(&self) -> u64 {
        self.file_nbytes
    }

    /// User id of its owner.
    pub const fn uid(&self) -> u32 {
        self.uid
    }

    /// Fails unless the range is inside the file as it was opened (M2).
    pub fn check(&self, offset: u64, nbytes: u64) -> Result<()> {
        match offset.checked_add(nbytes) {
            Some(end) if end <= self.file_nbytes => Ok(()),
            _ => Err(Error::Size {
                name: self.name.to_string(),
                offset,
                wanted_nbytes: nbytes,
                file_nbytes: self.file_nbytes,
            }),
        }
    }

    /// Fills `target` from `offset` on. Blocks until all bytes are there. After an error the target holds anything.
    pub fn read_into(&self, target: Target<'_>, offset: u64, num_threads: NonZeroUsize) -> Result<()> {
        if !self.file.is_here() {
            return Err(Error::Closed { what: format!("segment {:?}", self.name.as_str()) });
        }
        let wanted_nbytes = target.nbytes() as u64;
        self.check(offset, wanted_nbytes)?;
        let plan = Plan::new(target.nbytes(), NonZeroUsize::MIN, num_threads);
        plan.run(|range| {
            let part = target.slice(range.clone());
            // No overflow: check() has added more to this offset.
            let from = offset + range.start as u64;
            let read = transfer::read_at(self.file.as_fd(), part, from, transfer::MAX_CALL_BYTES)
                .map_err(|errno| Error::from_errno(errno, "pread", &self.path, wanted_nbytes))?;
            if read == range.len() { Ok(()) } else { Err(self.truncated(offset, wanted_nbytes, from + read as u64)) }
        })
    }

    /// Removes the name, once, and only while it still names this very file. True when this call removed it; false when
    /// it was removed before, by us or by anybody. What is open can still be read.
    pub fn unlink(&self) -> Result<bool> {
        let mut is_unlinked = self.is_unlinked.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_unlinked {
            return Ok(false);
        }
        let removed = entry::remove(&self.path, self.identity, self.file.process())?;
        *is_unlinked = true;
        Ok(removed)
    }

    fn truncated(&self, offset: u64, wanted_nbytes: u64, seen_end: u64) -> Error {
        // Several threads see several ends; the file knows best, unless it has grown again meanwhile.
        let end = rustix::fs::fstat(&self.file).ok().and_then(|found| u64::try_from(found.st_size).ok());
        let end = end.map_or(seen_end, |end| end.min(seen_end));
        Error::Truncated {
            name: self.name.to_string(),
            offset,
            wanted_nbytes,
            found_nbytes: end.saturating_sub(offset),
            file_nbytes: self.file_nbytes,
        }
    }
}

/// Removes a regular file of this name, for the process `owner` that takes back its own. False when it is gone already.
pub(crate) fn unlink(shm_dir: &Path, name: &SegmentName, owner: Process) -> Result<bool> {
    let path = name.path_in(shm_dir);
    let failed = |errno| Error::from_errno(errno, "unlink", &path, 0);
    match rustix::fs::lstat(&path) {
        Ok(found) => match entry::unusual_kind(&found) {
            Some(kind) => Err(unusual(&path, &found, kind)),
            None => entry::remove(&path, Identity::of(&found), owner),
        },
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(failed(errno)),
    }
}

/// Some kinds of file refuse to be opened at all, each with an errno of its own.
fn refused(errno: Errno, path: &Path) -> Error {
    if matches!(errno, Errno::LOOP | Errno::NXIO | Errno::NODEV)
        && let Ok(found) = rustix::fs::lstat(path)
        && let Some(kind) = entry::unusual_kind(&found)
    {
        return Error::Kind { path: path.to_path_buf(), errno: errno.raw_os_error(), kind };
    }
    Error::from_errno(errno, "open", path, 0)
}

fn unusual(path: &Path, found: &Stat, kind: &'static str) -> Error {
    let is_directory = rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir();
    let errno = if is_directory { Errno::ISDIR } else { Errno::INVAL };
    Error::Kind { path: path.to_path_buf(), errno: errno.raw_os_error(), kind }
}
