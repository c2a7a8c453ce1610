//! Casting while copying: `<from>/<to>/<source size>/<threads>`, throughput in bytes of the source. Every element is
//! checked before anything is timed.

use std::hint::black_box;
use std::num::NonZeroUsize;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::{bf16, f16};
use mmcopy::cast::{Cast, cast};
use mmcopy::dtype::Dtype;
use mmcopy::memory::{Source, Target};

const SIZES: [(&str, usize); 3] = [("64KiB", 64 << 10), ("1MiB", 1 << 20), ("64MiB", 64 << 20)];
const THREADS: [usize; 2] = [1, 2];

/// Small whole numbers, which every one of the dtypes has exactly, over and over.
fn encode(dtype: Dtype, elements: usize) -> Vec<u8> {
    let numbers = (0..=250_u8).cycle().take(elements.min(251 * 64));
    let period: Vec<u8> = match dtype {
        Dtype::Float32 => numbers.flat_map(|number| f32::from(number).to_le_bytes()).collect(),
        Dtype::Bfloat16 => numbers.flat_map(|number| bf16::from(number).to_le_bytes()).collect(),
        Dtype::Float16 => numbers.flat_map(|number| f16::from(number).to_le_bytes()).collect(),
        Dtype::Uint8 => numbers.collect(),
        other => unreachable!("no cast from or to {}", other.name()),
    };
    let mut bytes = period.repeat(elements.div_ceil(251 * 64));
    bytes.truncate(elements * dtype.itemsize());
    bytes
}

fn casts(criterion: &mut Criterion) {
    for kind in Cast::ALL {
        let mut group = criterion.benchmark_group(format!("{}/{}", kind.from().name(), kind.to().name()));
        for (size, nbytes) in SIZES {
            let elements = nbytes / kind.from().itemsize();
            let source = encode(kind.from(), elements);
            let wanted = encode(kind.to(), elements);
            let mut target = vec![0; wanted.len()];
            group.throughput(Throughput::Bytes(nbytes as u64));
            for threads in THREADS {
                let num_threads = NonZeroUsize::new(threads).expect("at least one thread");
                target.fill(0);
                cast(kind, Source::from_slice(&source), Target::from_slice(&mut target), num_threads)
                    .expect("equal elements");
                assert!(target == wanted, "{kind:?} of {size} by {threads} threads: the elements differ");
                group.bench_function(BenchmarkId::new(size, threads), |bencher| {
                    bencher.iter(|| {
                        cast(kind, black_box(Source::from_slice(&source)), Target::from_slice(&mut target), num_threads)
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, casts);
criterion_main!(benches);
