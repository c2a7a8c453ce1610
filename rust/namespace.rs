//! Which shared-memory file system this is: two processes that compute the same id see the same files.

use std::path::{Path, PathBuf};

/// `<boot id>:<device number of the directory>`, or "" when either is unknown. The boot id names the running kernel and
/// is the same in every container; the device number names the mounted file system, also through a bind mount.
pub fn shm_namespace_id(shm_dir: &Path) -> String {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    match (boot_id.trim(), rustix::fs::stat(shm_dir)) {
        ("", _) | (_, Err(_)) => String::new(),
        (boot_id, Ok(found)) => format!("{boot_id}:{}", found.st_dev),
    }
}

/// The directory where the file system that holds `directory` is mounted: its highest ancestor on the same device.
pub(crate) fn mount_of(directory: &Path) -> PathBuf {
    let mut mount = directory.canonicalize().unwrap_or_else(|_| directory.to_path_buf());
    let Ok(device) = rustix::fs::stat(&mount).map(|found| found.st_dev) else {
        return mount;
    };
    while let Some(parent) = mount.parent() {
        if rustix::fs::stat(parent).map(|found| found.st_dev) != Ok(device) {
            break;
        }
        mount = parent.to_path_buf();
    }
    mount
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_boot_id_and_device() {
        let id = shm_namespace_id(Path::new("/proc"));
        let (boot_id, device) = id.split_once(':').unwrap();
        assert_eq!(boot_id.len(), 36);
        assert_eq!(device, rustix::fs::stat("/proc").unwrap().st_dev.to_string());
    }

    #[test]
    fn a_missing_directory_has_no_id() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(shm_namespace_id(&directory.path().join("missing")), "");
    }

    #[test]
    fn mounts_are_found_from_below() {
        assert_eq!(mount_of(Path::new("/proc/self/fdinfo")), Path::new("/proc"));
        assert_eq!(mount_of(Path::new("/")), Path::new("/"));
    }
}
