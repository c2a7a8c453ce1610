//! Segments in `/dev/shm`: `segment/write`, `segment/write_bfloat16` (float32 cast on the way; bytes of the source),
//! `segment/read` and `segment/round_trip` (write, open, read, unlink), each `/<size>/<threads>`. The bytes are checked
//! before anything is timed.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mmcopy::cast::{Cast, cast};
use mmcopy::memory::{Source, Target};
use mmcopy::name::SegmentName;
use mmcopy::segment::{Segment, write};

const SIZES: [(&str, usize); 3] = [("64KiB", 64 << 10), ("1MiB", 1 << 20), ("64MiB", 64 << 20)];
const THREADS: [usize; 2] = [1, 2];

fn segments(criterion: &mut Criterion) {
    // A directory of its own, so that nothing else is removed and nothing is left when a check fails.
    let shm = tempfile::Builder::new().prefix("mmcopy-bench-").tempdir_in("/dev/shm").expect("a writable /dev/shm");
    let name = SegmentName::parse("segment").expect("a name");
    for (size, nbytes) in SIZES {
        let source: Vec<u8> = (0..nbytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        for threads in THREADS {
            let num_threads = NonZeroUsize::new(threads).expect("at least one thread");
            check(shm.path(), &name, &source, num_threads);
            writing(criterion, shm.path(), &name, (size, threads), &source);
            reading(criterion, shm.path(), &name, (size, threads), &source);
        }
    }
}

fn check(shm: &Path, name: &SegmentName, source: &[u8], num_threads: NonZeroUsize) {
    let kind = Cast::Float32ToBfloat16;
    let mut narrow = vec![0; source.len() / 2];
    cast(kind, Source::from_slice(source), Target::from_slice(&mut narrow), num_threads).expect("a cast");
    for (cast, wanted) in [(None, source), (Some(kind), &narrow)] {
        write(shm, name, Source::from_slice(source), cast, num_threads).expect("a segment");
        let segment = Segment::open(shm, name).expect("the segment");
        let mut target = vec![0; wanted.len()];
        segment.read_into(Target::from_slice(&mut target), 0, num_threads).expect("its bytes");
        assert!(target == wanted, "{cast:?} of {} bytes: the bytes differ", source.len());
        assert_eq!(segment.unlink(), Ok(true));
    }
}

fn writing(criterion: &mut Criterion, shm: &Path, name: &SegmentName, (size, threads): (&str, usize), source: &[u8]) {
    let num_threads = NonZeroUsize::new(threads).expect("at least one thread");
    for (verb, cast) in [("write", None), ("write_bfloat16", Some(Cast::Float32ToBfloat16))] {
        let mut group = criterion.benchmark_group(format!("segment/{verb}"));
        group.throughput(Throughput::Bytes(source.len() as u64));
        group.bench_function(BenchmarkId::new(size, threads), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    let start = Instant::now();
                    write(shm, name, Source::from_slice(source), cast, num_threads).expect("a segment");
                    spent += start.elapsed();
                    std::fs::remove_file(name.path_in(shm)).expect("removed");
                }
                spent
            });
        });
        group.finish();
    }
}

fn reading(criterion: &mut Criterion, shm: &Path, name: &SegmentName, (size, threads): (&str, usize), source: &[u8]) {
    let num_threads = NonZeroUsize::new(threads).expect("at least one thread");
    let mut target = vec![0; source.len()];
    write(shm, name, Source::from_slice(source), None, num_threads).expect("a segment");
    let segment = Segment::open(shm, name).expect("the segment");
    let mut group = criterion.benchmark_group("segment/read");
    group.throughput(Throughput::Bytes(source.len() as u64));
    group.bench_function(BenchmarkId::new(size, threads), |bencher| {
        bencher.iter(|| segment.read_into(Target::from_slice(&mut target), 0, num_threads).expect("its bytes"));
    });
    group.finish();
    segment.unlink().expect("removed");
    drop(segment);

    let mut group = criterion.benchmark_group("segment/round_trip");
    group.throughput(Throughput::Bytes(source.len() as u64));
    group.bench_function(BenchmarkId::new(size, threads), |bencher| {
        bencher.iter(|| {
            write(shm, name, Source::from_slice(source), None, num_threads).expect("a segment");
            let segment = Segment::open(shm, name).expect("the segment");
            segment.read_into(Target::from_slice(&mut target), 0, num_threads).expect("its bytes");
            segment.unlink().expect("removed");
        });
    });
    group.finish();
}

criterion_group!(benches, segments);
criterion_main!(benches);
