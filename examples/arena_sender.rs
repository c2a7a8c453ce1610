//! A gateway in Rust: sends a few tensors to a worker on this host through an arena, without Python.
//!
//! ```text
//! cargo run --example arena_sender -- SOCKET [COUNT]
//! ```
//!
//! SOCKET is the path that a worker advertises (`mmcopy.WorkerEndpoint.path`). Each line of the output is a handle, the
//! four fields that go into the message to the worker: name, offset, nbytes, owner. The last line says that the worker has
//! released everything.

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::{Duration, Instant};

use mmcopy::arena::{Arena, Options};
use mmcopy::cast::Cast;
use mmcopy::endpoint::SenderLink;
use mmcopy::memory::Source;

const LIMIT: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("usage: arena_sender SOCKET [COUNT]")?;
    let count: usize = arguments.next().map_or(Ok(3), |count| count.parse())?;
    let num_threads = NonZeroUsize::new(4).ok_or("no threads")?;

    // Once: the memory, and the worker that may read it.
    let arena = Arena::create(&Options { num_threads, ..Options::new(64 << 20) })?;
    let link = SenderLink::connect(Path::new(&socket), LIMIT, &[])?;
    let worker = arena.hand_over(&link, LIMIT)?;

    // For each tensor: a lease, filled with a cast on the way. The handle could be sent before the writing.
    for number in 0..count {
        let pixels: Vec<u8> = (0..100_000 * (number + 1)).flat_map(|at| pixel(number, at).to_le_bytes()).collect();
        let lease = arena.take(&[pixels.len() / 2], &[worker], LIMIT)?.remove(0);
        lease.write(Source::from_slice(&pixels), Some(Cast::Float32ToBfloat16), num_threads)?;
        lease.commit()?;
        let handle = lease.handle();
        println!("{} {} {} {}", handle.name(), handle.offset(), handle.nbytes(), handle.owner_id());
    }

    let begun = Instant::now();
    while arena.statistics()?.leases_out > 0 {
        if begun.elapsed() > LIMIT {
            return Err(format!("not released within {LIMIT:?}: {:?}", arena.statistics()?).into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("released {}", arena.statistics()?.released);
    Ok(())
}

/// A picture that a test can compute as well.
fn pixel(number: usize, at: usize) -> f32 {
    ((at * (number + 3)) % 251) as f32 / 250.0
}
