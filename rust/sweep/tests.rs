use super::*;
use crate::owner::Owner;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

const NEVER: Duration = Duration::MAX;
const AT_ONCE: Duration = Duration::ZERO;

/// Segments of this sender, `nbytes` bytes each.
fn fill(shm_dir: &Path, owner: &Owner, count: usize, nbytes: usize) -> Vec<String> {
    let fill_one = |_| {
        let name = owner.next_name().unwrap();
        fs::write(name.path_in(shm_dir), vec![0; nbytes]).unwrap();
        name.to_string()
    };
    (0..count).map(fill_one).collect()
}

fn listing(shm_dir: &Path) -> HashSet<String> {
    fs::read_dir(shm_dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_dead_senders_files_go_and_a_live_ones_stay() {
    let shm = tempfile::tempdir().unwrap();
    let live = Owner::create(shm.path()).unwrap();
    let mut kept: HashSet<String> = fill(shm.path(), &live, 3, 10).into_iter().collect();
    kept.insert(live.id().lock_name().to_string());
    let dead = Owner::create(shm.path()).unwrap();
    let gone = fill(shm.path(), &dead, 4, 100);
    dead.forget();
    drop(dead);
    let swept = sweep(shm.path(), NEVER).unwrap();
    assert_eq!(swept.names.iter().collect::<HashSet<_>>(), gone.iter().collect());
    assert_eq!(swept.nbytes, 400);
    assert_eq!(listing(shm.path()), kept);
    assert_eq!(sweep(shm.path(), AT_ONCE), Ok(Swept::default()));
    assert_eq!(listing(shm.path()), kept);
}

#[test]
fn a_closed_senders_segments_go_when_they_are_old() {
    let shm = tempfile::tempdir().unwrap();
    let owner = Owner::create(shm.path()).unwrap();
    let names = fill(shm.path(), &owner, 2, 7);
    owner.close();
    let aged = fs::File::options().write(true).open(shm.path().join(&names[0])).unwrap();
    aged.set_modified(SystemTime::now() - Duration::from_secs(100)).unwrap();
    assert_eq!(sweep(shm.path(), Duration::from_secs(3600)), Ok(Swept::default()));
    assert_eq!(sweep(shm.path(), NEVER), Ok(Swept::default()));
    let swept = sweep(shm.path(), Duration::from_secs(60)).unwrap();
    assert_eq!(swept, Swept { names: vec![names[0].clone()], nbytes: 7, failures: Vec::new() });
    let swept = sweep(shm.path(), AT_ONCE).unwrap();
    assert_eq!(swept, Swept { names: vec![names[1].clone()], nbytes: 7, failures: Vec::new() });
}

#[test]
fn a_segment_from_the_future_is_not_old() {
    let shm = tempfile::tempdir().unwrap();
    let path = shm.path().join("mmcopy-0123456789abcdef-0");
    fs::write(&path, b"x").unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(1000)).unwrap();
    assert_eq!(sweep(shm.path(), AT_ONCE), Ok(Swept::default()));
    assert!(path.exists());
}

#[test]
fn what_is_not_ours_or_not_regular_stays() {
    let shm = tempfile::tempdir().unwrap();
    let dead = Owner::create(shm.path()).unwrap();
    let id = dead.id().as_str().to_owned();
    dead.forget();
    drop(dead);
    for name in [
        "smg-tokenspeed-1-2-3".to_owned(),
        "torch_123".to_owned(),
        format!("mmcopy-{id}"),
        format!("mmcopy-{id}-"),
        format!("mmcopy-{id}-1x"),
        format!("xmmcopy-{id}-1"),
        format!("mmcopy-{}-1", id.to_uppercase() + "0"),
    ] {
        fs::write(shm.path().join(name), b"theirs").unwrap();
    }
    fs::create_dir(shm.path().join(format!("mmcopy-{id}-1"))).unwrap();
    symlink("torch_123", shm.path().join(format!("mmcopy-{id}-2"))).unwrap();
    symlink("torch_123", shm.path().join("mmcopy-00000000000000aa.lock")).unwrap();
    fs::create_dir(shm.path().join("mmcopy-00000000000000bb.lock")).unwrap();
    let mut wanted = listing(shm.path());
    wanted.remove(&format!("mmcopy-{id}.lock"));
    assert_eq!(sweep(shm.path(), AT_ONCE), Ok(Swept::default()));
    assert_eq!(listing(shm.path()), wanted);
}

#[test]
fn racing_sweeps_share_the_work() {
    let shm = tempfile::tempdir().unwrap();
    let mut names = HashSet::new();
    for _ in 0..40 {
        let dead = Owner::create(shm.path()).unwrap();
        names.extend(fill(shm.path(), &dead, 3, 2));
        dead.forget();
        drop(dead);
    }
    let results: Vec<Swept> = std::thread::scope(|scope| {
        let sweeps: Vec<_> = (0..4).map(|_| scope.spawn(|| sweep(shm.path(), NEVER).unwrap())).collect();
        sweeps.into_iter().map(|sweep| sweep.join().unwrap()).collect()
    });
    // A sweep that found a lock held by another left that sender to it; one more finds nothing.
    assert_eq!(sweep(shm.path(), NEVER), Ok(Swept::default()));
    let removed: Vec<&String> = results.iter().flat_map(|swept| &swept.names).collect();
    assert_eq!(removed.len(), names.len(), "each name is counted once");
    assert_eq!(removed.into_iter().collect::<HashSet<_>>(), names.iter().collect());
    assert_eq!(results.iter().map(|swept| swept.nbytes).sum::<u64>(), 240);
    assert_eq!(listing(shm.path()), HashSet::new());
}

#[test]
fn senders_that_come_and_go_under_a_sweep_lose_nothing() {
    let shm = tempfile::tempdir().unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                sweep(shm.path(), AT_ONCE).unwrap();
            }
        });
        for _ in 0..300 {
            let owner = Owner::create(shm.path()).unwrap();
            for name in fill(shm.path(), &owner, 2, 1) {
                assert!(shm.path().join(&name).exists(), "a live sender's {name} was removed");
                // Consumed: what is still there after close would be an orphan, which may go.
                fs::remove_file(shm.path().join(&name)).unwrap();
            }
            assert!(owner.id().lock_name().path_in(shm.path()).exists());
            owner.close();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert_eq!(listing(shm.path()), HashSet::new());
}

#[test]
fn a_directory_that_cannot_be_listed_is_an_error() {
    let shm = tempfile::tempdir().unwrap();
    assert!(matches!(sweep(&shm.path().join("missing"), NEVER), Err(Error::NotFound { .. })));
    fs::write(shm.path().join("file"), b"").unwrap();
    assert!(matches!(sweep(&shm.path().join("file"), NEVER), Err(Error::Io { operation: "listing", .. })));
}
