//! Memory to memory, stored by way of the cache and past it: `memory/store/<size>/<store>-<threads>`, each thread with a
//! part of its own. The bytes are checked before anything is timed.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mmcopy::memory::{Source, Target};
use mmcopy::streaming::{Store, copy};

const SIZES: [(&str, usize); 4] = [("256KiB", 256 << 10), ("2MiB", 2 << 20), ("16MiB", 16 << 20), ("64MiB", 64 << 20)];
const STORES: [(&str, Store); 2] = [("cached", Store::Cached), ("streaming", Store::Streaming)];
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// As long as the work is much more than starting the threads.
const PASSES: usize = 8;

fn copy_passes(source: &[u8], target: &mut [u8], store: Store, threads: usize) {
    let part = source.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (source, target) in source.chunks(part).zip(target.chunks_mut(part)) {
            scope.spawn(move || {
                for _ in 0..PASSES {
                    copy(black_box(Source::from_slice(source)), Target::from_slice(target), store);
                }
            });
        }
    });
}

fn stores(criterion: &mut Criterion) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut group = criterion.benchmark_group("memory/store");
    for (size, nbytes) in SIZES {
        let source: Vec<u8> = (0..nbytes).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect();
        let mut target = vec![0; nbytes];
        group.throughput(Throughput::Bytes((PASSES * nbytes) as u64));
        for threads in THREADS.into_iter().filter(|threads| *threads <= cores) {
            for (name, store) in STORES {
                target.fill(0);
                copy_passes(&source, &mut target, store, threads);
                assert!(source == target, "{size} {name} by {threads} threads: the bytes differ");
                group.bench_function(BenchmarkId::new(size, format!("{name}-{threads}")), |bencher| {
                    bencher.iter(|| copy_passes(&source, &mut target, store, threads));
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, stores);
criterion_main!(benches);
