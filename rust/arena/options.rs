//! How an arena is made, how it turned out, and what has happened in it.

use std::num::NonZeroUsize;
use std::time::Duration;

use super::table::MAX_CONSUMERS;

/// Which pages hold the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Small ones.
    Off,
    /// Huge ones where the kernel makes them for shared memory (`transparent_hugepage/shmem_enabled`).
    #[default]
    Transparent,
    /// Of the huge pages that the operator has reserved (`nr_hugepages`); an error when they do not suffice.
    Reserved,
}

/// How an arena is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the data, rounded up to whole pages.
    pub data_nbytes: usize,
    /// Leases at once; None: one for each 64 KiB, at least 1024 and at most 65536.
    pub num_leases: Option<u32>,
    /// Which pages.
    pub huge_pages: HugePages,
    /// Threads that touch the memory.
    pub num_threads: NonZeroUsize,
    /// A lease that a consumer has not begun to read this long after it was committed is taken back.
    pub unclaimed_limit: Duration,
}

impl Options {
    /// Everything but the size as is usual.
    pub fn new(data_nbytes: usize) -> Self {
        Self {
            data_nbytes,
            num_leases: None,
            huge_pages: HugePages::default(),
            num_threads: NonZeroUsize::MIN,
            unclaimed_limit: Duration::from_secs(60),
        }
    }
}

/// How the memory turned out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The kernel forbids to execute the files (Linux 6.3).
    pub is_noexec: bool,
    /// The kernel keeps consumers from writing to data and control (Linux 5.1).
    pub is_read_only_for_consumers: bool,
    /// Which pages were asked for.
    pub huge_pages: HugePages,
    /// Bytes of the data that huge pages hold.
    pub huge_nbytes: u64,
    /// The machine's setting of huge pages for shared memory.
    pub huge_pages_setting: &'static str,
    /// Threads that touched the memory.
    pub num_threads: usize,
}

/// What is out now, and what has happened so far. Leases that were taken are out, or were released by all, aborted,
/// cancelled, or their consumers have gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Bytes of the arena.
    pub data_nbytes: u64,
    /// Bytes of blocks in use.
    pub used_nbytes: u64,
    /// Bytes that one lease finds for certain.
    pub largest_free_nbytes: u64,
    /// Leases at once.
    pub num_leases: u32,
    /// Leases that are out now.
    pub leases_out: usize,
    /// Consumers now.
    pub consumers: usize,
    /// Leases that each consumer has not let go of.
    pub held: [usize; MAX_CONSUMERS],
    /// Leases taken.
    pub taken: u64,
    /// Leases committed.
    pub committed: u64,
    /// Leases given up while they were written.
    pub aborted: u64,
    /// Releases, one for each consumer of a lease.
    pub released: u64,
    /// Leases taken back by their sender.
    pub cancelled: u64,
    /// Leases taken back because a consumer did not begin to read.
    pub expired: u64,
    /// Requests for which there was no room in time.
    pub full: u64,
    /// Consumers so far.
    pub consumers_connected: u64,
    /// Consumers that have gone.
    pub consumers_gone: u64,
}
