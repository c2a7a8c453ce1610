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
fn forgetting_leaves_the_lock_file_and_lets_go_of_the_lock() {
    let shm = tempfile::tempdir().unwrap();
    let owner = Owner::create(shm.path()).unwrap();
    let path = owner.id().lock_name().path_in(shm.path());
    owner.forget();
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
