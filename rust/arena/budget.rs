//! How much memory an arena may take: an arena beyond what the control group or the machine has would not fail when it
//! is made but have a process killed when it is used.

use std::path::{Path, PathBuf};

use super::error::ArenaError;

/// An arena takes at most seven eighths of what is available.
const MOST_EIGHTHS: u64 = 7;
/// Version 1 says "no limit" by a number near 2**63, rounded down to a page.
const UNLIMITED: u64 = 1 << 60;

/// What is available, and what limits it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// Bytes that are left.
    pub nbytes: u64,
    /// The machine's or the group's reading, in words.
    pub limited_by: String,
}

/// A control group's memory limit, and what the group uses of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimit {
    /// The limit itself.
    pub limit_nbytes: u64,
    /// Without file pages that were not used lately: the kernel gives those up first.
    pub used_nbytes: u64,
}

/// What limits this process's memory. `None` where the kernel does not say, or nothing limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// The least that the machine and every control group up to the root have left.
    pub available: Option<Available>,
    /// MemAvailable of the machine.
    pub machine_nbytes: Option<u64>,
    /// The control group that has least left.
    pub group: Option<GroupLimit>,
}

impl MemoryBudget {
    /// Reads the budget of this process; `proc` is where procfs is mounted.
    pub fn read(proc: &Path) -> Self {
        let machine_nbytes = machine(proc);
        let machine =
            machine_nbytes.map(|nbytes| Available { nbytes, limited_by: "MemAvailable of the machine".to_owned() });
        let group =
            folders(proc).iter().filter_map(|folder| group(folder)).min_by_key(|(available, _)| available.nbytes);
        let (group_available, group) = group.unzip();
        let available = machine.into_iter().chain(group_available).min_by_key(|available| available.nbytes);
        Self { available, machine_nbytes, group }
    }
}

/// Refuses more than there is. `None`: nothing is known, and nothing refused.
pub(super) fn check(wanted_nbytes: u64, available: Option<&Available>) -> Result<(), ArenaError> {
    let Some(available) = available else { return Ok(()) };
    let most_nbytes = available.nbytes / 8 * MOST_EIGHTHS;
    if wanted_nbytes <= most_nbytes {
        return Ok(());
    }
    Err(ArenaError::Memory {
        wanted_nbytes,
        available_nbytes: available.nbytes,
        most_nbytes,
        limited_by: available.limited_by.clone(),
    })
}

