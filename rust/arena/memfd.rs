//! Anonymous files in memory: made, filled, sealed, and checked by those who receive them.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::Advice;

use super::error::ArenaError;
use super::mapping::{Access, Mapping};
use super::{HugePages, Report};
use crate::entry::Identity;
use crate::fork::Descriptor;

/// `fallocate` undoes its work when a signal arrives; in pieces of this size a process with a timer gets on.
const RESERVE_BYTES: u64 = 64 << 20;
/// What one thread populates at a time.
const POPULATE_BYTES: usize = 16 << 20;
const HUGE_BYTES: usize = 2 << 20;
/// The unit of `st_blocks`, whatever the file system.
const STAT_BLOCK_BYTES: u64 = 512;

/// What every arena's file has: it can neither shrink under a reader nor grow.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

fn io(operation: &'static str, nbytes: u64) -> impl FnOnce(Errno) -> ArenaError {
    move |errno| ArenaError::Io { operation, errno: errno.raw_os_error(), nbytes }
}

/// An empty file that can be sealed. `is_noexec` tells whether the kernel also forbids to run it.
fn create(name: &str, more: MemfdFlags) -> Result<(Descriptor, bool), Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | more;
    // With vm.memfd_noexec=2 only the first works, before Linux 6.3 only the second.
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags).map(|file| (Descriptor::new(file), false)),
        made => made.map(|file| (Descriptor::new(file), true)),
    }
}

/// The file of an arena's data, mapped, reserved, touched and sealed. Blocks.
pub(super) fn data(
    nbytes: usize,
    huge_pages: HugePages,
    num_threads: usize,
) -> Result<(Descriptor, Mapping, Report), ArenaError> {
    let size = nbytes as u64;
    let setting = shmem_setting();
    let is_reserved = huge_pages == HugePages::Reserved;
    let more = if is_reserved { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
    let (file, is_noexec) = create("mmcopy-arena-data", more).map_err(io("memfd_create", size))?;
    rustix::fs::ftruncate(&file, size).map_err(io("ftruncate", size))?;
    let mapping = Mapping::new(&file, nbytes, Access::ReadWrite).map_err(io("mmap", size))?;
    let is_transparent = huge_pages == HugePages::Transparent && setting.is_some_and(Setting::allows);
    if is_transparent {
        // Before any page is there. Where the kernel has none it refuses, and small pages it is.
        let _ = mapping.advise(0, nbytes, Advice::LinuxHugepage);
        populate(&mapping, num_threads).map_err(io("populating", size))?;
    }
    // Space for all of it, or an error and no signal (M3).
    reserve(&file, size).map_err(io("fallocate", size))?;
    if !is_transparent {
        populate(&mapping, num_threads).map_err(io("populating", size))?;
    }
    let is_read_only = seal(&file).map_err(io("sealing", size))?;
    let huge_nbytes = huge_nbytes(&mapping);
    let report = Report {
        is_noexec,
        is_read_only_for_consumers: is_read_only,
        huge_pages,
        huge_nbytes,
        huge_pages_setting: setting.map_or("unknown", Setting::name),
        num_threads,
    };
    Ok((file, mapping, report))
}

/// The file of an arena's control, mapped and sealed. `write` fills it before consumers could see it.
pub(super) fn control(nbytes: usize, write: impl FnOnce(&Mapping)) -> Result<(Descriptor, Mapping), ArenaError> {
    let (file, mapping) = small("mmcopy-arena-control", nbytes)?;
    write(&mapping);
    seal(&file).map_err(io("sealing", nbytes as u64))?;
    Ok((file, mapping))
}

/// The file of one consumer's flags, which it maps writable.
pub(super) fn flags(nbytes: usize) -> Result<(Descriptor, Mapping), ArenaError> {
    let (file, mapping) = small("mmcopy-arena-flags", nbytes)?;
    rustix::fs::fcntl_add_seals(&file, SIZE_SEALS | SealFlags::SEAL).map_err(io("sealing", nbytes as u64))?;
    Ok((file, mapping))
}

fn small(name: &str, nbytes: usize) -> Result<(Descriptor, Mapping), ArenaError> {
    let size = nbytes as u64;
    let (file, _) = create(name, MemfdFlags::empty()).map_err(io("memfd_create", size))?;
    rustix::fs::ftruncate(&file, size).map_err(io("ftruncate", size))?;
    reserve(&file, size).map_err(io("fallocate", size))?;
    let mapping = Mapping::new(&file, nbytes, Access::ReadWrite).map_err(io("mmap", size))?;
    populate(&mapping, 1).map_err(io("populating", size))?;
    Ok((file, mapping))
}

/// Fixes the size, and forbids everyone but mappings that exist to write. False where the kernel (before 5.1) does not
/// know the second: then consumers are trusted not to write.
fn seal(file: &Descriptor) -> Result<bool, Errno> {
    match rustix::fs::fcntl_add_seals(file, SIZE_SEALS | SealFlags::FUTURE_WRITE | SealFlags::SEAL) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL) => rustix::fs::fcntl_add_seals(file, SIZE_SEALS | SealFlags::SEAL).map(|()| false),
        Err(errno) => Err(errno),
    }
}

