//! Both ends in one process; what needs several processes is tested from Python.

use std::path::Path;
use std::time::Duration;

use super::*;
use crate::Error;

const LIMIT: Duration = Duration::from_secs(20);

fn options(directory: &Path, shm_dir: &Path) -> Options {
    Options {
        directory: directory.to_path_buf(),
        shm_dir: shm_dir.to_path_buf(),
        accept_prefixes: vec!["mmcopy-".to_owned()],
        allowed_uids: Vec::new(),
        max_links: 4,
        max_arenas: 4,
        max_arena_bytes: 1 << 40,
        hello_limit: Duration::from_secs(5),
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_probe_is_read_back_and_leaves_nothing() {
    let (directory, shm) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let endpoint = WorkerEndpoint::create(options(&directory.path().join("run"), shm.path())).unwrap();
    let link = SenderLink::connect(endpoint.path(), LIMIT, &[]).unwrap();
    assert_eq!(link.worker_instance(), endpoint.instance());
    let probed = link.probe(shm.path(), LIMIT).unwrap();
    assert!(probed.is_shared, "{}", probed.reason);
    let elsewhere = tempfile::tempdir().unwrap();
    let probed = link.probe(elsewhere.path(), LIMIT).unwrap();
    assert!(!probed.is_shared);
    assert!(probed.reason.contains("errno 2"), "{}", probed.reason);
    assert!(names(shm.path()).is_empty() && names(elsewhere.path()).is_empty());
    endpoint.close(LIMIT).unwrap();
    assert!(names(&directory.path().join("run")).is_empty());
    assert!(link.is_closed());
    assert_eq!(link.probe(shm.path(), LIMIT), Err(EndpointError::Gone { peer: "worker" }.into()));
}

#[test]
fn closing_a_link_ends_a_call_that_waits() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("silent.sock");
    let (listener, _) = super::directory::listen(&path, false).unwrap();
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| SenderLink::connect(&path, Duration::from_millis(100), &[]).unwrap_err());
        let error = connecting.join().unwrap();
        assert!(
            matches!(&error, Error::Endpoint(EndpointError::Timeout { what, .. }) if what == "connecting"),
            "{error:?}"
        );
    });
    drop(listener);
    let error = SenderLink::connect(&path, LIMIT, &[]).unwrap_err();
    assert!(matches!(error, Error::Endpoint(EndpointError::NobodyListens { errno: 111, .. })), "{error:?}");
}

#[test]
fn only_a_private_directory_of_ours_is_used() {
    use std::os::unix::fs::PermissionsExt;
    let parent = tempfile::tempdir().unwrap();
    let created = parent.path().join("created");
    WorkerEndpoint::create(options(&created, parent.path())).unwrap();
    assert_eq!(created.metadata().unwrap().permissions().mode() & 0o7777, 0o700);

    let refused = |path: &Path, wanted: &str| {
        let error = WorkerEndpoint::create(options(path, parent.path())).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    };
    for mode in [0o701, 0o750, 0o777, 0o1777] {
        std::fs::set_permissions(&created, std::fs::Permissions::from_mode(mode)).unwrap();
        refused(&created, &format!("its mode is {mode:04o}, 0700 wanted"));
    }
    std::fs::set_permissions(&created, std::fs::Permissions::from_mode(0o700)).unwrap();
    let link = parent.path().join("link");
    std::os::unix::fs::symlink(&created, &link).unwrap();
    refused(&link, "symbolic link");
    let file = parent.path().join("file");
    std::fs::write(&file, b"").unwrap();
    refused(&file, "no directory");
    refused(&parent.path().join("missing/below"), "No such file");
    refused(&parent.path().join("x".repeat(100)), "at most 107 fit");
    assert_eq!(names(&created), Vec::<String>::new());
}

#[test]
fn dead_sockets_go_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(directory.path(), private).unwrap();
    let at = |name: &str| directory.path().join(name);
    let alive = WorkerEndpoint::create(options(directory.path(), directory.path())).unwrap();
    // A listener that is dropped leaves its name, as one that is killed.
    for name in ["mmcopy-0123456789abcdef.sock", "other-0123456789abcdef.sock", "mmcopy-0123456789abcde.sock"] {
        drop(super::directory::listen(&at(name), false).unwrap());
    }
    std::fs::write(at("mmcopy-1111111111111111.sock"), b"no socket").unwrap();
    std::fs::rename(at("mmcopy-0123456789abcde.sock"), at("mmcopy-2222222222222222.new")).unwrap();
    let second = WorkerEndpoint::create(options(directory.path(), directory.path())).unwrap();
    assert_eq!(second.statistics().unwrap().swept, 1);
    assert!(!at("mmcopy-0123456789abcdef.sock").exists());
    for name in ["other-0123456789abcdef.sock", "mmcopy-1111111111111111.sock", "mmcopy-2222222222222222.new"] {
        assert!(std::fs::symlink_metadata(at(name)).is_ok(), "{name}");
    }
    SenderLink::connect(alive.path(), LIMIT, &[]).unwrap();
}
