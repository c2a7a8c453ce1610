//! Names of segments. A name that comes off the wire is validated before it gets near a path.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Longest name that Linux file systems take.
pub const MAX_NAME_BYTES: usize = 255;
/// What the names of our own files begin with. Never SMG's prefix: its gateway removes files of that by process id.
pub const PREFIX: &str = "mmcopy-";
const ID_DIGITS: usize = 16;
const LOCK_SUFFIX: &str = ".lock";

/// One path component, safe to join to a directory. Of the names that begin with [`PREFIX`] only those of segments: a peer
/// that names a sender's lock file does not reach it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SegmentName(String);

impl SegmentName {
    /// Validates a name. Slashes in front are dropped, as SMG's stock consumer does, because `shm_open` names have one.
    pub fn parse(given: &str) -> Result<Self> {
        let name = given.trim_start_matches('/');
        let reason = if name.is_empty() {
            "it is empty"
        } else if name.contains('/') {
            "it has a \"/\" inside"
        } else if name == "." || name == ".." {
            "it names a directory"
        } else if name.contains('\0') {
            "it has a NUL inside"
        } else if name.len() > MAX_NAME_BYTES {
            "it is longer than 255 bytes"
        } else if name.starts_with(PREFIX) && OwnerId::of_segment(name).is_none() {
            "it begins with \"mmcopy-\" and is not a segment's, which is \"mmcopy-<16 hex digits>-<digits>\""
        } else {
            return Ok(Self(name.to_owned()));
        };
        Err(Error::Name { name: given.to_owned(), reason })
    }

    /// The name itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its path in this directory.
    pub fn path_in(&self, shm_dir: &Path) -> PathBuf {
        shm_dir.join(&self.0)
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The random part of a sender's names: 16 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OwnerId(String);

impl OwnerId {
    /// The id that these random bits spell.
    pub fn from_bits(bits: u64) -> Self {
        Self(format!("{bits:016x}"))
    }

    /// The 16 digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Name of the file that its sender keeps locked.
    pub fn lock_name(&self) -> SegmentName {
        SegmentName(format!("{PREFIX}{}{LOCK_SUFFIX}", self.0))
    }

    /// Name of its sender's segment with this number.
    pub fn segment_name(&self, number: u64) -> SegmentName {
        SegmentName(format!("{PREFIX}{}-{number}", self.0))
    }

    /// The sender that a lock file of this name belongs to, when it is one of ours.
    pub fn of_lock(file_name: &str) -> Option<Self> {
        Self::parse(file_name.strip_prefix(PREFIX)?.strip_suffix(LOCK_SUFFIX)?)
    }

    /// The sender that a segment of this name belongs to, when it is one of ours.
    pub fn of_segment(file_name: &str) -> Option<Self> {
        let (id, number) = file_name.strip_prefix(PREFIX)?.split_once('-')?;
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| Self::parse(id))?
    }

    fn parse(digits: &str) -> Option<Self> {
        let is_id = digits.len() == ID_DIGITS && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_id.then(|| Self(digits.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn good_names_lose_their_slashes_in_front() {
        for (given, name) in [
            ("a", "a"),
            ("/a", "a"),
            ("///smg-tokenspeed-1-2-3", "smg-tokenspeed-1-2-3"),
            ("...", "..."),
            (".a", ".a"),
            ("/mmcopy-0123456789abcdef-70", "mmcopy-0123456789abcdef-70"),
            ("mmcopy", "mmcopy"),
            ("a b\n", "a b\n"),
            ("\u{e9}", "\u{e9}"),
        ] {
            assert_eq!(SegmentName::parse(given).unwrap().as_str(), name);
        }
        let longest = "x".repeat(MAX_NAME_BYTES);
        assert_eq!(SegmentName::parse(&longest).unwrap().as_str(), longest);
    }

    #[test]
    fn bad_names_are_refused_with_the_name() {
        let too_long = "x".repeat(MAX_NAME_BYTES + 1);
        let too_long_in_bytes = "\u{e9}".repeat(128);
        for given in [
            "",
            "/",
            "//",
            ".",
            "..",
            "/..",
            "a/b",
            "../a",
            "a/",
            "a/..",
            "a\0",
            "\0",
            &too_long,
            &too_long_in_bytes,
            "mmcopy-0123456789abcdef.lock",
            "/mmcopy-0123456789abcdef.lock",
            "mmcopy-",
            "mmcopy-0123456789abcdef-1x",
        ] {
            let error = SegmentName::parse(given).unwrap_err();
            assert!(matches!(&error, Error::Name { name, .. } if name == given), "{error:?}");
        }
    }

    #[test]
    fn our_own_names_are_recognised_and_nothing_else() {
        let id = OwnerId::from_bits(0x0123_4567_89ab_cdef);
        assert_eq!(id.lock_name().as_str(), "mmcopy-0123456789abcdef.lock");
        assert_eq!(id.segment_name(7).as_str(), "mmcopy-0123456789abcdef-7");
        assert_eq!(OwnerId::of_lock(id.lock_name().as_str()), Some(id.clone()));
        assert_eq!(OwnerId::of_segment(id.segment_name(u64::MAX).as_str()), Some(id));
        for other in [
            "mmcopy-0123456789abcdef",
            "mmcopy-0123456789abcdef-",
            "mmcopy-0123456789abcdef-1x",
            "mmcopy-0123456789abcdef--1",
            "mmcopy-0123456789abcdef-1.lock",
            "mmcopy-0123456789ABCDEF-1",
            "mmcopy-0123456789abcde-1",
            "mmcopy-0123456789abcdef0-1",
            "smg-tokenspeed-1-2-3",
            "xmmcopy-0123456789abcdef-1",
        ] {
            assert_eq!(OwnerId::of_segment(other), None, "{other}");
            assert_eq!(OwnerId::of_lock(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_one_component_below_the_directory(given in any::<String>()) {
            if let Ok(name) = SegmentName::parse(&given) {
                let path = name.path_in(Path::new("/d"));
                prop_assert_eq!(path.parent(), Some(Path::new("/d")));
                prop_assert_eq!(path.file_name().and_then(|part| part.to_str()), Some(name.as_str()));
                prop_assert_eq!(SegmentName::parse(name.as_str()), Ok(name.clone()));
            }
        }
    }
}
