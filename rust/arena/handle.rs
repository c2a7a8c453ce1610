//! A lease's handle, in the four fields of SMG's ShmHandle.
//!
//! `name` is `mmcopyarena-<16 hex digits>-<index>-<generation>`: a single path component, so that it passes through
//! whatever carries segment names, and no segment: our own prefix for those is `mmcopy-`, and a stock consumer looks for
//! a file of this name in /dev/shm and finds none. `owner_id` is `mmcopy:<16 hex digits>`.

use std::fmt;

use super::error::ArenaError;
use super::layout::MOST_LEASES;
use super::record::is_usable;

/// What the names of leases begin with.
pub const LEASE_PREFIX: &str = "mmcopyarena-";
const OWNER_PREFIX: &str = "mmcopy:";

/// Which lease of which arena, and where its bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeaseHandle {
    pub(super) instance: u64,
    pub(super) index: u32,
    pub(super) generation: u64,
    pub(super) offset: u64,
    pub(super) nbytes: u64,
}

impl LeaseHandle {
    /// Whether a handle's name is meant as a lease's; whether it is one says [`LeaseHandle::parse`].
    pub fn is_lease_name(name: &str) -> bool {
        name.starts_with(LEASE_PREFIX)
    }

    /// Reads the four fields. Nothing is assumed about where they come from.
    pub fn parse(name: &str, offset: u64, nbytes: u64, owner_id: &str) -> Result<Self, ArenaError> {
        let forged = |reason: &str| ArenaError::Forged { name: shortened(name), reason: reason.to_owned() };
        let rest =
            name.strip_prefix(LEASE_PREFIX).ok_or_else(|| forged("its name does not begin with mmcopyarena-"))?;
        let mut parts = rest.split('-');
        let (Some(instance), Some(index), Some(generation), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(forged("its name has not three parts"));
        };
        if owner_id.strip_prefix(OWNER_PREFIX) != Some(instance) {
            return Err(forged("its owner is another"));
        }
        let instance = hexadecimal(instance).ok_or_else(|| forged("its arena is not 16 hexadecimal digits"))?;
        let index = decimal(index).and_then(|index| u32::try_from(index).ok()).filter(|index| *index < MOST_LEASES);
        let index = index.ok_or_else(|| forged("its index is no number of a lease"))?;
        let generation = decimal(generation).filter(|generation| is_usable(*generation));
        let generation = generation.ok_or_else(|| forged("its generation is no number of one"))?;
        Ok(Self { instance, index, generation, offset, nbytes })
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.to_string()
    }

    /// Its owner.
    pub fn owner_id(&self) -> String {
        format!("{OWNER_PREFIX}{:016x}", self.instance)
    }

    /// The arena's random number.
    pub const fn instance(&self) -> u64 {
        self.instance
    }

    /// First byte in the arena's data.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes.
    pub const fn nbytes(&self) -> u64 {
        self.nbytes
    }
}

impl fmt::Display for LeaseHandle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{LEASE_PREFIX}{:016x}-{}-{}", self.instance, self.index, self.generation)
    }
}

/// A name in an error message is a peer's word, and may be long.
fn shortened(name: &str) -> String {
    name.chars().take(100).collect()
}

fn hexadecimal(digits: &str) -> Option<u64> {
    let is_canonical = digits.len() == 16 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_canonical.then(|| u64::from_str_radix(digits, 16).ok())?
}

/// Without a sign and without zeros in front, so that one number has one name.
fn decimal(digits: &str) -> Option<u64> {
    let is_canonical = digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    is_canonical.then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::{OwnerId, PREFIX};
    use proptest::prelude::*;

    const HANDLE: LeaseHandle =
        LeaseHandle { instance: 0x0123_4567_89ab_cdef, index: 7, generation: 42, offset: 256, nbytes: 100 };

    #[test]
    fn the_fields_come_back() {
        assert_eq!(HANDLE.name(), "mmcopyarena-0123456789abcdef-7-42");
        assert_eq!(HANDLE.owner_id(), "mmcopy:0123456789abcdef");
        assert_eq!(LeaseHandle::parse(&HANDLE.name(), 256, 100, &HANDLE.owner_id()), Ok(HANDLE));
        assert!(LeaseHandle::is_lease_name(&HANDLE.name()));
    }

    #[test]
    fn it_is_no_segments_name() {
        assert!(!HANDLE.name().starts_with(PREFIX));
        assert_eq!(OwnerId::of_segment(&HANDLE.name()), None);
        assert_eq!(OwnerId::of_lock(&HANDLE.name()), None);
    }

    #[test]
    fn anything_else_is_forged() {
        let owner = HANDLE.owner_id();
        for name in [
            "",
            "mmcopy-0123456789abcdef-7",
            "mmcopyarena-",
            "mmcopyarena-0123456789abcdef-7",
            "mmcopyarena-0123456789abcdef-7-42-",
            "mmcopyarena-0123456789abcdef-7-42-1",
            "mmcopyarena-0123456789ABCDEF-7-42",
            "mmcopyarena-0123456789abcde-7-42",
            "mmcopyarena-0123456789abcdef-07-42",
            "mmcopyarena-0123456789abcdef-+7-42",
            "mmcopyarena-0123456789abcdef--7-42",
            "mmcopyarena-0123456789abcdef-7-0",
            "mmcopyarena-0123456789abcdef-7-4294967296",
            "mmcopyarena-0123456789abcdef-7-18446744073709551616",
            "mmcopyarena-0123456789abcdef-1048576-42",
            "mmcopyarena-0123456789abcdef-7-42 ",
            "/mmcopyarena-0123456789abcdef-7-42",
        ] {
            let parsed = LeaseHandle::parse(name, 0, 1, &owner);
            assert!(matches!(parsed, Err(ArenaError::Forged { .. })), "{name}: {parsed:?}");
        }
        for owner_id in ["", "mmcopy:", "mmcopy:0123456789abcdee", "0123456789abcdef", "smg:1"] {
            let parsed = LeaseHandle::parse(&HANDLE.name(), 0, 1, owner_id);
            assert!(matches!(parsed, Err(ArenaError::Forged { .. })), "{owner_id}");
        }
    }

    proptest! {
        #[test]
        fn what_parses_has_that_name(name in "mmcopyarena-[0-9a-f]{15,17}-[0-9]{0,8}-[0-9]{0,21}", owner in "[0-9a-f]{16}") {
            for owner_id in [format!("mmcopy:{owner}"), format!("mmcopy:{}", &name[12..28])] {
                if let Ok(handle) = LeaseHandle::parse(&name, 1, 2, &owner_id) {
                    prop_assert_eq!(handle.name(), name.as_str());
                    prop_assert_eq!(handle.owner_id(), owner_id);
                }
            }
        }
    }
}
