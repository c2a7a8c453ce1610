use super::*;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

#[test]
fn an_owner_has_a_locked_file_until_it_is_closed() {
    let shm = tempfile::tempdir().unwrap();
    let owner = Owner::create(shm.path()).unwrap();
    let path = owner.id().lock_name().path_in(shm.path());
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    // A second open file of this process is refused as another process is.
    let second = fs::File::open(&path).unwrap();
    assert_eq!(rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK));
    owner.close();
    assert!(!path.exists());
    assert_eq!(rustix::fs::flock(&second, FlockOperation::NonBlockingLockExclusive), Ok(()));
}

#[test]
fn no_two_names_are_the_same() {
    let shm = tempfile::tempdir().unwrap();
    let owners: Vec<Owner> = (0..8).map(|_| Owner::create(shm.path()).unwrap()).collect();
    let names: HashSet<String> =
        owners.iter().flat_map(|owner| (0..100).map(|_| owner.next_name().unwrap().to_string())).collect();
    assert_eq!(names.len(), 800);
    assert!(names.iter().all(|name| OwnerId::of_segment(name).is_some()));
}

#[test]
fn the_next_names_do_not_follow_from_the_last() {
    let shm = tempfile::tempdir().unwrap();
    let owner = Owner::create(shm.path()).unwrap();
    let number = || owner.next_name().unwrap().as_str().rsplit('-').next().unwrap().parse::<u64>().unwrap();
    let numbers: Vec<u64> = (0..1000).map(|_| number()).collect();
    assert!(numbers.iter().zip(0..).all(|(number, count)| number >> 32 == count), "none is given twice");
    let random: HashSet<u64> = numbers.iter().map(|number| number & 0xffff_ffff).collect();
    assert!(random.len() > 990, "{}", random.len());
}

#[test]
fn a_segment_that_is_not_handed_on_goes_with_what_wrote_it() {
    let shm = tempfile::tempdir().unwrap();
    let owner = Owner::create(shm.path()).unwrap();
    let write = || owner.write(Source::from_slice(b"abc"), None, NonZeroUsize::MIN).unwrap();
    let written = write();
    let path = written.name().path_in(shm.path());
    assert_eq!((fs::read(&path).unwrap(), written.nbytes()), (b"abc".to_vec(), 3));
    drop(written);
    assert!(!path.exists());
    let written = write();
    let path = written.name().path_in(shm.path());
    written.hand_on();
    drop(written);
    assert!(path.exists());
    let mut inherited = write();
    let path = inherited.name().path_in(shm.path());
    inherited.process = Process::elsewhere();
    drop(inherited);
    assert!(path.exists(), "a forked child removes nothing");
}

#[test]
fn a_name_that_is_taken_is_passed_over_so_many_times() {
    let shm = tempfile::tempdir().unwrap();
    let id = OwnerId::from_bits(7);
    let write_from = |first: u64| {
        let mut number = first;
        let next = || {
            number += 1;
            Ok(id.segment_name(number - 1))
        };
        let write =
            |name: &SegmentName| segment::write(shm.path(), name, Source::from_slice(b"abc"), None, NonZeroUsize::MIN);
        under_a_new_name(next, write)
    };
    let most = NAMES_A_SEGMENT as u64;
    for taken in 1..=most {
        fs::write(id.segment_name(taken).path_in(shm.path()), b"a stranger's").unwrap();
    }
    assert_eq!(write_from(2), Ok((id.segment_name(most + 1), 3)));
    assert!(matches!(write_from(1), Err(Error::Exists { .. })));
    assert_eq!(fs::read(id.segment_name(most).path_in(shm.path())).unwrap(), b"a stranger's");
}

#[test]
fn forgetting_leaves_the_lock_file_and_lets_go_of_the_lock() {
    let shm = tempfile::tempdir().unwrap();
    let owner = Owner::create(shm.path()).unwrap();
    let path = owner.id().lock_name().path_in(shm.path());
    owner.forget();
    drop(owner);
    let file = fs::File::open(&path).unwrap();
    assert_eq!(rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive), Ok(()));
}

#[test]
fn closing_removes_no_file_that_took_its_place() {
    let shm = tempfile::tempdir().unwrap();
    let owner = Owner::create(shm.path()).unwrap();
    let path = owner.id().lock_name().path_in(shm.path());
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"a stranger's").unwrap();
    owner.close();
    assert_eq!(fs::read(&path).unwrap(), b"a stranger's");
}

#[test]
fn an_owner_in_a_missing_directory_is_an_error() {
    let shm = tempfile::tempdir().unwrap();
    assert!(matches!(Owner::create(&shm.path().join("missing")), Err(Error::NotFound { .. })));
}

#[test]
fn what_was_inherited_gives_no_names_and_removes_nothing() {
    let shm = tempfile::tempdir().unwrap();
    let mut owner = Owner::create(shm.path()).unwrap();
    let path = owner.id().lock_name().path_in(shm.path());
    // As a child after fork sees it: the process that created it is another one.
    owner.process = Process::elsewhere();
    assert!(matches!(owner.next_name(), Err(Error::Closed { .. })));
    owner.close();
    assert!(path.exists());
}