/// MemAvailable of /proc/meminfo, in bytes.
fn machine(proc: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(proc.join("meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes.saturating_mul(1024))
}

/// What one group has left, and its limit.
fn group(folder: &Path) -> Option<(Available, GroupLimit)> {
    let number = |name: &str| read_number(&folder.join(name));
    let (limit_name, limit, used, cache_key) = match number("memory.max") {
        Some(limit) => ("memory.max", limit, number("memory.current"), "inactive_file"),
        None => {
            let limit = number("memory.limit_in_bytes")?;
            ("memory.limit_in_bytes", limit, number("memory.usage_in_bytes"), "total_inactive_file")
        }
    };
    if limit >= UNLIMITED {
        return None;
    }
    let statistics = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache = statistics.lines().find_map(|line| line.strip_prefix(cache_key)?.strip_prefix(' ')?.parse().ok());
    let used = used.unwrap_or(0).saturating_sub(cache.unwrap_or(0));
    let limited_by = format!("{limit_name} {limit} of {}", folder.display());
    let available = Available { nbytes: limit.saturating_sub(used), limited_by };
    Some((available, GroupLimit { limit_nbytes: limit, used_nbytes: used }))
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The folders of this process's groups that can limit memory, in either version, each with its parents.
fn folders(proc: &Path) -> Vec<PathBuf> {
    let read = |name: &str| std::fs::read_to_string(proc.join("self").join(name)).unwrap_or_default();
    let (groups, mounts) = (read("cgroup"), read("mountinfo"));
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((head, tail)) = line.split_once(" - ") else { continue };
        let (fields, types): (Vec<_>, Vec<_>) = (head.split(' ').collect(), tail.split(' ').collect());
        let ([_, _, _, root, point, ..], [kind, _, options, ..]) = (fields.as_slice(), types.as_slice()) else {
            continue;
        };
        let controller = match *kind {
            "cgroup2" => "",
            "cgroup" if options.split(',').any(|option| option == "memory") => "memory",
            _ => continue,
        };
        if let Some(group) = group_of(&groups, controller) {
            let point = Path::new(point);
            // A container can see its own group as the root of the mount, while its path starts at the host's root.
            let inside = Path::new(group).strip_prefix(root).unwrap_or(Path::new(""));
            let folder = point.join(inside);
            found.extend(folder.ancestors().take_while(|folder| folder.starts_with(point)).map(Path::to_path_buf));
        }
    }
    found
}

fn group_of<'a>(groups: &'a str, controller: &str) -> Option<&'a str> {
    groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, group) = rest.split_once(':')?;
        let is_it = controllers.split(',').any(|name| name == controller) && !group.split('/').any(|part| part == "..");
        is_it.then_some(group)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A /proc and a /sys/fs/cgroup with these files.
    fn machine_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text.replace("ROOT", root.path().to_str().unwrap())).unwrap();
        }
        root
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_tightest_group_counts_and_its_old_pages_are_free() {
        let root = machine_with(&[
            ("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8388608 kB\n"),
            ("proc/self/cgroup", "0::/pod/container\n"),
            ("proc/self/mountinfo", "30 23 0:26 / ROOT/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"),
            ("cgroup/pod/memory.max", "268435456\n"),
            ("cgroup/pod/memory.current", "104857600\n"),
            ("cgroup/pod/memory.stat", "anon 1\ninactive_file 52428800\n"),
            ("cgroup/pod/container/memory.max", "max\n"),
        ]);
        let budget = MemoryBudget::read(&root.path().join("proc"));
        assert_eq!(budget.machine_nbytes, Some(8 << 30));
        assert_eq!(budget.group, Some(GroupLimit { limit_nbytes: 256 * MIB, used_nbytes: 50 * MIB }));
        let found = budget.available.unwrap();
        assert_eq!(found.nbytes, 206 * MIB);
        assert!(found.limited_by.ends_with("/cgroup/pod"), "{}", found.limited_by);
        let refused = check(512 * MIB, Some(&found)).unwrap_err();
        let ArenaError::Memory { wanted_nbytes, available_nbytes, most_nbytes, .. } = &refused else {
            panic!("{refused}")
        };
        assert_eq!((*wanted_nbytes, *available_nbytes, *most_nbytes), (512 * MIB, 206 * MIB, 206 * MIB / 8 * 7));
        assert!(refused.to_string().contains("memory.max 268435456"), "{refused}");
        assert_eq!(check(180 * MIB, Some(&found)), Ok(()));
    }

    #[test]
    fn version_one_is_read_too() {
        let root = machine_with(&[
            ("proc/meminfo", "MemAvailable: 1048576 kB\n"),
            ("proc/self/cgroup", "4:cpu,memory:/host/docker/abc\n0::/\n"),
            ("proc/self/mountinfo", "30 23 0:26 /host/docker/abc ROOT/memory rw - cgroup cgroup rw,memory\n"),
            ("memory/memory.limit_in_bytes", "536870912\n"),
            ("memory/memory.usage_in_bytes", "4096\n"),
        ]);
        let budget = MemoryBudget::read(&root.path().join("proc"));
        assert_eq!(budget.available.unwrap().nbytes, 512 * MIB - 4096);
    }

    #[test]
    fn without_a_limit_the_machine_counts_and_without_a_word_nothing() {
        let root = machine_with(&[
            ("proc/meminfo", "MemAvailable: 1048576 kB\n"),
            ("proc/self/cgroup", "4:memory:/\n"),
            ("proc/self/mountinfo", "30 23 0:26 / ROOT/memory rw - cgroup cgroup rw,memory\n"),
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let budget = MemoryBudget::read(&root.path().join("proc"));
        assert_eq!(budget.group, None);
        let found = budget.available.unwrap();
        assert_eq!((found.nbytes, found.limited_by.as_str()), (1 << 30, "MemAvailable of the machine"));
        let nothing = MemoryBudget { available: None, machine_nbytes: None, group: None };
        assert_eq!(MemoryBudget::read(&root.path().join("missing")), nothing);
        assert_eq!(check(u64::MAX, None), Ok(()));
    }

    #[test]
    fn this_machine_says_something() {
        assert!(MemoryBudget::read(Path::new("/proc")).available.unwrap().nbytes > MIB);
    }
}