/// A file that was received: `nbytes` long, sealed so that it stays so (M2), and with memory behind all of it, as its
/// maker reserves it: else reading it would take our memory. Whether no process can map it writable, and which file it is.
pub(super) fn verify(file: impl AsFd, nbytes: u64) -> Result<(bool, Identity), String> {
    let seals = rustix::fs::fcntl_get_seals(&file).map_err(|errno| format!("it is no memfd ({errno})"))?;
    if !seals.contains(SIZE_SEALS) {
        return Err(format!("it is not sealed against shrinking and growing: its seals are {:#x}", seals.bits()));
    }
    let found = rustix::fs::fstat(&file).map_err(|errno| format!("fstat: {errno}"))?;
    if u64::try_from(found.st_size) != Ok(nbytes) {
        return Err(format!("its file has {} bytes, {nbytes} were named", found.st_size));
    }
    let reserved_nbytes = u64::try_from(found.st_blocks).unwrap_or(0).saturating_mul(STAT_BLOCK_BYTES);
    if reserved_nbytes < nbytes {
        return Err(format!("its file has memory for {reserved_nbytes} of {nbytes} bytes"));
    }
    Ok((seals.intersects(SealFlags::FUTURE_WRITE | SealFlags::WRITE), Identity::of(&found)))
}

fn reserve(file: &Descriptor, nbytes: u64) -> Result<(), Errno> {
    let mut start = 0;
    while start < nbytes {
        let piece = RESERVE_BYTES.min(nbytes - start);
        match rustix::fs::fallocate(file, FallocateFlags::empty(), start, piece) {
            Ok(()) => start += piece,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Puts every page into our page table, by several threads, so that no first write pays for it.
fn populate(mapping: &Mapping, num_threads: usize) -> Result<(), Errno> {
    let steps = mapping.nbytes().div_ceil(POPULATE_BYTES);
    let cursor = AtomicUsize::new(0);
    let work = || -> Result<(), Errno> {
        loop {
            let step = cursor.fetch_add(1, Ordering::Relaxed);
            if step >= steps {
                return Ok(());
            }
            let start = step * POPULATE_BYTES;
            populate_range(mapping, start, POPULATE_BYTES.min(mapping.nbytes() - start))?;
        }
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..num_threads.min(steps))
            .map_while(|_| Builder::new().name("mmcopy-touch".to_owned()).spawn_scoped(scope, work).ok())
            .collect();
        let ours = work();
        others.into_iter().fold(ours, |first, other| first.and(other.join().unwrap_or(Err(Errno::FAULT))))
    })
}

fn populate_range(mapping: &Mapping, start: usize, nbytes: usize) -> Result<(), Errno> {
    loop {
        match mapping.advise(start, nbytes, Advice::LinuxPopulateWrite) {
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Before Linux 5.14 the first write of each page does it.
            Err(Errno::INVAL) => return Ok(()),
            done => return done,
        }
    }
}

/// What the machine says about huge pages for shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting(&'static str);

impl Setting {
    fn allows(self) -> bool {
        matches!(self.0, "always" | "within_size" | "advise" | "force")
    }

    const fn name(self) -> &'static str {
        self.0
    }
}

fn shmem_setting() -> Option<Setting> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").ok()?;
    parse_setting(&text)
}

fn parse_setting(text: &str) -> Option<Setting> {
    let chosen = text.split_once('[')?.1.split_once(']')?.0;
    ["always", "within_size", "advise", "never", "deny", "force"].into_iter().find(|name| *name == chosen).map(Setting)
}

