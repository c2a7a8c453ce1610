//! Segments in a directory of their own: what is written is read, and every unusual file is an error with its numbers.

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{FileType, Mode};
use tempfile::TempDir;

use super::*;
use crate::Error;
use crate::cast::Cast;
use crate::fork::Process;
use crate::memory::{Source, Target};
use crate::name::SegmentName;

const ONE: NonZeroUsize = NonZeroUsize::MIN;
const MIB: usize = 1 << 20;

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn named(name: &str) -> SegmentName {
    SegmentName::parse(name).unwrap()
}

fn threads(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

fn pattern(nbytes: usize) -> Vec<u8> {
    (0..nbytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

fn read(segment: &Segment, offset: u64, nbytes: usize, num_threads: usize) -> crate::Result<Vec<u8>> {
    let mut bytes = vec![0; nbytes];
    segment.read_into(Target::from_slice(&mut bytes), offset, threads(num_threads))?;
    Ok(bytes)
}

fn sparse(path: &Path, nbytes: u64) -> fs::File {
    let file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(nbytes).unwrap();
    file
}

#[test]
fn what_is_written_is_read() {
    let shm = directory();
    for (number, nbytes) in [0, 1, 4095, 4096, 4097, 65536, MIB - 1, MIB, MIB + 1, 5 * MIB + 3].into_iter().enumerate()
    {
        let bytes = pattern(nbytes);
        let name = named(&format!("segment-{number}"));
        let written = write(shm.path(), &name, Source::from_slice(&bytes), None, threads(2)).unwrap();
        assert_eq!(written, nbytes as u64);
        let metadata = fs::metadata(name.path_in(shm.path())).unwrap();
        assert_eq!((metadata.len(), metadata.mode() & 0o7777), (nbytes as u64, 0o600));
        let segment = Segment::open(shm.path(), &name).unwrap();
        assert_eq!((segment.file_nbytes(), segment.uid()), (nbytes as u64, metadata.uid()));
        assert!(read(&segment, 0, nbytes, 3).unwrap() == bytes, "{nbytes} bytes");
        let tail = nbytes / 3;
        assert!(read(&segment, (nbytes - tail) as u64, tail, 1).unwrap() == bytes[nbytes - tail..]);
        assert_eq!(segment.unlink(), Ok(true));
        assert!(!name.path_in(shm.path()).exists());
    }
    assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 0);
}

#[test]
fn a_cast_on_the_way_gives_the_same_bytes_as_a_cast_before() {
    let shm = directory();
    let source = pattern(3 * MIB + 4);
    for (number, kind) in Cast::ALL.into_iter().enumerate() {
        let mut wanted = vec![0; kind.dst_nbytes(source.len()).unwrap()];
        crate::cast::cast(kind, Source::from_slice(&source), Target::from_slice(&mut wanted), ONE).unwrap();
        for num_threads in [1, 3] {
            let name = named(&format!("cast-{number}-{num_threads}"));
            let written =
                write(shm.path(), &name, Source::from_slice(&source), Some(kind), threads(num_threads)).unwrap();
            assert_eq!(written, wanted.len() as u64);
            assert!(fs::read(name.path_in(shm.path())).unwrap() == wanted, "{kind:?} by {num_threads}");
        }
    }
}

#[test]
fn an_existing_file_is_left_alone() {
    let shm = directory();
    let name = named("taken");
    fs::write(name.path_in(shm.path()), b"theirs").unwrap();
    symlink("nowhere", shm.path().join("link")).unwrap();
    for taken in ["taken", "link"] {
        let error = write(shm.path(), &named(taken), Source::from_slice(b"ours"), None, ONE).unwrap_err();
        assert_eq!(error, Error::Exists { path: shm.path().join(taken) });
    }
    assert_eq!(fs::read(name.path_in(shm.path())).unwrap(), b"theirs");
    assert!(!shm.path().join("nowhere").exists());
}

#[test]
fn a_source_of_partial_elements_creates_no_file() {
    let shm = directory();
    let outcome = write(shm.path(), &named("odd"), Source::from_slice(b"abcdefg"), Some(Cast::Float32ToBfloat16), ONE);
    assert_eq!(outcome, Err(Error::PartialElement { nbytes: 7, dtype: "float32", itemsize: 4 }));
    assert_eq!(fs::read_dir(shm.path()).unwrap().count(), 0);
}

#[test]
fn a_directory_that_is_missing_is_not_found() {
    let shm = directory();
    let missing = shm.path().join("missing");
    let path = missing.join("a");
    assert_eq!(
        write(&missing, &named("a"), Source::from_slice(b"x"), None, ONE),
        Err(Error::NotFound { path: path.clone() })
    );
    assert_eq!(Segment::open(&missing, &named("a")).unwrap_err(), Error::NotFound { path });
    assert_eq!(unlink(&missing, &named("a"), Process::current()), Ok(false));
}

#[test]
fn a_file_that_is_not_regular_is_refused_at_once_and_left_alone() {
    let shm = directory();
    let at = |name: &str| shm.path().join(name);
    fs::write(at("file"), b"abc").unwrap();
    fs::create_dir(at("directory")).unwrap();
    symlink("file", at("link")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    // Nobody writes to it: an open that waits for a writer would hang here.
    rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let _listener = UnixListener::bind(at("socket")).unwrap();
    for (name, kind) in [
        ("directory", "a directory"),
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("fifo", "a FIFO"),
        ("socket", "a socket"),
    ] {
        for error in [
            Segment::open(shm.path(), &named(name)).unwrap_err(),
            unlink(shm.path(), &named(name), Process::current()).unwrap_err(),
        ] {
            assert!(matches!(&error, Error::Kind { kind: found, .. } if *found == kind), "{name}: {error:?}");
            assert!(error.os().is_some_and(|(errno, path)| errno > 0 && path == at(name)));
        }
        assert!(at(name).symlink_metadata().is_ok(), "{name} was removed");
    }
}

#[test]
fn a_range_outside_the_file_is_refused_with_the_numbers() {
    let shm = directory();
    let name = named("short");
    write(shm.path(), &name, Source::from_slice(b"0123456789"), None, ONE).unwrap();
    let segment = Segment::open(shm.path(), &name).unwrap();
    for (offset, nbytes) in [(0, 10), (10, 0), (3, 7)] {
        assert_eq!(segment.check(offset, nbytes), Ok(()));
    }
    for (offset, wanted_nbytes) in
        [(0, 11), (11, 0), (10, 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX), (u64::MAX - 1, 10)]
    {
        let error = segment.check(offset, wanted_nbytes).unwrap_err();
        assert_eq!(error, Error::Size { name: "short".into(), offset, wanted_nbytes, file_nbytes: 10 });
        for number in [offset, wanted_nbytes, 10] {
            assert!(error.to_string().contains(&number.to_string()), "{error}");
        }
    }
    assert!(matches!(read(&segment, 5, 6, 1), Err(Error::Size { offset: 5, wanted_nbytes: 6, file_nbytes: 10, .. })));
}

#[test]
fn a_file_that_a_peer_cuts_is_an_error_with_what_is_left() {
    let shm = directory();
    for (number, (nbytes, left, num_threads)) in
        [(10, 4, 1), (8 * MIB, 5 * MIB + 1, 3), (8 * MIB, 0, 3)].into_iter().enumerate()
    {
        let name = named(&format!("cut-{number}"));
        write(shm.path(), &name, Source::from_slice(&pattern(nbytes)), None, ONE).unwrap();
        let segment = Segment::open(shm.path(), &name).unwrap();
        sparse_end(&name.path_in(shm.path()), left as u64);
        let error = read(&segment, 1, nbytes - 1, num_threads).unwrap_err();
        assert_eq!(
            error,
            Error::Truncated {
                name: name.to_string(),
                offset: 1,
                wanted_nbytes: nbytes as u64 - 1,
                found_nbytes: (left as u64).saturating_sub(1),
                file_nbytes: nbytes as u64,
            }
        );
    }
}

fn sparse_end(path: &Path, nbytes: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(nbytes).unwrap();
}

#[test]
fn a_name_is_removed_once_and_only_while_it_is_this_file() {
    let shm = directory();
    let name = named("once");
    let path = name.path_in(shm.path());
    write(shm.path(), &name, Source::from_slice(b"first"), None, ONE).unwrap();
    let first = Segment::open(shm.path(), &name).unwrap();
    let second = Segment::open(shm.path(), &name).unwrap();
    assert_eq!(first.unlink(), Ok(true));
    assert_eq!(second.unlink(), Ok(false));
    write(shm.path(), &name, Source::from_slice(b"another"), None, ONE).unwrap();
    assert_eq!(first.unlink(), Ok(false));
    let third = Segment::open(shm.path(), &name).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"a stranger's").unwrap();
    assert_eq!(third.unlink(), Ok(false));
    assert_eq!(fs::read(&path).unwrap(), b"a stranger's");
    assert_eq!(read(&third, 0, 7, 1).unwrap(), b"another", "an open file outlives its name");
}

#[test]
fn racing_removals_have_one_winner() {
    let shm = directory();
    let name = named("raced");
    write(shm.path(), &name, Source::from_slice(b"x"), None, ONE).unwrap();
    let segments: Vec<Segment> = (0..4).map(|_| Segment::open(shm.path(), &name).unwrap()).collect();
    let wins: usize = std::thread::scope(|scope| {
        let removals: Vec<_> = segments.iter().map(|segment| scope.spawn(|| segment.unlink())).collect();
        removals.into_iter().map(|removal| usize::from(removal.join().unwrap().unwrap())).sum()
    });
    assert_eq!(wins, 1);
}

#[test]
fn a_forked_child_reads_and_removes_nothing() {
    let shm = directory();
    let name = named("handed");
    write(shm.path(), &name, Source::from_slice(b"x"), None, ONE).unwrap();
    let closed =
        Err(Error::Closed { what: format!("{}, which is the parent process's", shm.path().join("handed").display()) });
    assert_eq!(unlink(shm.path(), &name, Process::elsewhere()), closed);
    assert!(shm.path().join("handed").exists());
}

#[test]
fn taking_back_tells_whether_it_was_there() {
    let shm = directory();
    let name = named("back");
    write(shm.path(), &name, Source::from_slice(b"x"), None, ONE).unwrap();
    assert_eq!(unlink(shm.path(), &name, Process::current()), Ok(true));
    assert_eq!(unlink(shm.path(), &name, Process::current()), Ok(false));
}

#[test]
fn files_of_2_and_4_gib_are_read_at_their_very_end() {
    let shm = directory();
    for (name, nbytes) in [("2g", (2_u64 << 30) + 4096), ("4g", (4_u64 << 30) + 1)] {
        let name = named(name);
        let file = sparse(&name.path_in(shm.path()), nbytes);
        std::os::unix::fs::FileExt::write_all_at(&file, b"end", nbytes - 3).unwrap();
        let segment = Segment::open(shm.path(), &name).unwrap();
        assert_eq!(segment.file_nbytes(), nbytes);
        assert_eq!(segment.check(0, nbytes), Ok(()));
        assert!(segment.check(0, nbytes + 1).is_err());
        assert_eq!(read(&segment, nbytes - 5, 5, 1).unwrap(), b"\0\0end");
    }
}
