use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use super::*;
use crate::memory::Target;
use crate::segment::write;

const NEVER: Interrupted<'static> = &|| false;

fn opener(shm: &Path) -> Arc<Opener> {
    let prefixes = vec!["ours-".to_owned(), "other-".to_owned()];
    Arc::new(Opener::new(shm.to_path_buf(), prefixes, None, Duration::from_secs(5)))
}

fn segment(shm: &Path, name: &str, bytes: &[u8]) -> Item {
    let named = SegmentName::parse(name).unwrap();
    write(shm, &named, Source::from_slice(bytes), None, NonZeroUsize::MIN).unwrap();
    Item::named(name, 0, bytes.len() as u64, "")
}

fn inline(bytes: &'static [u8]) -> Item {
    Item::inline(Source::from_slice(bytes), Box::new(()))
}

fn names(shm: &Path) -> Vec<String> {
    let mut all: Vec<_> =
        shm.read_dir().unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

fn threads(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

#[test]
fn all_items_are_open_and_read_and_nothing_is_left() {
    let shm = tempfile::tempdir().unwrap();
    let opener = opener(shm.path());
    let large: Vec<u8> = (0..3 << 20).map(|at: u32| (at >> 5) as u8).collect();
    let request = Request::new(&opener, vec![segment(shm.path(), "ours-1", &large), inline(b"abcdef")]);
    request.open_all().unwrap();
    assert_eq!(request.entries().iter().map(|entry| entry.nbytes()).collect::<Vec<_>>(), [3 << 20, 6]);
    assert_eq!(request.unlink().num_removed, 1);
    assert_eq!(names(shm.path()), [""; 0]);
    let extent =
        |source, source_start, dest_start, nbytes| Extent { source, base: source, source_start, dest_start, nbytes };
    for num_threads in [1, 3] {
        let (mut first, mut second) = (vec![0; 3 << 20], [0; 8]);
        let bases = [Target::from_slice(&mut first), Target::from_slice(&mut second)];
        let extents = Extents(vec![extent(0, 5, 0, (3 << 20) - 5), extent(0, 0, (3 << 20) - 5, 5), extent(1, 1, 2, 3)]);
        request.read(&extents, &bases, threads(num_threads), NEVER).unwrap();
        assert!(first[..(3 << 20) - 5] == large[5..] && first[(3 << 20) - 5..] == large[..5]);
        assert_eq!(&second, b"\0\0bcd\0\0\0");
    }
    let given_back = request.close(false);
    assert_eq!((given_back.num_removed, given_back.failures), (0, vec![]));
    assert!(request.entries().is_empty());
    assert!(opener.reaper.join(Duration::from_secs(60)));
}

#[test]
fn the_first_bad_item_fails_all_and_every_segment_goes() {
    let shm = tempfile::tempdir().unwrap();
    let item = |name: &str, offset| Item::named(name, offset, 3, "");
    for (bad, left) in [
        (item("ours-gone", 0), vec![]),
        (item("foreign-1", 0), vec!["foreign-1".to_owned()]),
        (item("a/b", 0), vec![]),
        (item("ours-1", 0), vec![]),
        (item("mmcopyarena-x", 0), vec![]),
        (item("other-short", 2), vec![]),
    ] {
        segment(shm.path(), "ours-1", b"abc");
        segment(shm.path(), "ours-3", b"abc");
        if let Item::Segment { name: Ok(name), .. } = &bad
            && name.as_str() != "ours-gone"
            && name.as_str() != "ours-1"
        {
            segment(shm.path(), name.as_str(), b"abc");
        }
        let request = Request::new(&opener(shm.path()), vec![item("ours-1", 0), bad, item("ours-3", 0)]);
        let error = request.open_all().unwrap_err();
        let given_back = request.close(true);
        assert_eq!(names(shm.path()), left, "{error}");
        assert!(given_back.failures.is_empty());
        left.iter().for_each(|name| std::fs::remove_file(shm.path().join(name)).unwrap());
    }
}

#[test]
fn what_is_out_of_reach_is_named_and_the_rest_is_open() {
    let shm = tempfile::tempdir().unwrap();
    let lease = Item::named("mmcopyarena-0123456789abcdef-0-1", 0, 3, "mmcopy-0123456789abcdef");
    let items = vec![Item::named("ours-gone", 0, 3, ""), segment(shm.path(), "ours-1", b"abc"), lease];
    let request = Request::new(&opener(shm.path()), items);
    let missing = request.open_reachable().unwrap();
    assert_eq!(missing.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(request.entries().len(), 1);
    assert_eq!(names(shm.path()), ["ours-1"]);
    assert_eq!(request.close(true).num_removed, 1);
    assert_eq!(names(shm.path()), [""; 0]);
}

#[test]
fn extents_outside_an_item_or_a_base_are_refused() {
    let shm = tempfile::tempdir().unwrap();
    let request = Request::new(&opener(shm.path()), vec![inline(b"abc")]);
    request.open_all().unwrap();
    for (source, base, source_start, dest_start, nbytes) in [
        (1, 0, 0, 0, 1),
        (0, 1, 0, 0, 1),
        (0, 0, 1, 0, 3),
        (0, 0, 0, 2, 3),
        (0, 0, u64::MAX, 0, 2),
        (0, 0, 0, u64::MAX, 2),
    ] {
        let mut bytes = [0; 4];
        let extents = Extents(vec![Extent { source, base, source_start, dest_start, nbytes }]);
        let read = request.read(&extents, &[Target::from_slice(&mut bytes)], threads(1), NEVER);
        assert!(matches!(read, Err(Error::NoSuch { .. } | Error::PieceRange { .. })), "{read:?}");
        assert!(request.runs(&extents, &[0], 0, 1 << 30).is_err());
        assert_eq!(bytes, [0; 4]);
    }
    assert_eq!(
        request.follow(Growing { item: 0, start: 0, nbytes: 1, dest: 0 }, 1, 1, NEVER),
        Err(Error::NotALease { index: 0 })
    );
}
