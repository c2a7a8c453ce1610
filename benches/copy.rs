//! Memory to memory: `memory/copy/<size>/<threads>`. The bytes are checked before anything is timed.

use std::hint::black_box;
use std::num::NonZeroUsize;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mmcopy::copy::copy;
use mmcopy::memory::{Source, Target};

const SIZES: [(&str, usize); 4] = [("64KiB", 64 << 10), ("1MiB", 1 << 20), ("16MiB", 16 << 20), ("64MiB", 64 << 20)];
const THREADS: [usize; 3] = [1, 2, 4];

fn copies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("memory/copy");
    for (size, nbytes) in SIZES {
        let source: Vec<u8> = (0..nbytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        let mut target = vec![0; nbytes];
        group.throughput(Throughput::Bytes(nbytes as u64));
        for threads in THREADS {
            let num_threads = NonZeroUsize::new(threads).expect("at least one thread");
            target.fill(0);
            copy(Source::from_slice(&source), Target::from_slice(&mut target), num_threads).expect("equal lengths");
            assert!(source == target, "{size} by {threads} threads: the bytes differ");
            group.bench_function(BenchmarkId::new(size, threads), |bencher| {
                bencher.iter(|| {
                    copy(black_box(Source::from_slice(&source)), Target::from_slice(&mut target), num_threads)
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, copies);
criterion_main!(benches);
