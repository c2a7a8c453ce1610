//! Where things are in the two files that are not data.
//!
//! ```text
//! control, read-only for consumers
//!   0    header, 64 bytes: u64 magic, u32 version, u32 num_leases, u64 instance, u64 data_nbytes
//!   64   records, 128 bytes each
//!        0   u64 generation, u64 offset, u64 nbytes, u32 consumers, u32 state
//!        64  u64 written
//!
//! flags, one file a consumer, written by it alone
//!   0                claims: u32 a lease
//!   claims rounded   releases: u32 a lease
//!   up to a page
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::mapping::Mapping;
use super::record::{Flags, Record};
use crate::memory::Source;

pub(super) const PAGE_BYTES: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"mmcarena");
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 64;
const RECORD_BYTES: usize = 128;
const WRITTEN_AT: usize = 64;

/// Most lease records of an arena.
pub(super) const MOST_LEASES: u32 = 1 << 20;

/// Bytes of the control file.
pub(super) const fn control_nbytes(num_leases: u32) -> usize {
    (HEADER_BYTES + num_leases as usize * RECORD_BYTES).next_multiple_of(PAGE_BYTES)
}

/// Bytes of a consumer's flags.
pub(super) const fn flags_nbytes(num_leases: u32) -> usize {
    2 * releases_at(num_leases)
}

/// Where the releases begin.
pub(super) const fn releases_at(num_leases: u32) -> usize {
    (num_leases as usize * 4).next_multiple_of(PAGE_BYTES)
}

/// The header's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) num_leases: u32,
    pub(super) instance: u64,
    pub(super) data_nbytes: u64,
}

impl Header {
    pub(super) fn write(&self, control: &Mapping) {
        control.target().store(0, &self.bytes());
    }

    /// Whether the control file begins with exactly this.
    pub(super) fn is_in(&self, control: Source<'_>) -> bool {
        let mut found = [0; HEADER_BYTES];
        control.load(0, &mut found);
        found == self.bytes()
    }

    fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.num_leases.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.instance.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.data_nbytes.to_le_bytes());
        bytes
    }
}

/// The record of this lease.
pub(super) fn record(control: &Mapping, index: u32) -> Record<'_, AtomicU64, AtomicU32> {
    let at = HEADER_BYTES + index as usize * RECORD_BYTES;
    Record {
        generation: control.word64(at),
        offset: control.word64(at + 8),
        nbytes: control.word64(at + 16),
        consumers: control.word32(at + 24),
        state: control.word32(at + 28),
        written: control.word64(at + WRITTEN_AT),
    }
}

/// A consumer's flags for this lease.
pub(super) fn flags(flags: &Mapping, num_leases: u32, index: u32) -> Flags<'_, AtomicU32> {
    Flags { claim: flags.word32(index as usize * 4), release: flags.word32(release_at(num_leases, index)) }
}

/// Where a consumer's release of this lease is.
pub(super) const fn release_at(num_leases: u32, index: u32) -> usize {
    releases_at(num_leases) + index as usize * 4
}