/// Bytes of the mapping that huge pages hold.
fn huge_nbytes(mapping: &Mapping) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    parse_huge_nbytes(&maps, mapping.address())
}

fn parse_huge_nbytes(maps: &str, address: usize) -> u64 {
    let head = format!("{address:x}-");
    let lines = maps.lines().skip_while(|line| !line.starts_with(&head)).skip(1);
    let is_of_this = |line: &&str| line.split_once(':').is_some_and(|(key, _)| !key.contains(['-', ' ']));
    lines
        .take_while(is_of_this)
        .filter_map(|line| {
            let (key, value) = line.split_once(':')?;
            let is_huge = matches!(key, "ShmemPmdMapped" | "Shared_Hugetlb" | "Private_Hugetlb");
            let kibibytes: u64 = value.trim().strip_suffix(" kB")?.trim().parse().ok()?;
            is_huge.then_some(kibibytes * 1024)
        })
        .sum()
}

/// The size that an arena of so many bytes has.
pub(super) fn rounded(nbytes: usize, huge_pages: HugePages) -> Option<usize> {
    let page = if huge_pages == HugePages::Off { super::layout::PAGE_BYTES } else { HUGE_BYTES };
    nbytes.checked_next_multiple_of(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_sealed_reserved_and_readable_elsewhere() {
        let (file, mapping, report) = data(4 << 20, HugePages::Off, 3).unwrap();
        mapping.target().store(7, &[1_u8, 2, 3]);
        assert!(report.is_read_only_for_consumers);
        assert!(verify(&file, 4 << 20).unwrap().0);
        assert_eq!(rustix::fs::ftruncate(&file, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&file, 8 << 20), Err(Errno::PERM));
        assert_eq!(rustix::io::pwrite(&file, b"x", 0), Err(Errno::PERM));
        assert_eq!(Mapping::new(&file, 4096, Access::ReadWrite).err(), Some(Errno::PERM));
        assert_eq!(rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE), Err(Errno::PERM));
        let other = Mapping::new(&file, 4 << 20, Access::Read).unwrap();
        let mut found = [0_u8; 3];
        other.source().load(7, &mut found);
        assert_eq!(found, [1, 2, 3]);
        assert_eq!(rustix::fs::fstat(&file).unwrap().st_blocks * 512, 4 << 20);
    }

    #[test]
    fn what_is_not_sealed_or_of_another_size_is_refused() {
        let (file, _) = create("test", MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert!(verify(&file, 4096).unwrap_err().contains("not sealed"));
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert!(verify(&file, 4096).unwrap_err().contains("not sealed"));
        rustix::fs::fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        assert_eq!(verify(&file, 4096).unwrap_err(), "its file has memory for 0 of 4096 bytes");
        reserve(&file, 4096).unwrap();
        assert!(!verify(&file, 4096).unwrap().0);
        assert_eq!(verify(&file, 8192).unwrap_err(), "its file has 4096 bytes, 8192 were named");
        assert!(verify(tempfile::tempfile().unwrap(), 0).is_err());
    }

    #[test]
    fn a_machine_without_reserved_pages_refuses_them_with_an_errno() {
        let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
        if free.is_ok_and(|free| free.trim() == "0") {
            let refused = data(2 << 20, HugePages::Reserved, 1).unwrap_err();
            assert!(matches!(refused, ArenaError::Io { nbytes: 0x20_0000, .. }), "{refused:?}");
        }
    }

    #[test]
    fn the_systems_words_are_read() {
        assert_eq!(parse_setting("always within_size [advise] never deny force\n"), Some(Setting("advise")));
        assert_eq!(parse_setting("[never]"), Some(Setting("never")));
        assert_eq!(parse_setting("nothing"), None);
        assert!(!Setting("never").allows() && Setting("advise").allows());
        let maps = "7f00-7f10 rw-s 00000000 00:01 1 /memfd:a\nSize: 64 kB\nShmemPmdMapped:  2048 kB\n\
                    7f20-7f30 rw-s 00000000 00:01 2 /memfd:b\nShared_Hugetlb: 4096 kB\nVmFlags: rd\n";
        assert_eq!(parse_huge_nbytes(maps, 0x7f00), 2 << 20);
        assert_eq!(parse_huge_nbytes(maps, 0x7f20), 4 << 20);
        assert_eq!(parse_huge_nbytes(maps, 0x7f40), 0);
    }
}
