//! The sender's side: create, reserve, write.
//!
//! The file is written by `pwrite`, not through a mapping, so that a file system without room is an error at every
//! point (M3), and reserved first, so that it is an error before the work. The kernel lets one thread at a time write to
//! a file, so a plain write gains nothing from several; a cast does, because the next block is cast meanwhile.

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::cast::Cast;
use crate::entry::{self, Identity};
use crate::fork::Descriptor;
use crate::memory::{Source, Target};
use crate::name::SegmentName;
use crate::transfer;
use crate::workers::Plan;
use crate::{Error, Result};

/// A thread's block of cast elements, small enough for the second-level cache.
const SCRATCH_BYTES: usize = 64 << 10;
/// `fallocate` on tmpfs undoes its work when a signal arrives. In pieces of this size a process with a timer gets on.
const RESERVE_BYTES: u64 = 64 << 20;

/// Creates a new file of this name and fills it, with a cast on the way when one is given; the file's bytes. Blocks
/// until all of it is written. The file is the caller's (mode 0600), exactly as long as its contents, and complete when
/// this returns; after an error there is none.
pub fn write(
    shm_dir: &Path,
    name: &SegmentName,
    source: Source<'_>,
    cast: Option<Cast>,
    num_threads: NonZeroUsize,
) -> Result<u64> {
    let nbytes = match cast {
        Some(cast) => cast.dst_nbytes(source.nbytes())?,
        None => source.nbytes(),
    } as u64;
    let path = name.path_in(shm_dir);
    // The file is gone again when the error looks at how much space is free.
    create(&path, source, cast, nbytes, num_threads)
        .map_err(|(operation, errno)| Error::from_errno(errno, operation, &path, nbytes))?;
    Ok(nbytes)
}

fn create(
    path: &Path,
    source: Source<'_>,
    cast: Option<Cast>,
    nbytes: u64,
    num_threads: NonZeroUsize,
) -> std::result::Result<(), (&'static str, Errno)> {
    let created = Created::new(path).map_err(|errno| ("creating a segment", errno))?;
    reserve(&created.file, nbytes).map_err(|errno| ("fallocate", errno))?;
    match cast {
        None => transfer::write_at(created.file.as_fd(), source, 0, transfer::MAX_CALL_BYTES),
        Some(cast) => write_cast(&created.file, source, cast, num_threads),
    }
    .map_err(|errno| ("pwrite", errno))?;
    created.keep();
    Ok(())
}

fn write_cast(
    file: &Descriptor,
    source: Source<'_>,
    cast: Cast,
    num_threads: NonZeroUsize,
) -> std::result::Result<(), Errno> {
    let (from, to) = (cast.from().itemsize(), cast.to().itemsize());
    let elements = source.nbytes() / from;
    let block = SCRATCH_BYTES / to;
    let unit_bytes = NonZeroUsize::new(to).unwrap_or(NonZeroUsize::MIN);
    Plan::new(elements, unit_bytes, num_threads).run(|range| {
        let mut scratch = [0_u8; SCRATCH_BYTES];
        range.clone().step_by(block).try_for_each(|start| {
            let end = range.end.min(start + block);
            let nbytes = (end - start) * to;
            cast.apply(source.slice(start * from..end * from), Target::from_slice(&mut scratch[..nbytes]));
            let written = Source::from_slice(&scratch[..nbytes]);
            transfer::write_at(file.as_fd(), written, (start * to) as u64, transfer::MAX_CALL_BYTES)
        })
    })
}

/// Reserves the space and sets the length.
fn reserve(file: &Descriptor, nbytes: u64) -> std::result::Result<(), Errno> {
    let mut start = 0;
    while start < nbytes {
        let piece = RESERVE_BYTES.min(nbytes - start);
        match rustix::fs::fallocate(file, FallocateFlags::empty(), start, piece) {
            Ok(()) => start += piece,
            Err(Errno::INTR) => {}
            // A file system that cannot reserve still reports a lack of space from pwrite.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return rustix::fs::ftruncate(file, nbytes),
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// A file that we created and that no message names yet: dropping it removes it.
struct Created {
    path: PathBuf,
    file: Descriptor,
    is_kept: bool,
}

impl Created {
    fn new(path: &Path) -> std::result::Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(Self { path: path.to_path_buf(), file: Descriptor::new(file), is_kept: false })
    }

    fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        if !self.is_kept
            && let Ok(found) = rustix::fs::fstat(&self.file)
        {
            // The error that brought us here is the one to report.
            let _ = entry::remove(&self.path, Identity::of(&found), self.file.process());
        }
    }
}
